"""The store dies at operation i of a writer's life, for every i: what was confirmed is there, and the next writer goes on."""

from __future__ import annotations

import pytest
from support.log_writer import commit, session, writer
from support.memory_store import MemoryBucket, MemoryStore

from objckpt.errors import AmbiguousWriteError, ObjckptError, StoreError
from objckpt.log import read_log
from objckpt.save.commit import LogWriter


class Dying:
    """From operation `at` on nothing works any more."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase, self.seen, self.dead = at, phase, 0, False

    def __call__(self, phase: str, operation: str, key: str) -> None:
        self.seen += phase == "before"
        self.dead = self.dead or (self.seen == self.at and phase == self.phase)
        if self.dead:
            raise (AmbiguousWriteError if operation == "put_if_absent" else StoreError)("dead")


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("conditional", [True, False])
def test_whenever_it_dies(conditional: bool, phase: str) -> None:
    at, ended = 0, False
    while not ended:
        at += 1
        store = MemoryStore(MemoryBucket(conditional=conditional))
        store.bucket.hook = dying = Dying(at, phase)
        by, confirmed, tried = LogWriter(store, session(1), 1, 0.02, warn=lambda text: None), [], []
        try:
            by.open({"conditional_put": conditional})
            for step in (1, 2):
                tried.append(step)
                confirmed.append(commit(by, step).step)
            by.retire([1], [], "test")
        except ObjckptError:
            assert dying.dead
        ended = not dying.dead
        store.bucket.hook = lambda phase, operation, key: None
        log = read_log(store)
        assert not log.damaged and log.keyed is (not conditional and bool(log.records))
        assert set(confirmed) <= {c.step for c in log.commits} <= set(tried)
        later = writer(store, 2, conditional=conditional)
        commit(later, 9)
        assert read_log(store).newest().step == 9 and later.epoch == log.epoch + 1
    assert at > 7
