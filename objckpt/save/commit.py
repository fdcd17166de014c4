"""The last stage: the index, then the commit record. Until the record exists, nobody sees anything."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from objckpt import log as commit_log
from objckpt.errors import SaveError
from objckpt.format import checksums, keys
from objckpt.format.index import ChunkTable, Index, ShardEntry
from objckpt.format.records import WRITE_ID_BYTES, Commit, Open, Retire
from objckpt.save import plan
from objckpt.save.encode import CODECS, Encoded
from objckpt.store import Store


@dataclass(frozen=True, slots=True)
class LeafMeta:
    """What the trainer tells of a leaf beside its bytes. Shapes and offsets in elements."""

    path: tuple[Any, ...]
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a whole checkpoint, for its manifest: bytes of all tensors, bytes in packs, number of tensors."""

    raw_bytes: int
    stored_bytes: int
    tensors: int


def build_index(
    *,
    step: int,
    attempt: str,
    rank: int,
    world_size: int,
    metas: Sequence[LeafMeta],
    plans: Sequence[plan.LeafPlan],
    encoded: Encoded,
    chunk_bytes: int,
    tree: bytes | None,
    replicated: list[tuple[str, int]],
) -> Index:
    """Pure: the index of what `encoded` describes."""
    shards, first = [], 0
    for meta, leaf, digest in zip(metas, plans, encoded.digests, strict=True):
        count = -(-leaf.nbytes // chunk_bytes)
        shards.append(
            ShardEntry(meta.path, meta.dtype, meta.global_shape, meta.offset, meta.shape, digest, first, count)
        )
        first += count
    packs = [(keys.pack(attempt, rank, n), size) for n, size in enumerate(encoded.pack_sizes)]
    return Index(
        step, attempt, rank, world_size, packs, shards, ChunkTable.from_rows(encoded.rows), CODECS, tree, replicated
    )


class LogWriter:
    """The writer's place in the log: one epoch, taken by the first save of the session. Blocking; one thread at a time."""

    def __init__(self, store: Store, session: str, world_size: int, deadline_s: float) -> None:
        self.store, self.session, self.world_size, self.deadline_s = store, session, world_size, deadline_s
        self.log = commit_log.Log(store.url)
        self.epoch = 0

    def open(self) -> None:
        """Take an epoch above all others. A second call, or one by a new agent of the same session, keeps the first's."""
        if self.epoch:
            return
        self.log = commit_log.read_log(self.store, self.log)
        mine = [r for r in self.log.records if isinstance(r, Open) and r.session == self.session]
        if not mine:
            write_id = os.urandom(WRITE_ID_BYTES)

            def make(seq: int, log: commit_log.Log) -> Open:
                return Open(seq=seq, epoch=log.epoch + 1, world_size=self.world_size, **self._stamp(write_id))

            record, self.log = commit_log.append(self.store, self.log, make, deadline_s=self.deadline_s)
            mine = [record]
        self.epoch = mine[-1].epoch
        commit_log.fence(self.log, self.epoch, self.session)

    def commit(self, index: Index, ranks: list[tuple[str, int]], parent: int | None, meta: Any, sizes: Sizes) -> Commit:
        """Append the manifest.

        Raises:
            WriterFencedError: a newer writer has opened the log meanwhile.
            SaveError: the attempt was given up by somebody: by a rank that waited too long, or by a collection.
        """
        write_id = os.urandom(WRITE_ID_BYTES)

        def make(seq: int, log: commit_log.Log) -> Commit:
            commit_log.fence(log, self.epoch, self.session)
            if index.attempt in log.aborted:
                raise SaveError(f"the attempt {index.attempt} was given up: {log.why_aborted(index.attempt)}")
            return Commit(
                seq=seq,
                epoch=self.epoch,
                step=index.step,
                attempt=index.attempt,
                parent=parent,
                world_size=self.world_size,
                raw_bytes=sizes.raw_bytes,
                stored_bytes=sizes.stored_bytes,
                tensors=sizes.tensors,
                ranks=ranks,
                signature=index.signature,
                meta=meta,
                **self._stamp(write_id),
            )

        record, self.log = commit_log.append(self.store, self.log, make, deadline_s=self.deadline_s)
        return record

    def retire(self, seqs: list[int], attempts: list[str], reason: str) -> Retire:
        """Append the record after which these checkpoints are not live and these attempts can never commit."""
        write_id = os.urandom(WRITE_ID_BYTES)

        def make(seq: int, log: commit_log.Log) -> Retire:
            commit_log.fence(log, self.epoch, self.session)
            return Retire(
                seq=seq, epoch=self.epoch, seqs=seqs, attempts=attempts, reason=reason, **self._stamp(write_id)
            )

        record, self.log = commit_log.append(self.store, self.log, make, deadline_s=self.deadline_s)
        return record

    def _stamp(self, write_id: bytes) -> dict[str, Any]:
        return {"write_id": write_id, "session": self.session, "time_s": time.time(), "host": socket.gethostname()}


def index_object(index: Index) -> tuple[str, bytes]:
    """The index's key, which carries its digest and its signature, and its bytes."""
    data = index.encode()
    return keys.index(index.attempt, index.rank, checksums.digest_hex(data), index.signature), data
