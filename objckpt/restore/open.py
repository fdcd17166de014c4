"""From a commit record to the indexes: read, checked against the record, and against each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from objckpt import limits
from objckpt.errors import FormatError, IntegrityError, NotFoundError
from objckpt.format import checksums, keys, values
from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.index import PER_RANK, Index
from objckpt.format.records import Commit
from objckpt.format.tables import ShardEntry, TensorEntry, TensorTable
from objckpt.geometry import Box, Boxes, Integers, tiles
from objckpt.restore.match import leaves
from objckpt.store import Store

_MAX_TANGLED = 1024  # boxes of which no plane separates any: compared pair by pair; no sharding makes such


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard and the index that lists it."""

    index: Index
    entry: ShardEntry


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of the checkpoint and its shards at hand, which tile the global shape when all indexes were read.

    `boxes` are those of the distinct shards, in the order of ranks; `origins` has of each the place of its index in
    `indexes` and its row there.
    """

    entry: TensorEntry
    fqn: str
    boxes: Boxes
    origins: Integers
    indexes: list[Index]

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.entry.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def shards(self) -> list[StoredShard]:
        return [self.shard(row) for row in range(len(self.boxes))]

    def shard(self, row: int) -> StoredShard:
        number, place = self.origins[row].tolist()
        index = self.indexes[number]
        return StoredShard(index, index.shards[place])

    def has(self, box: Box) -> bool:
        """Whether the shards at hand have every element of a box."""
        common = self.boxes.common(box)[1]
        return (
            tiles(Boxes(common.offset - np.array(box.offset, np.int64), common.shape), box.shape, _MAX_TANGLED) is None
        )

    def holders(self, box: Box) -> set[int] | None:
        """The ranks whose indexes list what is needed of `box`; None when the checkpoint does not tell."""
        layout = self.entry.layout
        return None if layout is None else layout.holders(self.shape, self.entry.replica, box)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, opened: everything but the tensors' bytes."""

    commit: Commit
    indexes: list[Index]  # all, or only those of some ranks: then a tensor's shards may be incomplete
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


def open_checkpoint(
    store: Store, commit: Commit, *, ranks: Iterable[int] | None = None, have: Sequence[Index] = ()
) -> Checkpoint:
    """Read the indexes of a checkpoint, in parallel; those of all ranks, or of rank 0 and of some. Blocks; torch-free.

    ranks: whose indexes are wanted; ranks that the checkpoint does not have are no error. All are read all the same where
    these do not name every tensor of the tree (of a checkpoint written by DCP). See `Checkpoint.complete`, `opened_for`.
    have: indexes of this checkpoint that were read before.

    Raises:
        IntegrityError: an index is missing or is not the one that was committed.
        FormatError: an index does not hold together, or the shards do not tile their tensors.
    """
    world = range(commit.world_size)
    indexes = _read_indexes(store, commit, world if ranks is None else {0, *ranks} & set(world), have)
    tree = _tree(indexes, commit)
    if len(indexes) < len(world):
        named = {fqn for index in indexes for fqn in index.table.tensors.fqns}
        if any(type(leaf) is values.TensorLeaf and leaf.fqn not in named for _, leaf in leaves(tree)):
            indexes = _read_indexes(store, commit, world, indexes)
            tree = _tree(indexes, commit)
    checkpoint = Checkpoint(commit, indexes, tree, gather(indexes, commit))
    _check_leaves(checkpoint, tree)
    return checkpoint


def opened_for(store: Store, checkpoint: Checkpoint, wanted: Mapping[str, Sequence[Box]]) -> Checkpoint:
    """The checkpoint with the indexes that have all that is wanted: boxes of its tensors, by FQN. Its tree stays. Blocks.

    Reads those of the ranks that hold the boxes, as rank 0's index tells; where it does not or is wrong, all.
    """
    for whole in (False, True):
        lacking = [(checkpoint.tensors[fqn], box) for fqn, boxes in wanted.items() for box in boxes]
        lacking = [(stored, box) for stored, box in lacking if not stored.has(box)]
        if checkpoint.complete or not lacking:
            break
        found = [None if whole else stored.holders(box) for stored, box in lacking]
        if None in found:
            return opened_whole(store, checkpoint)
        ranks = set[int]().union(*(each for each in found if each is not None))
        more = open_checkpoint(store, checkpoint.commit, ranks=ranks, have=checkpoint.indexes)
        checkpoint = replace(more, tree=checkpoint.tree)
    return checkpoint


def opened_whole(store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the indexes of all ranks. Its tree stays. Blocks."""
    if checkpoint.complete:
        return checkpoint
    return replace(open_checkpoint(store, checkpoint.commit, have=checkpoint.indexes), tree=checkpoint.tree)


def _read_indexes(store: Store, commit: Commit, ranks: Collection[int], have: Sequence[Index]) -> list[Index]:
    """Those of `ranks`, in the order of ranks; `have` are not read again."""
    found = {index.rank: index for index in have}
    known: dict[Any, Any] = {}
    missing = [rank for rank in sorted(ranks) if rank not in found]
    if missing:
        with ThreadPoolExecutor(min(limits.READERS, len(missing)), "objckpt-index") as pool:
            read = pool.map(lambda rank: _read_index(store, commit, rank, known), missing)
            found |= dict(zip(missing, read, strict=True))
    return [found[rank] for rank in sorted(found)]


def _tree(indexes: Sequence[Index], commit: Commit) -> dict[Any, Any]:
    """Rank 0's tree, and in it what belongs to single ranks: `per_rank/<rank>` of each."""
    whole: dict[Any, Any] | None = None
    for index in indexes:
        key = commit.index_key(index.rank)
        tree = None if index.tree is None else values.unpack(index.tree, key)
        if index.rank == 0:
            if not isinstance(tree, dict):
                raise FormatError(f"{key}: the tree is missing or no mapping", key=key)
            if commit.world_size > 1 and not isinstance(tree.get(PER_RANK, {}), dict):
                raise FormatError(f"{key}: {PER_RANK} is no mapping of ranks", key=key)
            whole = tree
        elif tree is not None:
            own = tree.get(PER_RANK) if isinstance(tree, dict) and set(tree) == {PER_RANK} else None
            if whole is None or not isinstance(own, dict) or set(own) != {index.rank}:
                raise FormatError(f"{key}: its tree is not that of rank {index.rank}", key=key)
            whole.setdefault(PER_RANK, {})[index.rank] = own[index.rank]
    assert whole is not None
    return whole


def _read_index(store: Store, commit: Commit, rank: int, known: dict[Any, Any]) -> Index:
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
    index = Index.decode(data, key, known)
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


def gather(indexes: list[Index], commit: Commit) -> dict[str, StoredTensor]:
    """The tensors of some or all indexes, checked against each other."""
    numbers: dict[str, int] = {}  # of each FQN
    entries: list[TensorEntry] = []
    by_table: dict[int, Integers] = {}  # of each table of tensors, which ranks share: the numbers of its tensors
    tables = [index.table for index in indexes]
    for index, table in zip(indexes, tables, strict=True):
        if id(table.tensors) not in by_table:
            by_table[id(table.tensors)] = _number(table.tensors, index.rank, numbers, entries, commit)
    tensor = np.concatenate([by_table[id(table.tensors)][table.tensor] for table in tables])
    sizes = np.array([len(table) for table in tables])
    origins = np.stack(
        (np.repeat(np.arange(len(tables)), sizes), np.concatenate([np.arange(n) for n in sizes])), axis=1
    )
    lengths = np.array([len(table.offset) for table in tables])
    start = np.concatenate([table.start for table in tables]) + np.repeat(np.cumsum(lengths) - lengths, sizes)
    offset, shape = (np.concatenate([getattr(table, name) for table in tables]) for name in ("offset", "shape"))
    digest = np.concatenate([table.digest for table in tables])
    order = np.argsort(tensor, kind="stable")
    ends = np.cumsum(np.bincount(tensor, minlength=len(entries)))
    complete = len(indexes) == commit.world_size
    out = {}
    for fqn, number in numbers.items():
        entry = entries[number]
        rows = order[(ends[number - 1] if number else 0) : ends[number]]
        places = start[rows][:, None] + np.arange(len(entry.shape))
        found = StoredTensor(entry, fqn, Boxes(offset[places], shape[places]), origins[rows], indexes)
        why = tiles(found.boxes, entry.shape, _MAX_TANGLED) if complete else "unknown"
        if why is not None and len(rows) > 1:
            found = _distinct(found, digest[rows], commit)
            why = tiles(found.boxes, entry.shape, _MAX_TANGLED) if complete else None
        if why is not None and complete:
            raise FormatError(f"step {commit.step}: {fqn}: {why}", fqn=fqn)
        out[fqn] = found
    return out


def _number(
    table: TensorTable, rank: int, numbers: dict[str, int], entries: list[TensorEntry], commit: Commit
) -> Integers:
    """The number of each tensor of a table; new ones are added. FormatError when the table describes a known one otherwise.

    Only rank 0's index tells layouts: every rank of a job reads that one, and so all see the same.
    """
    for fqn, entry in zip(table.fqns, table.entries, strict=True):
        number = numbers.setdefault(fqn, len(entries))
        if number == len(entries):
            entries.append(entry if rank == 0 else replace(entry, layout=None, replica=0))
        elif (entries[number].dtype, entries[number].shape) != (entry.dtype, entry.shape):
            raise FormatError(f"step {commit.step}: {fqn}: ranks disagree on its dtype or shape", fqn=fqn)
    return np.array([numbers[fqn] for fqn in table.fqns], np.int64)


def _distinct(stored: StoredTensor, digest: Integers, commit: Commit) -> StoredTensor:
    """Without the shards that a rank before has, too. FormatError where those have other bytes."""
    boxes = np.concatenate((stored.boxes.offset, stored.boxes.shape), axis=1)
    seen: dict[bytes, int] = {}  # of a thousand rows as fast as sorting them, of a few much faster
    other = np.array([seen.setdefault(row.tobytes(), n) for n, row in enumerate(boxes)], np.int64)
    if len(seen) == len(boxes):
        return stored
    if (differ := np.flatnonzero(digest != digest[other])).size:
        a, b = (stored.indexes[stored.origins[row][0]].rank for row in (other[differ[0]], differ[0]))
        raise FormatError(f"step {commit.step}: {stored.fqn}: ranks {a} and {b} hold different bytes", fqn=stored.fqn)
    rows = np.array(list(seen.values()), np.int64)
    return replace(stored, boxes=stored.boxes.take(rows), origins=stored.origins[rows])


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
