"""Checkpoints written straight into a memory store, without agent or upload: any sharding, codec and damage.

store, checkpoint = write({"w": torch.ones(3)})                          one rank
store, checkpoint = write_shards({"w": (array, [Box(...), ...])})        one rank a box, in turn
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from support.memory_store import MemoryBucket, MemoryStore

from objckpt.config import StoreOptions
from objckpt.format import checksums, codecs, keys, values
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import ChunkTable, ShardEntry, TensorEntry
from objckpt.geometry import Box
from objckpt.restore import Checkpoint, open_checkpoint

SESSION = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ATTEMPT = keys.attempt(7, SESSION, 0)
Piece = tuple[tuple[Any, ...], str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bytes]  # a shard with its bytes


def new_store(connections: int = 4) -> MemoryStore:
    return MemoryStore(MemoryBucket(), "s3://bucket/run", StoreOptions(connections=connections))


def write(
    state: Mapping[Any, Any],
    *,
    chunk_bytes: int = 4096,
    codec: str = "raw",
    pickle: bool = False,
    pack_bytes: int = 2**40,
) -> tuple[MemoryStore, Checkpoint]:
    """The whole state as one rank saves it."""
    import torch

    from objckpt.state.flatten import flatten

    flat = flatten(state, pickle=pickle)
    pieces = [
        (leaf.path, leaf.dtype, leaf.shape, (0,) * len(leaf.shape), leaf.shape,
         leaf.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for leaf in flat.leaves
    ]  # fmt: skip
    return write_ranks([pieces], flat.tree, chunk_bytes=chunk_bytes, codec=codec, pack_bytes=pack_bytes)


def write_shards(
    tensors: Mapping[str, tuple[np.ndarray[Any, Any], Sequence[Box]]], *, ranks: int = 1, chunk_bytes: int = 4096
) -> tuple[MemoryStore, Checkpoint]:
    """Arrays cut into boxes; box `i` is written by rank `i % ranks`."""
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for name, (array, boxes) in tensors.items():
        for i, box in enumerate(boxes):
            part = array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            piece = (
                (name,),
                str(array.dtype),
                array.shape,
                box.offset,
                box.shape,
                np.ascontiguousarray(part).tobytes(),
            )
            pieces[i % ranks].append(piece)
    tree = {name: values.TensorLeaf(name) for name in tensors}
    return write_ranks(pieces, tree, chunk_bytes=chunk_bytes)


def write_ranks(
    ranks: Sequence[Sequence[Piece]],
    tree: Any,
    *,
    chunk_bytes: int = 4096,
    codec: str = "raw",
    pack_bytes: int = 2**40,
    described: Sequence[TensorEntry] = (),
    opened: bool = True,
) -> tuple[MemoryStore, Any]:
    """Write packs and indexes; returns the store and the opened checkpoint (`opened=False`: its commit record).

    described: tensors that every index lists, with their layouts.
    """
    store = new_store()
    listed = []
    for rank, pieces in enumerate(ranks):
        packs: list[bytearray] = [bytearray()]
        rows: list[tuple[int, int, int, int, int, int]] = []
        shards = []
        for path, dtype, global_shape, offset, shape, data in pieces:
            shard = ShardEntry(path, dtype, global_shape, offset, shape, checksums.crc64(data), len(rows), 0)
            first = len(rows)
            for at in range(0, len(data), chunk_bytes):
                raw = data[at : at + chunk_bytes]
                coded = codecs.encode(codec, memoryview(raw), shard.itemsize) if codec != "raw" else None
                stored = raw if coded is None else coded
                if len(packs[-1]) + len(stored) > pack_bytes and packs[-1]:
                    packs.append(bytearray())
                number = 0 if coded is None else 1
                rows.append((len(packs) - 1, len(packs[-1]), len(stored), len(raw), number, checksums.crc64(stored)))
                packs[-1] += stored
            count = len(rows) - first
            shards.append(ShardEntry(path, dtype, global_shape, offset, shape, shard.digest, first, count))
        names = [keys.pack(ATTEMPT, rank, n) for n in range(len(packs))]
        for name, pack in zip(names, packs, strict=True):
            store.put(name, bytes(pack))
        sizes = [(name, len(pack)) for name, pack in zip(names, packs, strict=True)]
        packed = values.pack(tree) if rank == 0 else None
        table = ChunkTable.from_rows(rows)
        index = Index(7, ATTEMPT, rank, len(ranks), sizes, shards, table, ["raw", "zstd"], packed, tensors=described)
        data = index.encode()
        listed.append((checksums.digest_hex(data), len(data)))
        store.put(keys.index(ATTEMPT, rank, listed[-1][0], index.signature), data)
    commit = Commit(
        seq=1, write_id=os.urandom(16), epoch=1, session=SESSION, time_s=0.0, host="h", step=7, attempt=ATTEMPT,
        parent=None, world_size=len(ranks), raw_bytes=0, stored_bytes=0, tensors=0, ranks=listed, signature=index.signature,
    )  # fmt: skip
    result = open_checkpoint(store, commit) if opened else commit
    store.bucket.operations.clear()
    return store, result


def damage(store: MemoryStore, key: str, offset: int) -> None:
    """Flip a bit of a stored object."""
    full = next(k for k in store.bucket.objects if k.endswith(key))
    data, when = store.bucket.objects[full]
    store.bucket.objects[full] = (data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :], when)


def only_pack(store: MemoryStore) -> str:
    """The relative key of the one pack."""
    (found,) = [info.key for info in store.list() if keys.is_pack(info.key)]
    return found
