"""The log on each real server: 16 writers at once, a replaced writer, and what is read afterwards."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.log_writer import commit, session

from objckpt.config import StoreOptions
from objckpt.errors import WriterFencedError
from objckpt.format import keys
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import ChunkTable
from objckpt.log import Log, append, read_log
from objckpt.save.commit import LogWriter, Sizes
from objckpt.store import Store, open_store

WRITERS = 16


def opened(store: Store, who: int) -> LogWriter:
    made = LogWriter(store, session(who), 1, 60.0)
    made.open()
    return made


def test_16_writers_at_once_are_all_in_the_log_exactly_once(s3_url: str) -> None:
    store = open_store(s3_url, StoreOptions(connections=WRITERS))
    by = opened(store, 1)
    gate = threading.Barrier(WRITERS)

    def work(n: int) -> Commit:
        write_id = os.urandom(16)

        def make(seq: int, log: Log) -> Commit:
            return Commit(
                seq=seq, write_id=write_id, epoch=by.epoch, session=by.session, time_s=0.0, host="h",
                step=n, attempt=keys.attempt(n, by.session, n), parent=None, world_size=1,
                raw_bytes=0, stored_bytes=0, tensors=0, ranks=[("0" * 32, 1)], signature="0" * 16,
            )  # fmt: skip

        gate.wait()
        return append(store, by.log, make, deadline_s=90)[0]

    with ThreadPoolExecutor(WRITERS) as pool:
        done = list(pool.map(work, range(WRITERS)))
    log = read_log(store)
    assert not log.damaged
    assert sorted(c.write_id for c in log.checkpoints) == sorted(c.write_id for c in done)
    assert sorted(c.seq for c in log.checkpoints) == sorted(c.seq for c in done)
    if not log.keyed:
        assert len({c.seq for c in done}) == WRITERS
    store.close()


def test_16_sessions_racing_commit_only_while_nobody_has_replaced_them(weed_url: str) -> None:
    """Each has a store of its own, opens the log and commits: what was told as committed counts once, what was fenced never."""
    gate = threading.Barrier(WRITERS)

    def work(who: int) -> tuple[int, list[int], bool]:
        store, told, fenced = open_store(weed_url), [], False
        by = LogWriter(store, session(who), 1, 90.0)
        gate.wait()
        try:
            by.open({"conditional_put": True})
            for step in range(3):
                attempt = keys.attempt(step, by.session, 1)
                index = Index(step, attempt, 0, 1, [], [], ChunkTable.from_rows([]), ["raw"], b"\x80")
                told.append(by.commit(index, [("0" * 32, 1)], None, None, Sizes(0, 0, 0)).seq)
        except WriterFencedError:
            fenced = True
        store.close()
        return by.epoch, told, fenced

    with ThreadPoolExecutor(WRITERS) as pool:
        outcomes = list(pool.map(work, range(1, WRITERS + 1)))
    log = read_log(open_store(weed_url))
    assert not log.damaged and log.fenced == []
    assert sorted(c.seq for c in log.commits) == sorted(seq for _, told, _ in outcomes for seq in told)
    assert log.newest().epoch == log.epoch == max(epoch for epoch, _, _ in outcomes)
    # Whoever opened last has all three; all others that did not finish before the next one opened were told.
    assert [fenced or len(told) == 3 for _, told, fenced in outcomes] == [True] * WRITERS
    assert sum(fenced for _, _, fenced in outcomes) > 0


def test_a_replaced_writer_is_fenced(s3_url: str) -> None:
    store = open_store(s3_url)
    old = opened(store, 1)
    commit(old, 1)
    new = opened(store, 2)
    assert new.log.capabilities == old.log.capabilities
    with pytest.raises(WriterFencedError, match="replaced by session"):
        commit(old, 2)
    commit(new, 3)
    assert [c.step for c in read_log(store).checkpoints] == [1, 3]
    assert {info.key.split("/")[0] for info in store.list()} == {"log"}  # of the probe nothing is left
    store.close()
