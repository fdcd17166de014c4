"""Retention in the uploader: after a commit the older checkpoints go, after a failure its remains do.

One thread of its own does this, one thing after the other: a save waits for none of it, and none of it can fail a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from objckpt import collect
from objckpt.config import SaveOptions, StoreOptions
from objckpt.errors import ObjckptError
from objckpt.log import Log
from objckpt.store import Store

logger = logging.getLogger("objckpt")
_DEADLINE_S = 20.0  # of one operation: the end of the training waits for it, and the next retention makes up for it


class Retention:
    """Owned by the agent. Methods return at once, but for `finish`. `warn(text)` is called from its thread."""

    def __init__(
        self,
        open_store: Callable[[StoreOptions], Store],
        store_options: StoreOptions,
        options: SaveOptions,
        session: str,
        warn: Callable[[str], None],
    ) -> None:
        self.options, self.session, self.warn = options, session, warn
        self._open_store = open_store
        self._store_options = replace(store_options, retry_deadline_s=min(_DEADLINE_S, store_options.retry_deadline_s))
        self._jobs: queue.SimpleQueue[Callable[[Store], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._at_end: Callable[[], object] = lambda: None
        self._newest: Log | None = None
        self._collected = False
        self._warned: set[str] = set()

    def after_commit(self, log: Log, epoch: int, resumed: int | None) -> None:
        """Apply `keep_last` and `keep_every` to the log that a commit has just been appended to."""
        if self.options.keep_last is None:
            return
        self._newest = log
        author = collect.Author(session=self.session, epoch=epoch)
        self._submit(lambda store: self._retain(store, log, author, resumed))

    def after_failure(self, log: Log, attempt: str) -> None:
        """Delete what a failed save left behind. Only for an attempt whose commit record cannot be there, nor come."""
        self._submit(lambda store: self._remove_remains(store, log, attempt))

    async def finish(self) -> None:
        """Wait until all of it is done."""
        if self._thread is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self._at_end = lambda: loop.call_soon_threadsafe(done.set)
        self._jobs.put(None)
        await done.wait()

    def _submit(self, job: Callable[[Store], None]) -> None:
        if self._thread is None:  # a daemon: a store that hangs must not hold up the end of the process
            self._thread = threading.Thread(target=self._run, name="objckpt-retention", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        store = self._open_store(self._store_options)
        try:
            while (job := self._jobs.get()) is not None:
                job(store)
        finally:
            store.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._at_end()

    def _retain(self, store: Store, log: Log, author: collect.Author, resumed: int | None) -> None:
        if log is not self._newest:
            return  # a later commit's retention is on its way, and does the work of this one

        def choose(log: Log) -> collect.Choice:
            keep_last, keep_every = self.options.keep_last, self.options.keep_every
            return collect.superseded(log, keep_last=keep_last, keep_every=keep_every, resumed=resumed), []

        try:
            record, log = collect.retire(
                store, log, choose, author=author, reason="retention", deadline_s=self._store_options.retry_deadline_s
            )
            if not self._collected:  # the first time: whatever former sessions, and failures of this one, left behind
                report, _ = collect.collect(store, log, author=author)
                self._collected = True
            else:
                gone = set(record.seqs) if record is not None else set()
                report = collect.delete_attempts(store, log, [c.attempt for c in log.commits if c.seq in gone])
        except Exception as err:
            self._collected = False
            logger.debug("retention failed", exc_info=True)
            kind = err.kind if isinstance(err, ObjckptError) else type(err).__name__
            self._warn(kind, f"retention failed, and is tried again after the next save: {err}")
            return
        if report.later:
            key, why = report.later[0]
            self._warn(
                "later",
                f"the store refused to delete {len(report.later)} objects, {key} among them ({why}); "
                f"`objckpt gc {store.url}` tries again",
            )

    def _remove_remains(self, store: Store, log: Log, attempt: str) -> None:
        self._collected = False  # other ranks, and requests still under way, may leave something after this
        try:
            collect.delete_attempts(store, log, [attempt])
        except Exception:  # the save's failure is told; what is left costs space only, and a collection finds it
            logger.debug("the remains of %s could not be removed", attempt, exc_info=True)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:  # once, not after each save
            self._warned.add(kind)
            self.warn(text)
