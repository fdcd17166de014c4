"""Checkpoints written with `objckpt.format` alone, without the save path: hostile names, absurd values, any number.

put_checkpoint(store, step=1, state={"model": {"w": np.ones(3, np.float32)}, "epoch": 2})
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from objckpt.format import checksums, keys, values
from objckpt.format.fqn import to_fqn
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import ChunkTable, ShardEntry
from objckpt.store import Store

SESSION = "0" * 26


def put_checkpoint(
    store: Store,
    step: int,
    state: dict[Any, Any],
    *,
    seq: int = 0,
    meta: Any = None,
    epoch: int = 1,
    host: str = "host",
) -> Commit:
    """Write a committed checkpoint of one rank; numpy arrays in `state` are its tensors. Returns the record."""
    attempt = keys.attempt(step, SESSION, seq)
    found: list[tuple[tuple[Any, ...], np.ndarray]] = []
    tree = _with_leaves(state, (), found)
    pack, rows, shards = b"", [], []
    for path, array in found:
        raw = np.ascontiguousarray(array).tobytes()
        count = 0
        if raw:
            rows.append((0, len(pack), len(raw), len(raw), 0, checksums.crc64(raw)))
            count = 1
        zeros = (0,) * array.ndim
        shards.append(
            ShardEntry(
                path, str(array.dtype), array.shape, zeros, array.shape, checksums.crc64(raw), len(rows) - count, count
            )
        )
        pack += raw
    name = keys.pack(attempt, 0, 0)
    if pack:
        store.put(name, pack)
    index = Index(
        step=step,
        attempt=attempt,
        rank=0,
        world_size=1,
        packs=[(name, len(pack))] if pack else [],
        shards=shards,
        chunks=ChunkTable.from_rows(rows),
        codecs=["raw"],
        tree=values.pack(tree),
    )
    data = index.encode()
    commit = Commit(
        seq=seq,
        write_id=os.urandom(16),
        epoch=epoch,
        session=SESSION,
        time_s=1_800_000_000.0 + seq,
        host=host,
        step=step,
        attempt=attempt,
        parent=None,
        world_size=1,
        raw_bytes=len(pack),
        stored_bytes=len(pack),
        tensors=len(shards),
        ranks=[(checksums.digest_hex(data), len(data))],
        signature=index.signature,
        meta=meta,
    )
    store.put(commit.index_key(0), data)
    store.put(keys.record(seq), commit.encode())
    return commit


def _with_leaves(node: Any, path: tuple[Any, ...], found: list[tuple[tuple[Any, ...], np.ndarray]]) -> Any:
    if isinstance(node, np.ndarray):
        found.append((path, node))
        return values.TensorLeaf(to_fqn(path))
    if isinstance(node, dict):
        return {k: _with_leaves(v, (*path, k), found) for k, v in node.items()}
    if isinstance(node, list):
        return [_with_leaves(v, (*path, i), found) for i, v in enumerate(node)]
    return node
