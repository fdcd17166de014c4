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
from objckpt.format.records import Commit
from objckpt.log import Log, append, read_log
from objckpt.save.commit import LogWriter
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
