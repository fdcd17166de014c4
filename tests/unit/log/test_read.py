"""Reading: newest is by place, damage is never passed over, and "cannot list" is never "no checkpoint"."""

from __future__ import annotations

import pytest
from support.log_writer import commit, writer
from support.memory_store import MemoryStore

from objckpt.errors import FormatError, IntegrityError, NotCommittedError, StoreError
from objckpt.format import keys
from objckpt.log import read_log


def test_an_empty_log_has_no_checkpoint_and_says_where() -> None:
    store = MemoryStore()
    assert read_log(store).checkpoints == []
    with pytest.raises(NotCommittedError, match="no committed checkpoint under s3://"):
        read_log(store).newest()


def test_newest_is_the_highest_seq_not_the_highest_step() -> None:
    store = MemoryStore()
    first = writer(store)
    for step in (900, 1000, 9000, 10000):
        commit(first, step)
    second = writer(store, 1)
    commit(second, 950)
    log = read_log(store)
    assert log.newest().step == 950 and log.at(10000).seq == 4
    with pytest.raises(NotCommittedError, match="9001 is not committed"):
        log.at(9001)


def test_reading_on_from_a_known_log_gets_only_what_is_new() -> None:
    store = MemoryStore()
    one = writer(store)
    commit(one, 1)
    known = read_log(store)
    assert read_log(store, known) is known
    commit(one, 2)
    assert read_log(store, known).records == read_log(store).records


def test_a_damaged_record_above_the_newest_stops_a_resume_and_leaves_the_others_readable() -> None:
    store = MemoryStore()
    by = writer(store)
    commit(by, 1)
    store.put(keys.record(2), b"garbage")
    log = read_log(store)
    assert [c.step for c in log.checkpoints] == [1] and log.at(1).seq == 1
    with pytest.raises(FormatError, match="may be the newest"):
        log.newest()
    by.log = log
    commit(by, 3)
    assert read_log(store).newest().step == 3


def test_a_gap_in_the_log_is_damage() -> None:
    store = MemoryStore()
    by = writer(store)
    for step in (1, 2, 3):
        commit(by, step)
    store.delete([keys.record(2)])
    log = read_log(store)
    assert [c.step for c in log.checkpoints] == [1, 3]
    assert isinstance(log.damaged[0][1], IntegrityError)


def test_cannot_list_is_never_no_checkpoint() -> None:
    class Down(MemoryStore):
        def list(self, prefix: str = "", *, start_after: str = ""):  # type: ignore[no-untyped-def]
            raise StoreError("503")

    with pytest.raises(StoreError, match="503"):
        read_log(Down())


def test_a_record_that_cannot_be_fetched_is_an_error_not_damage() -> None:
    store = MemoryStore()
    commit(writer(store), 1)

    class Broken(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            raise StoreError("500")

    with pytest.raises(StoreError, match="500"):
        read_log(Broken(store.bucket))
