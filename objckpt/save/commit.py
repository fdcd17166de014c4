"""The last stage: the index, then the commit record. Until the record exists, nobody sees anything."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from objckpt import log as commit_log
from objckpt.errors import SaveError
from objckpt.format import bundle, checksums, keys
from objckpt.format.index import Index
from objckpt.format.records import WRITE_ID_BYTES, Commit, Open, Retire
from objckpt.format.tables import ChunkTable, ShardEntry, TensorEntry
from objckpt.save import plan
from objckpt.save.encode import CODECS, Encoded
from objckpt.store import Store
from objckpt.store.probe import probe

logger = logging.getLogger("objckpt")


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
    replicated: bytes,
    described: Sequence[TensorEntry],
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
    chunks = ChunkTable.from_rows(encoded.rows)
    return Index(step, attempt, rank, world_size, packs, shards, chunks, CODECS, tree, replicated, described)


class LogWriter:
    """The writer's place in the log: one epoch, taken by the first save of the session. Blocking; one thread at a time.

    `warn(text)` is called for what the user of the store has to know.
    """

    def __init__(
        self,
        store: Store,
        session: str,
        world_size: int,
        deadline_s: float,
        *,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.store, self.session, self.world_size, self.deadline_s = store, session, world_size, deadline_s
        self.warn = warn
        self._tried = 0  # the log's length when bundles could not be written
        self.log = commit_log.Log(store.url)
        self.epoch = 0

    def open(self, capabilities: dict[str, Any] | None = None) -> None:
        """Take an epoch above all others. A second call, or one by a new agent of the same session, keeps the first's.

        capabilities: of the store, as `probe` gives them. None: what the log says of them, or else what a probe finds.

        Raises:
            WriterFencedError: a newer writer has opened the log meanwhile.
            StoreError: the store could not be read, written or probed.
        """
        if self.epoch:
            return
        self.log = commit_log.read_log(self.store, self.log)
        mine = [r for r in self.log.records if isinstance(r, Open) and r.session == self.session]
        if not mine:
            found = capabilities or self._recorded() or {"url": self.store.url} | probe(self.store)
            write_id = os.urandom(WRITE_ID_BYTES)

            def make(seq: int, log: commit_log.Log) -> Open:
                return Open(
                    seq=seq,
                    epoch=log.epoch + 1,
                    world_size=self.world_size,
                    capabilities=found,
                    **self._stamp(write_id),
                )

            keyed = found.get("conditional_put") is False
            record, self.log = commit_log.append(self.store, self.log, make, deadline_s=self.deadline_s, keyed=keyed)
            mine = [record]
        if self.log.keyed:
            self.warn(
                f"{self.store.url} does not keep two writers of one key apart "
                f"({self.log.capabilities.get('conditional_put_evidence', 'no evidence recorded')}): of two jobs that "
                "start to save under one URL at the same moment neither may notice the other; give each its own URL"
            )
        self.epoch = mine[-1].epoch
        commit_log.fence(self.log, self.epoch, self.session)

    def _bundle(self) -> None:
        if self.log.next_seq - max(self.log.bundled, self._tried) < bundle.SIZES[-1]:
            return
        self._tried = self.log.next_seq  # one that fails is not tried again with each commit
        self.log = commit_log.write_bundles(self.store, self.log)
        if self.log.next_seq - self.log.bundled < bundle.SIZES[-1]:
            self._tried = 0

    def _recorded(self) -> dict[str, Any]:
        """The capabilities that the log has; none when it was copied here from another place."""
        found = self.log.capabilities
        return found if found.get("url", self.store.url) == self.store.url else {}

    def commit(self, index: Index, ranks: list[tuple[str, int]], parent: int | None, meta: Any, sizes: Sizes) -> Commit:
        """Append the manifest.

        Raises:
            WriterFencedError: a newer writer has opened the log meanwhile.
            SaveError: the attempt was given up by somebody: by a rank that waited too long, or by a collection.
        """
        self._bundle()  # before: nobody waits for it after the commit
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
