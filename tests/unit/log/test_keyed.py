"""A store that does not keep writers apart: no record is overwritten, and every reader sees the same order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log_writer import commit, session, writer
from support.memory_store import MemoryBucket, MemoryStore

from objckpt.errors import (
    AccessError,
    AmbiguousWriteError,
    FormatError,
    IntegrityError,
    SaveError,
    StoreError,
    WriterFencedError,
)
from objckpt.format import keys
from objckpt.format.records import Commit, Open, Record, Retire
from objckpt.log import Log, append, read_log
from objckpt.save.commit import LogWriter


def bucket() -> MemoryBucket:
    return MemoryBucket(conditional=False)


def keyed(store: MemoryStore, who: int = 0) -> LogWriter:
    return writer(store, who, conditional=False)


def a_commit(by: LogWriter, n: int, write_id: bytes) -> Callable[[int, Log], Commit]:
    def make(seq: int, log: Log) -> Commit:
        return Commit(
            seq=seq, write_id=write_id, epoch=by.epoch, session=by.session, time_s=0.0, host="h",
            step=n, attempt=keys.attempt(n, by.session, n), parent=None, world_size=1,
            raw_bytes=0, stored_bytes=0, tensors=0, ranks=[("0" * 32, 1)], signature="0" * 16,
        )  # fmt: skip

    return make


def put(store: MemoryStore, record: Record) -> None:
    """As another writer would, at any time."""
    store.put(keys.RecordName(record.seq, record.epoch, record.write_id).key, record.encode())


def retiring(seq: int, epoch: int, attempts: list[str], write_id: bytes = b"\xff" * 16) -> Retire:
    return Retire(
        seq=seq,
        write_id=write_id,
        epoch=epoch,
        session=session(9),
        time_s=0.0,
        host="h",
        attempts=attempts,
        reason="gc",
    )


def opening(seq: int, epoch: int, who: int, write_id: bytes = b"\xff" * 16) -> Open:
    return Open(
        seq=seq, write_id=write_id, epoch=epoch, session=session(who), time_s=0.0, host="h", world_size=1,
        capabilities={"conditional_put": False},
    )  # fmt: skip


def test_keys_carry_epoch_and_write_id_and_read_the_same() -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    records = [*by.log.records, commit(by, 1), commit(by, 2)]
    names = [info.key for info in store.list(keys.LOG)]
    assert names == [f"log/{r.seq:020d}.000001.{r.write_id.hex()}.msgpack" for r in records]
    assert [keys.parse_record(name) for name in names] == [keys.RecordName(r.seq, r.epoch, r.write_id) for r in records]
    assert list(read_log(store).records) == records == list(by.log.records)
    assert not [o for o in store.bucket.operations if o[0] == "put_if_absent"]


@pytest.mark.parametrize(
    "key",
    [
        "log/1.msgpack",
        f"log/{1:020d}.00001.{'0' * 32}.msgpack",
        f"log/{1:020d}.000001.{'0' * 31}.msgpack",
        f"log/{1:020d}.000001.{'F' * 32}.msgpack",
        f"log/{1:020d}.000001.msgpack",
        f"log/{1:020d}.000001.{'0' * 32}.msgpack.tmp",
        f"log/x/{1:020d}.msgpack",
        f"log/{1:020d}.0000001.{'0' * 32}.msgpack",
    ],
)
def test_other_names_are_no_records(key: str) -> None:
    assert keys.parse_record(key) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**19), st.integers(1, 2**63 - 1), st.binary(min_size=16, max_size=16))
def test_names_of_records_are_read_as_they_were_written(seq: int, epoch: int, write_id: bytes) -> None:
    assert keys.parse_record(keys.record(seq)) == keys.RecordName(seq)
    name = keys.RecordName(seq, epoch, write_id)
    assert keys.parse_record(name.key) == name


@pytest.mark.parametrize("count", [2, 16])
def test_racing_writers_all_have_their_record_in_the_log_exactly_once(count: int) -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    gate = threading.Barrier(count)

    def work(n: int) -> list[tuple[Commit, Log]]:
        gate.wait()
        return [append(store, by.log, a_commit(by, n * 100 + i, os.urandom(16)), deadline_s=20) for i in range(3)]

    with ThreadPoolExecutor(count) as pool:
        done = [pair for pairs in pool.map(work, range(count)) for pair in pairs]
    log = read_log(store)
    assert sorted(c.write_id for c in log.checkpoints) == sorted(c.write_id for c, _ in done)
    assert not log.damaged
    for record, seen in done:
        assert record in seen.records
        assert read_log(store, seen).records == log.records  # whoever reads on sees what whoever reads anew sees


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_any_order_of_arrival_gives_one_log(late: list[list[int]], rng: Any) -> None:
    """Records are put into slots in any order, some much later; readers that read on at any moment agree in the end."""
    store = MemoryStore(bucket())
    by = keyed(store)
    records = [
        a_commit(by, i * 10 + j, rng.randbytes(14) + bytes([i, j]))(slot, by.log)
        for i, slots in enumerate(late) for j, slot in enumerate(sorted({s + 1 for s in slots}))
    ]  # fmt: skip
    rng.shuffle(records)
    log = by.log
    for record in records:
        put(store, record)
        if rng.random() < 0.5:
            log = read_log(store, log)
    fresh, log = read_log(store), read_log(store, log)
    assert log.records == fresh.records and log.next_seq == fresh.next_seq
    assert {s for s, _ in log.damaged} == {s for s, _ in fresh.damaged}
    assert sorted(r.write_id for r in records) == sorted(c.write_id for c in fresh.checkpoints)
    order = [(c.seq, c.write_id) for c in fresh.checkpoints]
    assert order == sorted(order)


def test_a_slot_s_order_is_by_epoch_then_write_id_and_a_commit_before_the_open_that_replaces_its_writer_counts() -> (
    None
):
    store = MemoryStore(bucket())
    old = keyed(store, 1)
    put(store, a_commit(old, 5, b"\xfe" * 16)(1, old.log))
    put(store, opening(1, 2, 2, b"\x00" * 16))
    put(store, a_commit(old, 6, b"\x01" * 16)(2, old.log))
    log = read_log(store)
    assert [(r.seq, r.epoch) for r in log.records] == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert [c.step for c in log.checkpoints] == [5] and [c.step for c in log.fenced] == [6]


def test_an_attempt_given_up_in_the_slot_of_its_commit_does_not_count() -> None:
    store = MemoryStore(bucket())
    by = keyed(store, 1)
    made = a_commit(by, 5, b"\x00" * 16)(1, by.log)
    put(store, made)
    put(store, retiring(1, 7, [made.attempt]))
    log = read_log(store)
    assert log.checkpoints == [] and [c.step for c in log.fenced] == [5]


class Meanwhile(MemoryStore):
    """Right before the effect of a PUT to the log, others do what they do."""

    def __init__(self) -> None:
        super().__init__(bucket())
        self.others: list[Record] = []

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(keys.LOG):
            while self.others:
                record = self.others.pop()
                super().put(keys.RecordName(record.seq, record.epoch, record.write_id).key, record.encode())
        super().put(key, data)


def test_a_commit_whose_attempt_was_given_up_at_the_same_moment_is_no_success() -> None:
    store = Meanwhile()
    by = keyed(store, 1)
    attempt = a_commit(by, 1, b"")(1, by.log).attempt
    store.others = [retiring(1, 1, [attempt])]
    with pytest.raises(SaveError, match="given up"):
        commit(by, 1)
    assert read_log(store).checkpoints == []


def test_two_that_open_at_the_same_moment_notice() -> None:
    store = Meanwhile()
    store.others = [opening(0, 1, 2)]
    with pytest.raises(WriterFencedError):
        keyed(store, 1)
    assert len(read_log(store).opens) == 2


def test_a_commit_beside_the_open_that_replaces_its_writer_is_one_and_the_next_is_refused() -> None:
    store = Meanwhile()
    by = keyed(store, 1)
    store.others = [opening(1, 2, 2)]
    commit(by, 1)
    with pytest.raises(WriterFencedError):
        commit(by, 2)
    assert [c.step for c in read_log(store).checkpoints] == [1]


def test_a_record_lands_in_an_old_slot_and_is_seen_by_all_who_read_on() -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    for step in (1, 2, 3):
        commit(by, step)
    known = read_log(store)
    assert read_log(store, known) is known
    late = a_commit(by, 9, os.urandom(16))(1, known)
    put(store, late)
    assert read_log(store, known).records == read_log(store).records
    assert late in read_log(store, known).records


def test_whoever_has_not_read_for_long_appends_at_the_end_all_the_same() -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    old = by.log
    for step in (1, 2, 3):
        commit(by, step)
    record, log = append(store, old, a_commit(by, 9, os.urandom(16)), deadline_s=5)
    assert record.seq == 4 and log.newest() == record


def test_damage_is_told_once_and_heals() -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    commit(by, 1)
    name = keys.RecordName(2, 1, b"\x05" * 16)
    good = a_commit(by, 2, b"\x05" * 16)(2, by.log)
    store.put(name.key, b"garbage")
    log = read_log(store, by.log)
    for _ in range(2):
        log = read_log(store, log)
        assert [seq for seq, _ in log.damaged] == [2]
        with pytest.raises(FormatError, match="may be the newest"):
            log.newest()
    store.put(name.key, good.encode())
    log = read_log(store, log)
    assert not log.damaged and log.newest().step == 2
    store.delete([keys.RecordName(1, 1, log.checkpoints[0].write_id).key])
    assert isinstance(read_log(store).damaged[0][1], IntegrityError)


def test_damage_beside_the_newest_in_its_slot_stops_a_resume() -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    commit(by, 1)
    store.put(keys.RecordName(1, 1, b"\x05" * 16).key, b"garbage")
    with pytest.raises(FormatError, match="may be the newest"):
        read_log(store).newest()


@pytest.mark.parametrize("change", [{"epoch": 2}, {"write_id": b"\x06" * 16}])
def test_a_record_under_the_name_of_another_is_damage(change: dict[str, Any]) -> None:
    store = MemoryStore(bucket())
    by = keyed(store)
    made = a_commit(by, 1, b"\x05" * 16)(1, by.log)
    store.put(keys.RecordName(1, 1, b"\x05" * 16).key, replace(made, **change).encode())
    log = read_log(store)
    assert log.checkpoints == [] and "record of another name" in str(log.damaged[0][1])


class Lossy(MemoryStore):
    """Fails PUTs to the log, with or without their effect."""

    def __init__(self) -> None:
        super().__init__(bucket())
        self.error: Exception | None = None
        self.effect = False

    def put(self, key: str, data: bytes) -> None:
        if self.error is None or self.effect:
            super().put(key, data)
        if self.error is not None:
            raise self.error


def test_an_answer_lost_after_the_effect_is_a_success() -> None:
    store = Lossy()
    by = keyed(store)
    store.error, store.effect = StoreError("gave up"), True
    assert commit(by, 1).seq == 1 and [c.step for c in read_log(store).checkpoints] == [1]


def test_an_answer_lost_without_the_effect_is_told_as_open() -> None:
    store = Lossy()
    by = keyed(store)
    by.deadline_s, store.error = 0.1, StoreError("gave up")
    with pytest.raises(AmbiguousWriteError, match="may or may not appear") as caught:
        commit(by, 1)
    assert caught.value.__cause__ is store.error


def test_a_refusal_is_an_error_at_once() -> None:
    store = Lossy()
    by = keyed(store)
    store.error = AccessError("denied", status=403)
    with pytest.raises(AccessError, match="denied"):
        commit(by, 1)


def test_both_forms_in_one_log() -> None:
    """The store, or what is known of it, has changed twice."""
    store = MemoryStore()
    commit(writer(store, 1), 1)
    commit(keyed(store, 2), 2)
    last = writer(store, 3)
    commit(last, 3)
    log = read_log(store)
    assert [c.step for c in log.checkpoints] == [1, 2, 3] and not log.keyed and log.loose
    assert [r.seq for r in log.records] == list(range(6)) and not log.damaged
    assert read_log(store, log) is log
    commit(last, 4)
    assert read_log(store, log).newest().step == 4
