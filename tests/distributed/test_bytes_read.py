"""How many bytes a job reads from the store, all its ranks together, by what the server has sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import Ranks
from support.stub_s3 import Reply, Request, StubBucket, StubServer


class Counting(StubBucket):
    """Counts the bytes of what is got."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __call__(self, request: Request) -> Reply:
        reply = super().__call__(request)
        if request.operation == "GetObject":
            with self._lock:
                self.sent += len(reply.body)
        return reply

    @property
    def packs(self) -> int:
        return sum(len(data) for key, data in self.objects.items() if re.search(r"\.pack$", key))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    bucket = Counting()
    with StubServer(bucket) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield bucket


def test_a_changed_layout_is_read_once(ranks: Ranks, jobs: Path, counting: Counting) -> None:
    ranks.run(4, jobs, "save_rows", "s3://b/rows")
    assert counting.packs == 8 << 20
    for placement in ("columns", "whole", "replicas of rows", "rows"):
        counting.sent = 0
        assert ranks.run(4, jobs, "restore_columns", "s3://b/rows", placement) == [True] * 4
        assert 8 << 20 <= counting.sent <= 1.1 * (8 << 20), placement


def test_a_data_parallel_job_reads_once_what_all_ranks_hold(ranks: Ranks, jobs: Path, counting: Counting) -> None:
    assert ranks.run(4, jobs, "ddp_bytes", "s3://b/ddp") == [True] * 4
    assert counting.packs == 8 << 20, "and it is written once"
    assert 8 << 20 <= counting.sent <= 1.1 * (8 << 20)
