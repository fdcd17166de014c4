"""The store dies at operation i of a save, for every i, before the effect and after it: whole checkpoints or none."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket, MemoryStore

import objckpt.save.commit
from objckpt import Checkpointer, SaveOptions, limits, restore
from objckpt.errors import AmbiguousWriteError, ObjckptError, StoreError
from objckpt.log import read_log
from objckpt.save.arena import Arena
from objckpt.save.plan import slabs_for

URL = "s3://bucket/run"
SLAB_BYTES = 1 << 20  # all sizes are a 64th of the real ones: memory is not what is tested here
PART_BYTES, CHUNK_BYTES = SLAB_BYTES // 8, limits.CHUNK_BYTES // 64


class Dying:
    """A hook after which nothing works any more, from operation `at` on."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase = at, phase
        self.seen = 0
        self.dead = False

    def __call__(self, phase: str, operation: str, key: str) -> None:
        if phase == "before":
            self.seen += 1
        if self.seen == self.at and phase == self.phase:
            self.dead = True
        if self.dead:
            kind = AmbiguousWriteError if operation == "put_if_absent" else StoreError
            raise kind(f"the store died at {operation}", operation=operation, key=key)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLAB_BYTES", SLAB_BYTES)
    monkeypatch.setattr(limits, "MIN_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(slabs_for, "__defaults__", (SLAB_BYTES,))
    monkeypatch.setitem(Arena.__init__.__kwdefaults__, "slab_bytes", SLAB_BYTES)


def checkpointer() -> Checkpointer:
    return Checkpointer(URL, options=SaveOptions(uploader="thread", part_bytes=PART_BYTES, chunk_bytes=CHUNK_BYTES))


@contextmanager
def engine(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch, memory_engine(bucket):
        patch.setattr(objckpt.save.commit.LogWriter, "__init__", _impatient(objckpt.save.commit.LogWriter.__init__))
        patch.setattr(
            objckpt.save.commit, "probe", lambda store: {"conditional_put": True}
        )  # its own tests are elsewhere
        yield


def _impatient(init):  # type: ignore[no-untyped-def]
    def wrapped(self, store, session, world_size, deadline_s, **options):  # type: ignore[no-untyped-def]
        init(self, store, session, world_size, 0.05, **options)

    return wrapped


def state(step: int) -> dict[str, object]:
    """Big enough for a multipart upload of three parts."""
    return {"w": torch.full((5 * CHUNK_BYTES // 4 - 1000,), float(step)), "step": step}


def assert_whole(bucket: MemoryBucket) -> list[int]:
    store = MemoryStore(bucket, URL)
    log = read_log(store)
    assert not log.damaged
    for commit in log.checkpoints:
        checkpoint = restore.open_checkpoint(store, commit)
        assert restore.verify(store, checkpoint) == []
        loaded = restore.load(store, checkpoint)
        assert loaded["step"] == commit.step and bool((loaded["w"] == commit.step).all())
    return [c.step for c in log.checkpoints]


@pytest.fixture
def begun(small: None, monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """Step 1 is committed, and its session closed."""
    bucket = MemoryBucket()
    with engine(bucket, monkeypatch), checkpointer() as ckpt:
        ckpt.save(1, state(1))
    return bucket


def copy_of(bucket: MemoryBucket) -> MemoryBucket:
    assert not bucket.uploads
    copied = MemoryBucket()
    copied.objects = dict(bucket.objects)
    return copied


def test_crash_sweep(begun: MemoryBucket, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]) -> None:
    outcomes: dict[str, int] = {}
    at = 0
    while True:
        at += 1
        ended = False
        for phase in ("before", "after"):
            bucket = copy_of(begun)
            with engine(bucket, monkeypatch):
                bucket.hook = dying = Dying(at, phase)
                failed = False
                ckpt = checkpointer()
                try:
                    ckpt.restore(state(0))
                    ckpt.save(2, state(2)).wait_committed(20)
                except ObjckptError:
                    failed = True
                bucket.hook = lambda phase, operation, key: None
                try:
                    ckpt.close()
                except ObjckptError:
                    assert failed
                steps = assert_whole(bucket)
                # Committed and said so; or not said so, and then whole or not there at all.
                assert steps in ([1], [1, 2]) and (failed or steps == [1, 2])
                # A new session goes on whatever was left behind.
                with checkpointer() as later:
                    into = state(0)
                    assert later.restore(into) == steps[-1]
                    later.save(3, state(3))
                assert assert_whole(bucket) == [*steps, 3]
            outcome = f"{phase}: {'failed' if failed else 'committed'}, {'visible' if len(steps) > 1 else 'absent'}"
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if phase == "before":  # after: an operation that refuses (a missing key) has no effect to die behind
                ended = not dying.dead
        if ended:
            break
    tell(f"crash sweep: {at - 1} operations, before and after each: {outcomes}")
    assert at > 10


class Hanging:
    """A hook in which operation `at` of the session of `thread`, or of its uploader, hangs until it is released."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase = at, phase
        self.seen = 0
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, phase: str, operation: str, key: str) -> None:
        if self.reached.is_set():
            return
        if phase == "before":
            self.seen += 1
        if self.seen == self.at and phase == self.phase:
            self.reached.set()
            assert self.released.wait(60)


def test_hang_sweep(begun: MemoryBucket, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]) -> None:
    """Operation i hangs, a new session takes over, and then the old one wakes up: the newest is that of the highest epoch."""
    outcomes: dict[str, int] = {}
    for at in itertools.count(1):
        reached = False
        for phase in ("before", "after"):
            bucket = copy_of(begun)
            with engine(bucket, monkeypatch):
                bucket.hook = hanging = Hanging(at, phase)
                told: list[str] = []

                def old_session(told: list[str] = told) -> None:
                    try:
                        with checkpointer() as ckpt:
                            ckpt.restore(state(0))
                            ckpt.save(2, state(2)).wait_committed(60)
                        told.append("committed")
                    except ObjckptError as err:
                        told.append(type(err).__name__)

                thread = threading.Thread(target=old_session, daemon=True)
                thread.start()
                while thread.is_alive() and not hanging.reached.wait(0.01):
                    pass
                if not hanging.reached.is_set():
                    continue
                reached = True
                with checkpointer() as later:
                    assert later.restore(state(0)) in (1, 2)
                    later.save(3, state(3))
                seen = assert_whole(bucket)
                assert seen in ([1, 3], [1, 2, 3])
                hanging.released.set()
                thread.join(60)
                assert told and not thread.is_alive()
                steps = assert_whole(bucket)
                log = read_log(MemoryStore(bucket, URL))
                # One that hung before it opened the log opens it now, and is the newer writer.
                assert log.newest().epoch == log.epoch and steps[: len(seen)] == seen
                assert (told == ["committed"]) == (2 in steps)
            outcome = f"{phase}: {told[0]}"
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if not reached:
            break
    tell(f"hang sweep: {at - 1} operations, before and after each: {outcomes}")
    assert at > 10 and any("WriterFencedError" in outcome for outcome in outcomes)
