"""n-d boxes of a tensor, in elements, and how a mesh of ranks is cut into them; ranges are half-open. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Range = tuple[int, int]
Cut = tuple[int, int]  # dimension of the tensor, and in how many pieces it is cut first (1 but for strided sharding)


@dataclass(frozen=True, slots=True)
class Box:
    """The box `[offset[d], offset[d] + shape[d])` for each dimension `d`. A 0-dim box holds one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box in the same coordinates, or None when it is empty."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - low for low, h in zip(lo, hi, strict=True))
        return Box(lo, shape) if all(n > 0 for n in shape) else None

    def relative_to(self, origin: Box) -> Box:
        """The same box in coordinates whose zero is `origin.offset`."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin.offset, strict=True)), self.shape)


def run_starts(box: Box, within: tuple[int, ...]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
    """The maximal row-major runs of a non-empty `box` inside an array of shape `within`: first elements, ascending, and
    the length that all of them have."""
    tail = len(within)  # dimensions [tail:] are taken whole
    while tail > 0 and box.shape[tail - 1] == within[tail - 1]:
        tail -= 1
    inner = math.prod(within[tail:])
    if tail == 0:
        return np.zeros(1, np.int64), inner
    starts = np.zeros(1, np.int64)
    for d in range(tail):
        stride = math.prod(within[d + 1 :])
        steps = np.arange(box.shape[d] if d < tail - 1 else 1, dtype=np.int64) + box.offset[d]
        starts = np.add.outer(starts, steps * stride).reshape(-1)
    return starts, box.shape[tail - 1] * inner


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one tensor, a row each: offsets and shapes, both of shape (boxes, dimensions)."""

    offset: Integers
    shape: Integers

    @classmethod
    def of(cls, boxes: Sequence[Box], dims: int) -> Boxes:
        sizes = (len(boxes), dims)
        return cls(
            np.array([box.offset for box in boxes], np.int64).reshape(sizes),
            np.array([box.shape for box in boxes], np.int64).reshape(sizes),
        )

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, row: int) -> Box:
        return Box(tuple(self.offset[row].tolist()), tuple(self.shape[row].tolist()))

    def take(self, rows: Integers) -> Boxes:
        return Boxes(self.offset[rows], self.shape[rows])

    def relative_to(self, origin: Box) -> Boxes:
        """The same boxes in coordinates whose zero is `origin.offset`."""
        return Boxes(self.offset - np.asarray(origin.offset, np.int64), self.shape)

    @property
    def elements(self) -> Integers:
        """Of each box."""
        out: Integers = np.multiply.reduce(self.shape, axis=1, dtype=np.int64)
        return out

    def common(self, box: Box) -> tuple[Integers, Boxes]:
        """The rows of the boxes that have an element in common with `box`, ascending, and what they have in common."""
        lower = np.asarray(box.offset, np.int64)
        low = np.maximum(self.offset, lower)
        size = np.minimum(self.offset + self.shape, lower + np.asarray(box.shape, np.int64)) - low
        rows = np.flatnonzero((size > 0).all(axis=1))
        return rows, Boxes(low[rows], size[rows])


def tiles(boxes: Boxes, shape: tuple[int, ...], max_tangled: int) -> str | None:
    """Why boxes inside `shape` do not tile it, and None when they do: none overlap, and together they have its elements.

    Boxes of which no plane separates any are compared pair by pair; more than `max_tangled` of them are refused. So are
    more of them that planes separate only a few at a time: no sharding makes such, and an attack would take hours.
    """
    boxes = boxes.take(np.flatnonzero(boxes.elements))
    if int(boxes.elements.sum()) != math.prod(shape):
        return f"its shards do not tile its shape {shape}"
    # Cut into groups that no box spans, dimension by dimension: a group of one overlaps nothing.
    groups, left = [boxes], (2 * len(shape) + 16) * len(boxes)
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        if len(group) > max_tangled and (left := left - len(group)) < 0:
            return f"{len(group)} shards lie across each other"
        parts: list[Boxes] = []
        for d in range(len(shape)):
            order = np.argsort(group.offset[:, d], kind="stable")
            reach = np.maximum.accumulate((group.offset[:, d] + group.shape[:, d])[order])
            begins = np.flatnonzero(group.offset[order[1:], d] >= reach[:-1]) + 1
            if len(begins) == len(group) - 1:  # each is a group of its own
                break
            if len(begins):
                parts = [group.take(rows) for rows in np.split(order, begins)]
                break
        else:
            if len(group) > max_tangled:
                return f"{len(group)} shards lie across each other"
            if any(len(group.common(group[row])[0]) > 1 for row in range(len(group))):
                return "its shards overlap"
        groups += parts
    return None


# ---- layouts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """The same elements as a box of the global tensor and as one of the local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies on a mesh: the ranks of the mesh, row-major, its sizes, and of each of its dimensions the cut.

    None instead of a cut: replicated along it. Cuts apply from left to right, as in `torch.distributed.tensor`: `Shard` cuts
    what is left of a dimension in pieces of ceil(n / parts), strided sharding (FSDP2 over TP) cuts it in split_factor
    pieces first and takes a part of each.
    """

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    @property
    def same(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which it is replicated."""
        return tuple(m for m, cut in enumerate(self.cuts) if cut is None)

    @property
    def replicas(self) -> int:
        return math.prod(self.mesh[m] for m in self.same)

    def replica_of(self, coordinate: Sequence[int]) -> int:
        """The place of a coordinate of the mesh among those that hold the same pieces."""
        replica = 0
        for m in self.same:
            replica = replica * self.mesh[m] + coordinate[m]
        return replica

    def pieces(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[Piece]:
        """The boxes of a tensor of `shape` at a coordinate, in the order of the local tensor; none is empty."""
        local: list[list[tuple[int, Range]]] = []
        for d, n in enumerate(shape):
            mine = self._along(d)
            ranges = _ranges(n, self._parts(mine))[tuple(coordinate[m] for m, _ in mine)]
            starts = itertools.accumulate((end - start for start, end in ranges), initial=0)
            local.append(list(zip(starts, ranges, strict=False)))
        out = []
        for combination in itertools.product(*local):
            extent = tuple(end - start for _, (start, end) in combination)
            offset = tuple(start for _, (start, _) in combination)
            if math.prod(extent):
                out.append(Piece(Box(offset, extent), Box(tuple(at for at, _ in combination), extent)))
        return out

    def boxes(self, shape: Sequence[int], replica: int | None = None) -> tuple[Integers, Boxes]:
        """All boxes of a tensor, none empty, with the rank that holds each; of one replica, or (None) of all of them."""
        return _boxes(self, tuple(shape), replica)

    def holders(self, shape: Sequence[int], replica: int, box: Box) -> set[int]:
        """The ranks that hold elements of `box` in one replica of the tensor."""
        if not box.elements:
            return set()
        strides = [math.prod(self.mesh[m + 1 :]) for m in range(len(self.mesh))]
        places = {0}  # in `ranks`
        for m in reversed(self.same):
            replica, at = divmod(replica, self.mesh[m])
            places = {place + at * strides[m] for place in places}
        for d, n in enumerate(shape):
            mine = self._along(d)
            hits = _meeting(n, self._parts(mine), box.offset[d], box.offset[d] + box.shape[d])
            steps = [sum(map(math.prod, zip(at, (strides[m] for m, _ in mine), strict=True))) for at in hits]
            places = {place + step for place in places for step in steps}
        return {self.ranks[place] for place in places}

    def _along(self, d: int) -> list[tuple[int, int]]:
        """The dimensions of the mesh that cut dimension `d`, each with its split factor."""
        return [(m, cut[1]) for m, cut in enumerate(self.cuts) if cut is not None and cut[0] == d]

    def _parts(self, along: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((self.mesh[m], factor) for m, factor in along)


def forget_layouts() -> None:
    """Free what is remembered of layouts: for thousands of ranks hundreds of megabytes."""
    for cache in (_boxes, _meeting, _ranges):
        cache.cache_clear()


@lru_cache(256)
def _boxes(layout: Layout, shape: tuple[int, ...], replica: int | None) -> tuple[Integers, Boxes]:
    ranks, found = [], []
    for rank, coordinate in zip(layout.ranks, itertools.product(*map(range, layout.mesh)), strict=True):
        if replica is None or layout.replica_of(coordinate) == replica:
            boxes = [piece.box for piece in layout.pieces(shape, coordinate)]
            ranks += [rank] * len(boxes)
            found += boxes
    return np.array(ranks, np.int64), Boxes.of(found, len(shape))


@lru_cache(4096)
def _meeting(n: int, cuts: tuple[tuple[int, int], ...], low: int, high: int) -> list[tuple[int, ...]]:
    """The coordinates that hold a part of `[low, high)`."""
    return [at for at, ranges in _ranges(n, cuts).items() if any(a < high and low < b for a, b in ranges)]


@lru_cache(256)
def _ranges(n: int, cuts: tuple[tuple[int, int], ...]) -> dict[tuple[int, ...], list[Range]]:
    """What is left of `[0, n)` at each coordinate after cuts of (parts, split factor); the same order, neighbours joined."""
    found: dict[tuple[int, ...], list[Range]] = {(): [(0, n)]}
    for size, factor in cuts:
        found = {
            (*at, i): [r for k in range(factor) for r in _part(_part(ranges, factor, k), size, i)]
            for at, ranges in found.items()
            for i in range(size)
        }
    return {at: _merge(ranges) for at, ranges in found.items()}


def _part(ranges: list[Range], parts: int, index: int) -> list[Range]:
    """Piece `index` of the ranges' elements cut in `parts` of ceil(n / parts), the last ones shorter or empty."""
    total = sum(end - start for start, end in ranges)
    each = -(-total // parts)
    low, high = min(each * index, total), min(each * (index + 1), total)
    out, at = [], 0
    for start, end in ranges:
        first, last = max(low - at, 0), min(high - at, end - start)
        if first < last:
            out.append((start + first, start + last))
        at += end - start
    return out


def _merge(ranges: list[Range]) -> list[Range]:
    """The same elements in the same order; neighbours that touch are one range."""
    out: list[Range] = []
    for start, end in ranges:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out
