"""The commit log: one winner per slot, lost answers recognised, stale writers fenced, damage never passed over."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.memory_store import MemoryBucket, MemoryStore

from objckpt import log as commit_log
from objckpt.errors import (
    AmbiguousWriteError,
    FormatError,
    IntegrityError,
    NotCommittedError,
    StoreError,
    WriterFencedError,
)
from objckpt.format import keys
from objckpt.format.index import ChunkTable, Index
from objckpt.format.records import Commit, Open
from objckpt.log import Log, append, read_log
from objckpt.save.commit import LogWriter, Sizes
from objckpt.store import Store


def session(n: int = 0) -> str:
    return f"{n:026d}"


def index(step: int, who: int = 0) -> Index:
    attempt = keys.attempt(step, session(who), step)
    return Index(step, attempt, 0, 1, [], [], ChunkTable.from_rows([]), ["raw"], b"\x80")


def writer(store: Store, who: int = 0) -> LogWriter:
    made = LogWriter(store, session(who), 1, 5.0)
    made.open()
    return made


def commit(by: LogWriter, step: int, parent: int | None = None) -> Commit:
    return by.commit(index(step, int(by.session)), [("0" * 32, 10)], parent, None, Sizes(64, 64, 1))


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


@pytest.mark.parametrize("conditional", [True, False])
def test_racing_writers_each_find_their_own_commit_exactly_once(conditional: bool) -> None:
    """16 threads of one epoch append at once; with a store that ignores the condition a lost record is noticed."""
    bucket = MemoryBucket(conditional=conditional)
    store = MemoryStore(bucket)
    by = writer(store)
    gate = threading.Barrier(16)

    def work(n: int) -> Commit:
        def make(seq: int, log: Log) -> Commit:
            return Commit(
                signature="0" * 16,
                seq=seq,
                write_id=write_id,
                epoch=by.epoch,
                session=by.session,
                time_s=0.0,
                host="h",
                step=n,
                attempt=keys.attempt(n, by.session, n),
                parent=None,
                world_size=1,
                raw_bytes=0,
                stored_bytes=0,
                tensors=0,
                ranks=[("0" * 32, 1)],
            )

        write_id = os.urandom(16)
        gate.wait()
        return append(store, by.log, make, deadline_s=20)[0]

    with ThreadPoolExecutor(16) as pool:
        mine = list(pool.map(work, range(16)))
    there = read_log(store).checkpoints
    if conditional:
        assert sorted(c.step for c in there) == list(range(16))
        assert {c.seq: c.write_id for c in there} == {c.seq: c.write_id for c in mine}
    else:  # what is there is whole; exclusivity cannot be had from such a store
        assert len({c.step for c in there}) == len(there)


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


def test_a_store_without_the_condition_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = Faulty()
    store.before = [StoreError("not implemented", code="NotImplemented")] * 9
    by = writer(store)
    commit(by, 1)
    assert read_log(store).newest().step == 1
    assert "no conditional writes" in caplog.text
    assert commit_log.read_log(store).epoch == 1
