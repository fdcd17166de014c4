"""Executes a plan: threads that read, verify and decode. Raw chunks go from the socket into place without a copy.

The CRC of every chunk's stored bytes is checked as soon as they are there, while they are in the cache. Bytes that fail
it are fetched once more, then they are an error. The first error stops everything and is raised.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from objckpt.errors import FormatError, IntegrityError, NotFoundError
from objckpt.events import Progress, ignore
from objckpt.format import checksums, codecs
from objckpt.restore.plan import ByteArray, ChunkRead, Region, Request
from objckpt.store import Store

SCRATCH_BYTES = 256 * 1024 * 1024  # of all threads together: encoded chunks, pieces that are placed later
RAW = "raw"


class _Stopped(Exception):
    """Another thread has failed; this one gives up at its next chunk."""


@dataclass(slots=True)
class _Landing:
    """Where the stored bytes of a chunk go, and what remains to be done once they are right."""

    chunk: ChunkRead
    stored: memoryview
    direct: memoryview | None  # the chunk's place in the memory of its first use, if that takes it in one piece


def fetch(
    store: Store,
    requests: Sequence[Request],
    *,
    what: str,
    budget_bytes: int = SCRATCH_BYTES,
    progress: Progress = ignore,
    stage: str = "restore",
) -> None:
    """Fill the regions of `requests`. Blocks until all of it is done, or nothing goes on any more.

    Args:
        what: the checkpoint's name in messages, such as "step 100".
        budget_bytes: bound of the scratch memory; a single request may exceed it, alone.

    Raises:
        IntegrityError: bytes are missing or wrong; names key, FQN and range.
        FormatError: a chunk has a codec that this version does not know.
        StoreError: the store cannot be read.
    """
    if requests:
        _Run(store, requests, what, budget_bytes, progress, stage).run()


class _Run:
    def __init__(
        self, store: Store, requests: Sequence[Request], what: str, budget_bytes: int, progress: Progress, stage: str
    ) -> None:
        self.store, self.what, self.budget_bytes = store, what, budget_bytes
        self.progress, self.stage = progress, stage
        self.queue = deque(requests)
        self.threads = min(store.options.connections, len(requests))
        self.total_bytes, self.done_bytes = sum(r.nbytes for r in requests), 0
        self.scratch_bytes, self.running = 0, 0
        self.opened: set[int] = set()  # ids of the regions whose scratch memory is admitted
        self.changed = threading.Condition()
        self.told = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        workers = [threading.Thread(target=self._work, name=f"objckpt-get-{i}") for i in range(self.threads)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException as err:  # KeyboardInterrupt: the memory may not be written to once this call is over
            self._fail(err)
            for worker in workers:
                if worker.ident is not None:
                    worker.join()
            raise
        if self.error is not None:
            raise self.error

    # ---- admission ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                request, scratch = taken
                try:
                    self._serve(request)
                finally:
                    with self.changed:
                        self.running -= 1
                        self.scratch_bytes -= scratch
                        self.changed.notify_all()
        except _Stopped:
            pass
        except BaseException as err:
            self._fail(err)

    def _take(self) -> tuple[Request, int] | None:
        """The next request once its scratch memory is within the budget, or none is under way that could free some."""
        with self.changed:
            while True:
                if self.error is not None or not self.queue:
                    return None
                request = self.queue[0]
                own = sum(_scratch_of(chunk) for chunk in request.chunks)
                fresh = {id(u.region): u.region for c in request.chunks for u in c.uses if u.region.scratch_bytes}
                regions = sum(r.scratch_bytes for i, r in fresh.items() if i not in self.opened)
                if self.scratch_bytes + own + regions <= self.budget_bytes or not self.running:
                    break
                self.changed.wait()
            self.queue.popleft()
            self.opened |= fresh.keys()
            self.running += 1
            self.scratch_bytes += own + regions
            return request, own

    def _fail(self, err: BaseException) -> None:
        with self.changed:
            if self.error is None:
                self.error = err
            self.changed.notify_all()

    # ---- one request -------------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        buffers, landings = self._lay(request)
        wrong: list[_Landing] = []

        def arrived(number: int) -> None:
            if self.error is not None:
                raise _Stopped
            landing = landings[number]
            if landing is not None:
                if checksums.crc64(landing.stored) == landing.chunk.crc:
                    self._settle(landing)
                else:
                    wrong.append(landing)

        self._get(request.chunks, request.start, buffers, arrived)
        for landing in wrong:  # bytes were damaged on the way, or are damaged in the store: ask anew
            chunk = landing.chunk
            self._get((chunk,), chunk.offset, [landing.stored], lambda number: None)
            found = checksums.crc64(landing.stored)
            if found != chunk.crc:
                raise IntegrityError(
                    f"{self.what}: {_names([chunk])}: bytes [{chunk.offset}, {chunk.end}) of {chunk.key} in "
                    f"{self.store.url} are not what was written: CRC-64/NVME {found:016x}, recorded {chunk.crc:016x}. "
                    "Restore another checkpoint; `objckpt verify --all` tells which are whole.",
                    key=chunk.key, fqn=chunk.uses[0].region.fqn, start=chunk.offset, end=chunk.end,
                )  # fmt: skip
            self._settle(landing)

    def _lay(self, request: Request) -> tuple[list[memoryview], list[_Landing | None]]:
        """The memory that the GET reads into, gaps included, and what each buffer is."""
        buffers: list[memoryview] = []
        landings: list[_Landing | None] = []
        at = request.start
        for chunk in request.chunks:
            if chunk.offset > at:
                buffers.append(_scratch(chunk.offset - at))
                landings.append(None)
            place = chunk.uses[0].place_of(chunk.raw)
            direct = None
            if place is not None:
                direct = self._open(chunk.uses[0].region)[place : place + chunk.raw]
            in_place = direct is not None and chunk.codec == RAW and chunk.stored == chunk.raw
            stored = direct if in_place and direct is not None else _scratch(chunk.stored)
            buffers.append(stored)
            landings.append(_Landing(chunk, stored, direct))
            at = chunk.end
        return buffers, landings

    def _get(
        self, chunks: Sequence[ChunkRead], start: int, buffers: list[memoryview], arrived: Callable[[int], None]
    ) -> None:
        key = chunks[0].key
        try:
            self.store.get_into(key, start, buffers, filled=arrived)
        except NotFoundError as err:
            raise IntegrityError(
                f"{self.what}: {key} is missing from {self.store.url}; it holds {_names(chunks)}. "
                "Was the checkpoint removed while it was read?",
                key=key, fqn=chunks[0].uses[0].region.fqn,
            ) from err  # fmt: skip
        except IntegrityError as err:
            if "fqn" in err.context:
                raise
            raise IntegrityError(
                f"{self.what}: {_names(chunks)}: {err.message}",
                **{"key": key, **err.context, "fqn": chunks[0].uses[0].region.fqn},
            ) from err

    def _settle(self, landing: _Landing) -> None:
        """The stored bytes are right: decode them, hand them to every use, and close the regions that are full."""
        chunk = landing.chunk
        raw = landing.stored
        if chunk.codec != RAW:
            raw = landing.direct if landing.direct is not None else _scratch(chunk.raw)
            try:
                codecs.decode(chunk.codec, landing.stored, raw)
            except (IntegrityError, FormatError) as err:
                raise type(err)(
                    f"{self.what}: {_names([chunk])}: bytes [{chunk.offset}, {chunk.end}) of {chunk.key}: {err}",
                    **{**err.context, "key": chunk.key, "fqn": chunk.uses[0].region.fqn},
                ) from err
        elif chunk.stored != chunk.raw:
            raise IntegrityError(
                f"{self.what}: {_names([chunk])}: a raw chunk of {chunk.key} has {chunk.stored} bytes, not {chunk.raw}",
                key=chunk.key, fqn=chunk.uses[0].region.fqn,
            )  # fmt: skip
        whole = _array(raw)
        for number, use in enumerate(chunk.uses):
            if number == 0 and landing.direct is not None:
                continue
            region = _array(self._open(use.region))
            if use.runs is None:
                region[use.start : use.start + chunk.raw] = whole
            else:
                use.runs.copy(whole, use.start, region)
        for use in chunk.uses:
            self._count_down(use.region)
        with self.told:
            self.done_bytes += chunk.stored
            self.progress(self.stage, self.done_bytes, self.total_bytes)

    def _open(self, region: Region) -> memoryview:
        with self.changed:
            return region.open()

    def _count_down(self, region: Region) -> None:
        with self.changed:
            region.pending -= 1
            if region.pending:
                return
        region.close()
        if region.scratch_bytes:
            with self.changed:
                self.scratch_bytes -= region.scratch_bytes
                self.changed.notify_all()


def _scratch_of(chunk: ChunkRead) -> int:
    """Scratch bytes that a chunk needs until its request is done."""
    direct = chunk.uses[0].place_of(chunk.raw) is not None
    if chunk.codec == RAW:
        return 0 if direct else chunk.stored
    return chunk.stored + (0 if direct else chunk.raw)


def _scratch(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def _array(memory: memoryview) -> ByteArray:
    return np.frombuffer(memory, np.uint8)


def _names(chunks: Sequence[ChunkRead]) -> str:
    """The leaves that chunks belong to, for messages."""
    names = list(dict.fromkeys(use.region.fqn for chunk in chunks for use in chunk.uses))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
