"""The bytes' whole way of one rank, after staging: encode, upload packs, upload the index. What agent and plug-ins share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from objckpt import limits
from objckpt.config import SaveOptions, StoreOptions
from objckpt.format import checksums
from objckpt.format.index import NOTHING_ALIKE, Index
from objckpt.format.tables import TensorEntry
from objckpt.save import plan
from objckpt.save.commit import LeafMeta, build_index, index_object
from objckpt.save.encode import Encoded, Pieces, encode
from objckpt.save.upload import upload_packs
from objckpt.store import Uploads


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes: the leaves back to back, and how to get at the bytes of `[start, start + nbytes)`."""

    metas: Sequence[LeafMeta]
    sizes: Sequence[int]  # bytes of each leaf
    itemsizes: Sequence[int]
    read: Callable[[int, int], Pieces]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class Journey:
    """Threads for checksums and codecs, kept over many saves of one rank."""

    def __init__(self, store: StoreOptions, options: SaveOptions) -> None:
        self.store, self.options = store, options
        workers = max(1, min(8, (os.cpu_count() or 2) - 1))
        self._window = 2 * workers
        self._pool = ThreadPoolExecutor(workers, "objckpt-encode")
        self._reader = ThreadPoolExecutor(1, "objckpt-read")

    def close(self) -> None:
        """End the threads; waits for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def upload(
        self,
        uploads: Uploads,
        snapshot: Snapshot,
        *,
        step: int,
        attempt: str,
        rank: int,
        world_size: int,
        tree: bytes | None,
        replicated: bytes = NOTHING_ALIKE,
        described: Sequence[TensorEntry] = (),
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> Index:
        """Upload the packs; returns the index, which is not uploaded yet. Raises the first failure, the packs' rest aborted."""
        options, connections = self.options, self.store.connections
        plans, total = plan.lay_out(snapshot.sizes)
        # Compressed parts are copies in memory, and stay small.
        part_bytes = self.store.piece_bytes(total) if options.compression == "none" else limits.PART_BYTES
        encoded = Encoded()
        parts = encode(
            plans,
            snapshot.itemsizes,
            snapshot.read,
            compression=options.compression,
            chunk_bytes=options.chunk_bytes,
            part_bytes=options.part_bytes or part_bytes,
            pool=self._pool,
            window=self._window,
            out=encoded,
        )
        await upload_packs(
            uploads,
            parts,
            attempt=attempt,
            rank=rank,
            connections=connections,
            reader=self._reader,
            progress=progress,
        )
        return build_index(
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            metas=snapshot.metas,
            plans=plans,
            encoded=encoded,
            chunk_bytes=options.chunk_bytes,
            tree=tree,
            replicated=replicated,
            described=described,
        )


async def upload_index(uploads: Uploads, index: Index) -> tuple[str, int]:
    """Upload an index under its name; returns its digest (32 hex) and its size in bytes."""
    key, data = index_object(index)
    await uploads.put(key, [memoryview(data)], checksums.crc64(data))
    return checksums.digest_hex(data), len(data)
