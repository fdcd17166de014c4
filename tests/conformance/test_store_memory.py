"""The in-memory reference passes the store suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("support.store_suite")

from support.memory_store import MemoryBucket  # noqa: E402
from support.store_suite import *  # noqa: E402, F403
from support.store_suite import Place  # noqa: E402


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place("s3://bucket/run1", MemoryBucket())
    yield made
    made.close()
