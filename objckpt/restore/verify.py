"""Reads a whole checkpoint and compares it with what was recorded. Torch-free; bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from objckpt.errors import FormatError, IntegrityError, NotFoundError
from objckpt.events import Progress, ignore
from objckpt.format import checksums, codecs
from objckpt.restore.open import Checkpoint, StoredShard
from objckpt.restore.plan import MAX_REQUEST_BYTES, ChunkRead, Region, Request, chunks_for, coalesce
from objckpt.store import Store

_JOB_BYTES = 64 * 1024 * 1024  # shards that one thread reads in a row


@dataclass(frozen=True, slots=True)
class Problem:
    """Something stored is not what was recorded. `fqn` is the leaf that cannot be restored, `key` the object."""

    kind: str  # "missing", "corrupt", "unreadable" (by this version: an unknown codec)
    key: str
    fqn: str
    rank: int
    message: str


def verify(store: Store, checkpoint: Checkpoint, *, progress: Progress = ignore) -> list[Problem]:
    """Download every chunk; check its CRC and length, decode it, and check the digest of every shard. Blocks.

    Returns the problems found, at most one a shard, in the order of ranks and shards; [] means that all is right.
    Raises StoreError when the store cannot be read, which says nothing about the bytes.
    """
    shards = [StoredShard(index, entry) for index in checkpoint.indexes for entry in index.shards]
    work = _Work(store, progress, sum(int(index.chunks.stored.sum()) for index in checkpoint.indexes))
    jobs = list(_jobs(shards))
    if not jobs:
        return []
    pool = ThreadPoolExecutor(min(store.options.connections, len(jobs)), "objckpt-verify")
    try:
        return [problem for found in pool.map(work.check, jobs) for problem in found]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _jobs(shards: Sequence[StoredShard]) -> Iterator[list[StoredShard]]:
    """Neighbours together, so that small shards share requests."""
    job: list[StoredShard] = []
    nbytes = 0
    for shard in shards:
        if job and nbytes + shard.entry.nbytes > _JOB_BYTES:
            yield job
            job, nbytes = [], 0
        job.append(shard)
        nbytes += shard.entry.nbytes
    if job:
        yield job


class _Work:
    def __init__(self, store: Store, progress: Progress, total_bytes: int) -> None:
        self.store, self.progress, self.total_bytes = store, progress, total_bytes
        self.done_bytes = 0
        self.told = threading.Lock()

    def check(self, job: Sequence[StoredShard]) -> list[Problem]:
        """The problems of some shards, which are read in order."""
        owners: dict[str, StoredShard] = {}
        regions: dict[str, Region] = {}
        chunks: list[ChunkRead] = []
        for number, shard in enumerate(job):  # a name of its own for each shard: one tensor may have several here
            owners[str(number)] = shard
            regions[str(number)] = Region(str(number), None)
            chunks += chunks_for(shard, None, regions[str(number)])
        sums = {name: _Sum(shard) for name, shard in owners.items()}
        for request in coalesce(chunks, max_request_bytes=MAX_REQUEST_BYTES):
            self._read(request, sums)
        return [problem for each in sums.values() if (problem := each.verdict()) is not None]

    def _read(self, request: Request, sums: dict[str, _Sum]) -> None:
        memory = np.empty(request.nbytes, np.uint8).data
        failed: Exception | None = None
        try:
            self.store.get_into(request.key, request.start, [memory])
        except (NotFoundError, IntegrityError) as err:
            failed = err
        for chunk in request.chunks:
            stored = memory[chunk.offset - request.start : chunk.end - request.start]
            for use in chunk.uses:
                each = sums[use.region.fqn]
                if failed is not None and len(request.chunks) > 1 and isinstance(failed, IntegrityError):
                    # The object is short: the chunks before its end may still be right.
                    each.add(chunk, stored, use.start, self._again(chunk, stored))
                else:
                    each.add(chunk, stored, use.start, failed)
            with self.told:
                self.done_bytes += chunk.stored
                self.progress("verify", self.done_bytes, self.total_bytes)

    def _again(self, chunk: ChunkRead, stored: memoryview) -> Exception | None:
        try:
            self.store.get_into(chunk.key, chunk.offset, [stored])
        except (NotFoundError, IntegrityError) as err:
            return err
        return None


class _Sum:
    """What is known about one shard so far."""

    def __init__(self, shard: StoredShard) -> None:
        self.shard = shard
        self.digest = 0
        self.at = 0  # raw bytes digested
        self.ahead: dict[int, tuple[int, int]] = {}  # start → CRC and length of raw bytes that came before their turn
        self.problem: Problem | None = None
        self.key = ""

    def add(self, chunk: ChunkRead, stored: memoryview, start: int, failed: Exception | None) -> None:
        self.key = chunk.key
        if self.problem is not None:
            return
        where = f"bytes [{chunk.offset}, {chunk.end})"
        if failed is not None:
            missing = isinstance(failed, NotFoundError)
            text = "the object is missing" if missing else f"{where}: {failed}"
            self._found("missing" if missing else "corrupt", text)
            return
        found = checksums.crc64(stored)
        if found != chunk.crc:
            self._found("corrupt", f"{where}: CRC-64/NVME {found:016x}, recorded {chunk.crc:016x}")
            return
        raw = stored
        if chunk.codec != "raw":
            raw = np.empty(chunk.raw, np.uint8).data
            try:
                codecs.decode(chunk.codec, stored, raw)
            except (IntegrityError, FormatError) as err:
                self._found("corrupt" if isinstance(err, IntegrityError) else "unreadable", f"{where}: {err}")
                return
        elif chunk.stored != chunk.raw:
            self._found("corrupt", f"{where}: a raw chunk of {chunk.stored} bytes, {chunk.raw} recorded")
            return
        self.ahead[start] = (found if raw is stored else checksums.crc64(raw), len(raw))
        while self.at in self.ahead:
            crc, nbytes = self.ahead.pop(self.at)
            self.digest = checksums.crc64_combine(self.digest, crc, nbytes)
            self.at += nbytes

    def verdict(self) -> Problem | None:
        """The problem of this shard, once all its chunks were added."""
        entry = self.shard.entry
        if self.problem is None and (self.at != entry.nbytes or self.digest != entry.digest):
            self._found("corrupt", "the digest of its raw bytes is not the recorded one")
        return self.problem

    def _found(self, kind: str, text: str) -> None:
        entry, rank = self.shard.entry, self.shard.index.rank
        self.problem = Problem(kind, self.key, entry.fqn, rank, f"{entry.fqn}: {self.key}: {text}")
