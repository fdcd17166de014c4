"""The store dies, or hangs, at operation i of a retention, an `rm` or a `gc`, for every i: nothing that lives is lost.

After each stop every live checkpoint is whole, the newest is the right one, a new session works, and a collection leaves
exactly what the live checkpoints need.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import typer.main
from support.log_run import Run
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket, MemoryStore, MemoryUploads

import objckpt.cli.main
import objckpt.store
from objckpt import Checkpointer, SaveOptions, StoreOptions, collect, restore
from objckpt.agent.retention import Retention
from objckpt.cli.main import run
from objckpt.errors import AmbiguousWriteError, StoreError
from objckpt.format import keys
from objckpt.log import read_log
from objckpt.save.arena import Arena

URL = "s3://bucket/run"
THREAD = SaveOptions(uploader="thread")
IMPATIENT = StoreOptions(retry_deadline_s=0.05)
LATER = collect.Author(session="9" * 26)


class Pool(ThreadPoolExecutor):
    """As many threads as ever for what is swept; none for the checks after it, which are most of the work."""

    def map(self, work: Callable[..., Any], *given: Iterable[Any], **options: Any) -> Iterable[Any]:
        if threading.current_thread() is threading.main_thread():
            return [work(*each) for each in zip(*given, strict=True)]
        return super().map(work, *given, **options)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """What every one of a thousand steps would pay again, and none of them tests."""
    with ExitStack() as patches:
        for name in ("log.read", "restore.open", "restore.verify"):
            module = importlib.import_module(f"objckpt.{name}")
            patches.enter_context(mock.patch.object(module, "ThreadPoolExecutor", Pool))
        for module, name in ((objckpt.cli.main, "build_app"), (typer.main, "get_command")):
            patches.enter_context(mock.patch.object(module, name, functools.cache(getattr(module, name))))
        patches.enter_context(mock.patch.dict(Arena.__init__.__kwdefaults__, slab_bytes=1 << 20))
        yield


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((1000,), float(step)), "step": step}


@pytest.fixture(scope="module")
def history(quick: None) -> MemoryBucket:
    """Checkpoints 1 to 3 of a session, 4 of one that resumed from 3; of each an attempt and an upload left over."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket, URL)
    with memory_engine(bucket):
        for steps in ((1, 2, 3), (4,)):
            with Checkpointer(URL, options=THREAD) as ckpt:
                ckpt.restore(state(0))
                for step in steps:
                    ckpt.save(step, state(step)).wait_committed(20)
            lost = keys.attempt(9, read_log(store).newest().session, 9)
            store.put(keys.pack(lost, 0, 0), b"lost")
            asyncio.run(MemoryUploads(bucket, URL).create(keys.pack(lost, 0, 1)))
    return bucket


def copy_of(bucket: MemoryBucket) -> MemoryBucket:
    copied = MemoryBucket()
    copied.objects = dict(bucket.objects)
    copied.uploads = dict(bucket.uploads)
    copied.new_id()
    return copied


class Stop:
    """A hook. At operation `at`, before or after its effect, the store dies for good; or it hangs, and goes on much later."""

    def __init__(self, at: int, phase: str, hang: bool) -> None:
        self.at, self.phase, self.hang = at, phase, hang
        self.seen = 0
        self.reached, self.released = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def __call__(self, phase: str, operation: str, key: str) -> None:
        with self._lock:
            self.seen += phase == "before"
            mine = self.seen == self.at and phase == self.phase and not self.reached.is_set()
            if mine:
                self.reached.set()
        if self.hang and mine:
            self.released.wait(60)
        if not self.hang and self.reached.is_set():
            kind = AmbiguousWriteError if operation == "put_if_absent" else StoreError
            raise kind(f"the store died at {operation}", operation=operation, key=key)


def the_retention(store: MemoryStore, first: bool) -> None:
    log = read_log(MemoryStore(copy_of(store.bucket), URL))
    newest = log.newest()
    options = SaveOptions(uploader="thread", keep_last=1)
    retention = Retention(lambda _: store, IMPATIENT, options, newest.session, lambda text: None)
    retention._collected = not first
    retention.after_commit(log, newest.epoch, newest.parent)
    asyncio.run(retention.finish())


def a_command(*arguments: str) -> Callable[[MemoryStore], None]:
    def call(store: MemoryStore) -> None:
        with mock.patch.object(objckpt.store, "open_store", return_value=store):
            run([arguments[0], URL, *arguments[1:]])

    return call


def without_its_record(store: MemoryStore) -> None:
    """Checkpoint 1 is retired, but its data is still there."""
    collect.retire(store, read_log(store), lambda log: ([1], []), author=LATER, reason="", deadline_s=5)


WORK: dict[str, tuple[Callable[[MemoryStore], None], list[list[int]]]] = {
    "first retention": (lambda store: the_retention(store, True), [[1, 2, 3, 4], [3, 4]]),
    "later retention": (lambda store: the_retention(store, False), [[1, 2, 3, 4], [3, 4]]),
    "rm": (a_command("rm", "1", "2", "--yes"), [[1, 2, 3, 4], [3, 4]]),
    "gc": (a_command("gc", "--grace", "0"), [[2, 3, 4]]),
}


def needed(store: MemoryStore) -> set[str]:
    """Every object under `data/` that a live checkpoint needs; each is read back, byte by byte."""
    found = set()
    for commit in read_log(store).checkpoints:
        checkpoint = restore.open_checkpoint(store, commit)
        assert restore.verify(store, checkpoint) == []
        loaded = restore.load(store, checkpoint)
        assert loaded["step"] == commit.step and bool((loaded["w"] == commit.step).all())
        found |= {commit.index_key(rank) for rank in range(commit.world_size)}
        found |= {key for index in checkpoint.indexes for key, _ in index.packs}
    return found


def check(bucket: MemoryBucket, allowed: list[list[int]]) -> None:
    store = MemoryStore(bucket, URL)
    needed(store)
    log = read_log(store)
    assert not log.damaged
    steps = [c.step for c in log.checkpoints]
    assert steps in allowed, steps
    assert log.newest().step == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("list_lag", [0, 5])
@pytest.mark.parametrize("work", WORK)
def test_sweep(history: MemoryBucket, work: str, list_lag: int, tell: Callable[[str], None]) -> None:
    do, allowed = WORK[work]
    at, stops, outcomes = 0, 0, {tuple(steps): 0 for steps in allowed}
    while True:
        at += 1
        reached = False
        for phase, hang in (("before", False), ("after", False), ("before", True), ("after", True)):
            bucket = copy_of(history)
            store = MemoryStore(bucket, URL, IMPATIENT)
            if work == "gc":
                without_its_record(store)
            bucket.list_lag = list_lag
            bucket.hook = stop = Stop(at, phase, hang)
            worker = threading.Thread(target=do, args=(store,), daemon=True)
            worker.start()
            if hang:
                while worker.is_alive() and not stop.reached.wait(0.001):
                    pass
            else:
                worker.join(30)
                assert not worker.is_alive()
            bucket.hook, bucket.list_lag = (lambda phase, operation, key: None), 0
            reached |= stop.reached.is_set()
            stops += stop.reached.is_set()
            check(bucket, allowed)  # while it hangs, too
            outcomes[tuple(c.step for c in read_log(store).checkpoints)] += 1
            whole_engine = phase == "after" and not hang  # it takes its time
            goes_on(bucket, allowed, saves=whole_engine)
            stop.released.set()  # what hung wakes up, when all has changed
            worker.join(30)
            assert not worker.is_alive()
            if not whole_engine:
                check(bucket, allowed)
                goes_on(bucket, allowed, saves=False)
        if not reached:
            break
    tell(f"{work}, lists lag by {list_lag}: {at - 1} operations, {stops} stops: {outcomes}")
    assert at > 5


def goes_on(bucket: MemoryBucket, allowed: list[list[int]], saves: bool) -> None:
    """A new session works, and what is not needed any more is cleaned up."""
    store = MemoryStore(bucket, URL)
    if saves:
        with memory_engine(bucket), Checkpointer(URL, options=THREAD) as ckpt:
            into = state(0)
            assert ckpt.restore(into) == 4 and bool((into["w"] == 4).all())  # type: ignore[attr-defined]
            ckpt.save(5, state(5)).wait_committed(20)
        allowed = [[*before, 5] for before in allowed]
    else:
        Run(store, 8)
    collect.collect(store, author=LATER, grace_s=-1.0)
    assert [c.step for c in read_log(store).checkpoints] in allowed
    assert {info.key for info in store.list("data/")} == needed(store)
    assert not bucket.uploads


def test_a_save_under_way_is_whole_or_fails_whenever_a_collection_comes(history: MemoryBucket) -> None:
    """`gc` with no grace at each moment of a save: the save commits whole, or fails and says so; never half of it."""
    outcomes = {"committed": 0, "failed": 0}
    at = 0
    while True:
        at += 1
        bucket = copy_of(history)
        store = MemoryStore(bucket, URL)
        session = Run(store, 7)
        seen, fired = 0, False

        def hook(phase: str, operation: str, key: str, at: int = at, bucket: MemoryBucket = bucket) -> None:
            nonlocal seen, fired
            seen += 1
            if seen == at:
                fired = True
                bucket.hook = lambda phase, operation, key: None
                collect.collect(MemoryStore(bucket, URL), author=LATER, grace_s=-1.0)

        bucket.hook = hook
        try:
            session.save(5, read_log(store).newest().seq)
            outcomes["committed"] += 1
        except objckpt.ObjckptError:
            outcomes["failed"] += 1
        bucket.hook = lambda phase, operation, key: None
        for commit in read_log(store).checkpoints:
            if commit.step == 5:
                store.head(commit.index_key(0))
                store.head(keys.pack(commit.attempt, 0, 0))
        if not fired:
            break
    assert outcomes["failed"] >= 2 and outcomes["committed"] >= 2, outcomes
