"""Attempt numbers: the same on all ranks whatever failed on one, and never one from before a restore."""

from __future__ import annotations

import threading

import pytest
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket, MemoryStore

from objckpt import Checkpointer, SaveOptions
from objckpt.errors import UsageError
from objckpt.log import read_log

URL = "s3://bucket/run"


def test_a_step_saved_again_after_a_restore_has_another_attempt() -> None:
    bucket = MemoryBucket()
    with memory_engine(bucket), Checkpointer(URL, options=SaveOptions(uploader="thread")) as ckpt:
        ckpt.save(1, {"n": 1}).wait_committed(20)
        ckpt.save(2, {"n": 2}).wait_committed(20)
        ckpt.save(2, {"n": 3}, overwrite=True).wait_committed(20)
        into = {"n": 0}
        ckpt.restore(into, step=1)
        ckpt.save(2, {"n": 4}).wait_committed(20)
    attempts = [c.attempt.rpartition("-")[2] for c in read_log(MemoryStore(bucket, URL)).commits]
    assert attempts == ["0001", "0001", "0002", "1001"]


def test_numbers_count_tries_not_commits() -> None:
    ckpt = Checkpointer(URL, options=SaveOptions(uploader="thread"))
    assert [ckpt._flights.number(step) for step in (5, 6, 6, 5)] == [1, 1, 2, 2]
    ckpt._flights.restoring()
    assert ckpt._flights.number(6) == 1001


def test_a_save_from_before_a_restore_does_not_move_the_line() -> None:
    bucket = MemoryBucket()
    with memory_engine(bucket), Checkpointer(URL, options=SaveOptions(uploader="thread")) as ckpt:
        ckpt.save(50, {"n": 50}).wait_committed(20)
        go = threading.Event()
        bucket.hook = lambda phase, operation, key: operation == "put_pieces" and go.wait(20) and None
        late = ckpt.save(200, {"n": 200})
        threading.Timer(0.5, go.set).start()
        assert ckpt.restore({"n": 0}, step=50) == 50
        after = ckpt.save(60, {"n": 60})
        late.wait_committed(20)
        after.wait_committed(20)
    commits = {c.step: c for c in read_log(MemoryStore(bucket, URL)).commits}
    assert commits[60].parent == commits[50].seq


@pytest.mark.parametrize("step", [[1], None, 1.0, True, -1, 10**12])
def test_a_step_that_is_none_is_refused_before_it_counts(step: object) -> None:
    ckpt = Checkpointer(URL, options=SaveOptions(uploader="thread"))
    with pytest.raises(UsageError, match="step must be an int in"):
        ckpt.save(step, {"n": 1})  # type: ignore[arg-type]
    assert ckpt._flights._tries == {}


def test_a_close_that_waits_for_deletions_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("objckpt.flights._QUIET_S", 0.05)
    bucket, go = MemoryBucket(), threading.Event()
    options = SaveOptions(uploader="thread", keep_last=1)
    with memory_engine(bucket), Checkpointer(URL, options=options) as ckpt:
        ckpt.save(1, {"n": 1}).wait_committed(20)
        bucket.hook = lambda phase, operation, key: operation == "delete" and go.wait(20) and None
        ckpt.save(2, {"n": 2}).wait_committed(20)
        threading.Timer(0.5, go.set).start()
    assert "waiting up to 27 s for the uploader's clean-up" in caplog.text
    assert [c.step for c in read_log(MemoryStore(bucket, URL)).checkpoints] == [2]
