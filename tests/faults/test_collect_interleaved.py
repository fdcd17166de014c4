"""Sessions that fence each other, retention, `rm`, `tag` and `gc` on one store, one operation at a time, in every order.

Each actor runs in a thread of its own, but only one at a time, from one operation of the store to the next; whose turn it
is is drawn by a seeded generator, so a failure is replayed by its seed. After every single operation all that the live
checkpoints need must be there.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.log_run import Run
from support.memory_store import MemoryBucket, MemoryStore

import objckpt.log.read
from objckpt import collect
from objckpt.collect import Author
from objckpt.errors import NotCommittedError, SaveError, WriterFencedError
from objckpt.format import keys
from objckpt.format.records import Retire
from objckpt.log import Log, read_log

URL = "s3://bucket/run"
ROUNDS = int(os.environ.get("OBJCKPT_TEST_ROUNDS", "12"))


class Turns:
    """A hook that lets one operation at a time happen, of an actor drawn at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.waiting: set[str] = set()  # actors, by the names of their threads
        self.speed: dict[str, float] = {}  # of the actors, relative: some sleep while others go on
        self.turn: str | None = None
        self.running = 0  # actors between two operations
        self.failures: list[BaseException] = []
        self.over = False

    def __call__(self, phase: str, operation: str, key: str) -> None:
        if phase == "after" or self.over:
            return
        me = threading.current_thread().name
        with self.changed:
            self.waiting.add(me)
            self.running -= 1
            self.changed.notify_all()
            while self.turn != me and not self.over:
                self.changed.wait()
            self.waiting.discard(me)
            self.turn = None

    def actor(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as err:
                self.failures.append(err)
            finally:
                with self.changed:
                    self.running -= 1
                    self.changed.notify_all()

        name = f"actor-{self.running}"
        self.speed[name] = self.random.choice([0.01, 0.1, 1.0])
        self.running += 1
        return threading.Thread(target=run, name=name, daemon=True)

    def play(self, threads: list[threading.Thread], check: Callable[[], None]) -> int:
        """Returns the number of turns."""
        turns = 0
        for thread in threads:
            thread.start()
        try:
            while True:
                with self.changed:
                    assert self.changed.wait_for(lambda: self.running == 0, 60), "an actor is stuck"
                    if not self.waiting:
                        return turns
                    check()
                    ready = sorted(self.waiting)
                    self.turn = self.random.choices(ready, [self.speed[name] for name in ready])[0]
                    self.running += 1
                    turns += 1
                    self.changed.notify_all()
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()
            for thread in threads:
                thread.join(30)


class InTurn(ThreadPoolExecutor):
    """Runs what it is given in the caller's thread, so that an actor is at one operation at a time."""

    def map(self, work, *given, **_):  # type: ignore[no-untyped-def]
        return [work(*each) for each in zip(*given, strict=True)]


def assert_nothing_is_missing(bucket: MemoryBucket) -> Log:
    """Looks past hook and lag."""
    bare = MemoryBucket()
    bare.objects = bucket.objects
    store = MemoryStore(bare, URL)
    log = read_log(store)
    assert not log.damaged
    there = {info.key for info in store.list("data/")}
    for commit in log.checkpoints:
        assert {commit.index_key(0), keys.pack(commit.attempt, 0, 0)} <= there, f"{commit.step}@{commit.seq} is gone"
    return log


def assert_every_removal_was_right(log: Log) -> None:
    """By the log up to its slot, each record of a retention or an `rm` takes live checkpoints only: no newest, no tagged."""
    before = Log(log.url)
    for record in log.records:
        if isinstance(record, Retire):
            live = {c.seq for c in before.checkpoints}
            assert set(record.seqs) <= live
            assert not record.seqs or before.newest().seq not in record.seqs
            assert not set(record.seqs) & set(before.tags.values())
            assert not set(record.attempts) & {c.attempt for c in before.commits}
        before = before.extended([(record.seq, record)])


def play(seed: int, conditional: bool) -> tuple[int, int]:
    """Without conditional writes nobody is excluded, but what is live stays whole, if a collection is patient."""
    bucket = MemoryBucket(conditional=conditional)
    store = MemoryStore(bucket, URL)
    first = Run(store, 0, conditional=conditional)
    committed = [first.save(1)]
    bucket.hook = turns = Turns(seed)
    bucket.list_lag = turns.random.choice([0, 0, 3, 10]) if conditional else 0
    hasty_s = -1.0 if conditional else 1e9

    def session(n: int) -> None:
        try:
            run = Run(store, n, conditional=conditional)
            resumed = parent = run.writer.log.newest().seq
            author = Author(session=run.writer.session, epoch=run.writer.epoch)
            for step in range(n * 10, n * 10 + 3):
                commit = run.save(step, parent)
                committed.append(commit)
                parent = commit.seq
                record, log = collect.retire(
                    store, run.writer.log, lambda log: (collect.superseded(log, keep_last=1, resumed=resumed), []),
                    author=author, reason="retention", deadline_s=20,
                )  # fmt: skip
                gone = record.seqs if record is not None else []
                collect.delete_attempts(store, log, [c.attempt for c in log.commits if c.seq in gone])
                collect.collect(store, log, author=author)
        except (WriterFencedError, SaveError):
            pass

    def gc(n: int, grace_s: float) -> None:
        for _ in range(5):
            collect.collect(store, author=Author(session=f"{n:026d}"), grace_s=grace_s)

    def rm() -> None:
        for _ in range(2):
            log = read_log(store)
            seqs = [c.seq for c in log.checkpoints[:2]]

            def choose(log: Log, seqs: list[int] = seqs) -> collect.Choice:
                left = [seq for seq in seqs if seq not in log.retired and seq not in log.tags.values()]
                return [seq for seq in left if seq != log.newest().seq], []

            record, log = collect.retire(
                store, log, choose, author=Author(session="8" * 26), reason="rm", deadline_s=20
            )
            gone = record.seqs if record is not None else []
            collect.delete_attempts(store, log, [c.attempt for c in log.commits if c.seq in gone])

    def tag() -> None:
        for name in ("a", "b", "a"):
            log = read_log(store)
            try:
                collect.tag(store, log, name, log.newest().seq, author=Author(session="7" * 26), deadline_s=20)
            except NotCommittedError:
                pass  # somebody was faster

    actors = [
        lambda: session(1), lambda: session(2), lambda: session(3), rm, tag,
        lambda: gc(91, hasty_s), lambda: gc(92, hasty_s), lambda: gc(93, 1e9),
    ]  # fmt: skip
    checked: dict[str, tuple[bytes, float]] = {}

    def check() -> None:
        nonlocal checked
        if bucket.objects != checked:  # else the operation has read, and all is as it was
            assert_nothing_is_missing(bucket)
            checked = dict(bucket.objects)

    count = turns.play([turns.actor(actor) for actor in actors], check)
    bucket.hook, bucket.list_lag = (lambda phase, operation, key: None), 0
    assert not turns.failures, turns.failures
    log = assert_nothing_is_missing(bucket)
    if conditional:
        assert_every_removal_was_right(log)
        live = {c.seq for c in log.checkpoints}
        assert live and all(c.seq in live or c.seq in log.retired for c in committed)
    collect.collect(store, author=Author(session="9" * 26), grace_s=-1.0)
    log = assert_nothing_is_missing(bucket)
    assert len(store.list("data/")) == 2 * len(log.checkpoints)
    return count, len(committed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("conditional", [True, False])
def test_in_any_order(conditional: bool, monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], None]) -> None:
    monkeypatch.setattr(objckpt.log.read, "ThreadPoolExecutor", InTurn)
    played = []
    for seed in range(ROUNDS):
        try:
            played.append(play(seed, conditional))
        except BaseException as err:
            err.add_note(f"seed {seed}")
            raise
    tell(
        f"interleaved: {len(played)} rounds, {sum(t for t, _ in played)} operations, "
              f"{sum(c for _, c in played)} commits, nothing missing after any of them")  # fmt: skip
