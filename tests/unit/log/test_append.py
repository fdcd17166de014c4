"""Appending: one winner per slot, lost answers are recognised, replaced writers are fenced."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.log_writer import commit, writer
from support.memory_store import MemoryStore

from objckpt.errors import AmbiguousWriteError, StoreError, WriterFencedError
from objckpt.format import keys
from objckpt.format.records import Commit, Open
from objckpt.log import Log, append, read_log


def test_a_replaced_writer_is_fenced_and_its_late_checkpoint_is_nowhere() -> None:
    store = MemoryStore()
    old = writer(store, 1)
    commit(old, 1)
    new = writer(store, 2)
    with pytest.raises(WriterFencedError, match="replaced by session"):
        commit(old, 2)
    commit(new, 3)
    with pytest.raises(WriterFencedError):
        commit(old, 4)
    assert [c.step for c in read_log(store).checkpoints] == [1, 3]


def test_a_new_agent_of_the_same_session_keeps_its_epoch() -> None:
    store = MemoryStore()
    commit(writer(store, 1), 1)
    again = writer(store, 1)
    commit(again, 2)
    assert again.epoch == 1 and [type(r) for r in read_log(store).records] == [Open, Commit, Commit]


class Faulty(MemoryStore):
    """Lets a test stand between the log and `put_if_absent`."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Exception | None] = []
        self.after: list[Exception | None] = []
        self.puts = 0

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.puts += 1
        if self.before and (error := self.before.pop(0)) is not None:
            raise error
        super().put_if_absent(key, data)
        if self.after and (error := self.after.pop(0)) is not None:
            raise error


def lost() -> AmbiguousWriteError:
    return AmbiguousWriteError("connection reset")


def test_an_answer_lost_after_the_effect_is_a_success_and_one_record() -> None:
    store = Faulty()
    by = writer(store)
    store.after = [lost()]
    commit(by, 1)
    assert store.puts == 2 and [c.step for c in read_log(store).checkpoints] == [1]


def test_a_request_lost_before_the_effect_is_repeated() -> None:
    store = Faulty()
    by = writer(store)
    store.before = [lost(), lost()]
    commit(by, 1)
    assert store.puts == 4 and [c.step for c in read_log(store).checkpoints] == [1]


def test_without_a_clear_outcome_the_error_says_that_it_may_still_appear() -> None:
    store = Faulty()
    by = writer(store)
    by.deadline_s = 0.2
    store.before = [lost()] * 1000
    with pytest.raises(AmbiguousWriteError, match="may or may not appear"):
        commit(by, 1)
    assert read_log(store).checkpoints == []


def test_a_refusal_is_an_error_at_once() -> None:
    store = Faulty()
    by = writer(store)
    store.before = [StoreError("denied", code="AccessDenied")]
    with pytest.raises(StoreError, match="denied"):
        commit(by, 1)
    assert store.puts == 2


def test_racing_writers_each_find_their_own_commit_exactly_once() -> None:
    """16 threads of one epoch append at once."""
    store = MemoryStore()
    by = writer(store)
    gate = threading.Barrier(16)

    def work(n: int) -> Commit:
        write_id = os.urandom(16)

        def make(seq: int, log: Log) -> Commit:
            return Commit(
                seq=seq, write_id=write_id, epoch=by.epoch, session=by.session, time_s=0.0, host="h",
                step=n, attempt=keys.attempt(n, by.session, n), parent=None, world_size=1,
                raw_bytes=0, stored_bytes=0, tensors=0, ranks=[("0" * 32, 1)], signature="0" * 16,
            )  # fmt: skip

        gate.wait()
        return append(store, by.log, make, deadline_s=20)[0]

    with ThreadPoolExecutor(16) as pool:
        mine = list(pool.map(work, range(16)))
    there = read_log(store).checkpoints
    assert sorted(c.step for c in there) == list(range(16))
    assert {c.seq: c.write_id for c in there} == {c.seq: c.write_id for c in mine}


def test_a_store_that_answers_200_to_everybody_does_not_make_a_lost_commit_a_success() -> None:
    """It is not known to do that, so the log is no keyed one: the record is read back, and is another's."""

    class Overwrites(MemoryStore):
        other: bytes | None = None

        def put_if_absent(self, key: str, data: bytes) -> None:
            super().put_if_absent(key, data)
            if self.other is not None:
                self.bucket.store(self._location.full(key), self.other)
                self.other = None

    store = Overwrites()
    by = writer(store)
    store.other = by.log.records[0].encode()
    assert commit(by, 1).seq == 2


def test_a_refusal_of_the_condition_is_an_error_that_says_so() -> None:
    store = Faulty()
    by = writer(store)
    store.before = [StoreError("not implemented", code="NotImplemented", status=501)]
    with pytest.raises(StoreError, match="not implemented"):
        commit(by, 1)
