"""Each real server passes the store suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("support.store_suite")

from support.store_suite import *  # noqa: E402, F403
from support.store_suite import Place  # noqa: E402


@pytest.fixture
def place(s3_url: str) -> Iterator[Place]:
    made = Place(s3_url, None)
    yield made
    made.close()
