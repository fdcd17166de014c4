"""From a commit record to the indexes: read, checked against the record, and against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from objckpt.errors import FormatError, IntegrityError, NotFoundError
from objckpt.format import checksums, keys, values
from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.index import PER_RANK, Index, ShardEntry
from objckpt.format.records import Commit
from objckpt.geometry import Box
from objckpt.restore.match import leaves
from objckpt.store import Store

_READERS = 16
_MAX_TANGLED = 1024  # boxes of which no plane separates any: compared pair by pair; no sharding makes such


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard and the index that lists it."""

    index: Index
    entry: ShardEntry


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint: its shards tile the global shape exactly."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    @property
    def itemsize(self) -> int:
        return self.shards[0].entry.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, opened: everything but the tensors' bytes."""

    commit: Commit
    indexes: list[Index]  # all; with `near` perhaps only some, and then a tensor's shards may be incomplete
    tree: Any  # neutral, see format/values
    tensors: dict[str, StoredTensor]

    @property
    def complete(self) -> bool:
        return len(self.indexes) == self.commit.world_size

    def describe(self, leaf: values.TensorLeaf) -> tuple[str, tuple[int, ...]]:
        """dtype name and shape of a leaf of the tree."""
        if leaf.view is not None:
            return leaf.view.dtype, leaf.view.shape
        stored = self.tensors[leaf.fqn]
        return stored.dtype, stored.shape


def open_checkpoint(store: Store, commit: Commit, *, near: int | None = None) -> Checkpoint:
    """Read all indexes of a checkpoint, in parallel. Blocks; torch-free.

    With `near`, a rank, only its index and rank 0's are read where these name every tensor: enough for a rank that takes
    back what it wrote itself. See `Checkpoint.complete`.

    Raises:
        IntegrityError: an index is missing or is not the one that was committed.
        FormatError: an index does not hold together, or the shards do not tile their tensors.
    """
    ranks = list(range(commit.world_size))
    first = ranks if near is None else sorted({0, near} & set(ranks))
    indexes = _read_indexes(store, commit, first)
    tree = _tree(indexes, commit)
    if len(first) < len(ranks):
        stored = {entry.fqn for index in indexes for entry in index.shards}
        if any(type(leaf) is values.TensorLeaf and leaf.fqn not in stored for _, leaf in leaves(tree)):
            known = {index.rank: index for index in indexes}
            rest = _read_indexes(store, commit, [rank for rank in ranks if rank not in known])
            indexes = sorted([*indexes, *rest], key=lambda index: index.rank)
            tree = _tree(indexes, commit)
    by_name: dict[str, list[StoredShard]] = {}
    for index in indexes:
        for entry in index.shards:
            by_name.setdefault(entry.fqn, []).append(StoredShard(index, entry))
    complete = len(indexes) == commit.world_size
    tensors = {fqn: _tensor(fqn, shards, commit, complete) for fqn, shards in by_name.items()}
    checkpoint = Checkpoint(commit, indexes, tree, tensors)
    _check_leaves(checkpoint, tree)
    return checkpoint


def _read_indexes(store: Store, commit: Commit, ranks: Sequence[int]) -> list[Index]:
    with ThreadPoolExecutor(min(_READERS, len(ranks)), "objckpt-index") as pool:
        return list(pool.map(lambda rank: _read_index(store, commit, rank), ranks))


def _tree(indexes: Sequence[Index], commit: Commit) -> dict[Any, Any]:
    """Rank 0's tree, and in it what belongs to single ranks: `per_rank/<rank>` of each."""
    whole: dict[Any, Any] | None = None
    for index in indexes:
        key = commit.index_key(index.rank)
        tree = None if index.tree is None else values.unpack(index.tree, key)
        if index.rank == 0:
            if not isinstance(tree, dict):
                raise FormatError(f"{key}: the tree is missing or no mapping", key=key)
            whole = tree
        elif tree is not None:
            own = tree.get(PER_RANK) if isinstance(tree, dict) and set(tree) == {PER_RANK} else None
            if whole is None or not isinstance(own, dict) or set(own) != {index.rank}:
                raise FormatError(f"{key}: its tree is not that of rank {index.rank}", key=key)
            others = whole.setdefault(PER_RANK, {})
            if not isinstance(others, dict):
                raise FormatError(f"{key}: its tree does not fit rank 0's", key=key)
            others[index.rank] = own[index.rank]
    assert whole is not None
    return whole


def _read_index(store: Store, commit: Commit, rank: int) -> Index:
    digest, size = commit.ranks[rank]
    key = commit.index_key(rank)
    try:
        data = store.get(key, max_bytes=size)
    except NotFoundError as err:
        raise IntegrityError(
            f"step {commit.step}: its index {key} is missing from {store.url}; was the checkpoint removed meanwhile?",
            key=key,
            step=commit.step,
        ) from err
    if len(data) != size or checksums.digest_hex(data) != digest:
        raise IntegrityError(
            f"{key}: its bytes are not those that were committed (expected {size} bytes with SHA-256 {digest}…, "
            f"found {len(data)})",
            key=key,
            step=commit.step,
        )
    index = Index.decode(data, key)
    if (index.step, index.attempt, index.rank, index.world_size) != (
        commit.step,
        commit.attempt,
        rank,
        commit.world_size,
    ):
        raise FormatError(f"{key}: it belongs to another checkpoint or rank", key=key)
    own, foreign = keys.attempt_prefix(commit.attempt), set(commit.foreign_packs)
    for pack, _ in index.packs:
        if not pack.startswith(own) and pack not in foreign:
            raise FormatError(f"{key}: it refers to {pack}, which the commit record does not name", key=key)
    return index


def _tensor(fqn: str, shards: Sequence[StoredShard], commit: Commit, complete: bool) -> StoredTensor:
    first = shards[0].entry
    distinct: dict[Any, StoredShard] = {}
    for shard in shards:
        entry = shard.entry
        if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
            raise FormatError(f"step {commit.step}: {fqn}: ranks disagree on its dtype or shape", fqn=fqn)
        other = distinct.setdefault(entry.box, shard)
        if other.entry.digest != entry.digest:
            raise FormatError(
                f"step {commit.step}: {fqn}: ranks {other.index.rank} and {shard.index.rank} hold different bytes",
                fqn=fqn,
            )
    if complete:
        _check_tiling([box for box in distinct if box.elements], first.global_shape, f"step {commit.step}: {fqn}", fqn)
    return StoredTensor(fqn, first.dtype, first.global_shape, tuple(distinct.values()))


def _check_tiling(boxes: list[Box], shape: tuple[int, ...], what: str, fqn: str) -> None:
    """Boxes inside a shape tile it when they do not overlap and have as many elements. FormatError otherwise."""
    if sum(box.elements for box in boxes) != math.prod(shape):
        raise FormatError(f"{what}: its shards do not tile its shape {shape}", fqn=fqn)
    # Cut into groups that no box spans, dimension by dimension: a group of one overlaps nothing.
    groups = [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        parts = next((cut for d in range(len(shape)) if len(cut := _cut(group, d)) > 1), [])
        groups += parts
        if parts:
            continue
        if len(group) > _MAX_TANGLED:
            raise FormatError(f"{what}: {len(group)} shards lie across each other", fqn=fqn)
        if any(box.intersect(other) is not None for i, box in enumerate(group) for other in group[:i]):
            raise FormatError(f"{what}: its shards overlap", fqn=fqn)


def _cut(boxes: list[Box], d: int) -> list[list[Box]]:
    """The boxes in groups along dimension `d`: each group ends where the next one begins, or before."""
    out: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offset[d]):
        if box.offset[d] >= end:
            out.append([])
        out[-1].append(box)
        end = max(end, box.offset[d] + box.shape[d])
    return out


def _check_leaves(checkpoint: Checkpoint, tree: Any) -> None:
    """Every tensor leaf of the tree must be stored, and every view lie inside its tensor."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            stack.extend(node.values())
        elif type(node) in (list, tuple):
            stack.extend(node)
        elif type(node) is values.TensorLeaf:
            stored = checkpoint.tensors.get(node.fqn)
            if stored is None:
                raise FormatError(
                    f"step {checkpoint.commit.step}: {node.fqn} is in the tree but not stored", fqn=node.fqn
                )
            view = node.view
            if view is not None and (view_end(view) > stored.nbytes or view.byte_offset % ITEMSIZE[view.dtype]):
                raise FormatError(f"step {checkpoint.commit.step}: a view leaves {node.fqn}", fqn=node.fqn)


def view_end(view: values.ViewSpec) -> int:
    """The byte after the last one that a view touches."""
    if 0 in view.shape:
        return view.byte_offset
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    return view.byte_offset + (last + 1) * ITEMSIZE[view.dtype]
