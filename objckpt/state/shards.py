"""What a rank holds of a distributed tensor, and which of the replicas writes it. Nothing here communicates.

Placements are applied from left to right over the mesh's dimensions, as torch does (`torch.distributed.tensor`):
`Shard` cuts what is left of a dimension in pieces of ceil(n / parts), `_StridedShard` (FSDP2 over TP) cuts it in
`split_factor` pieces first and takes a part of each. So a local tensor is a grid of boxes of the global one.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from objckpt.errors import UnsupportedTypeError
from objckpt.geometry import Box

SMALL_BYTES = (
    64 * 1024
)  # replicated leaves up to this size are always written by the first replica: readers find them there
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """The same elements as a box of the global tensor and as one of the local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Layout:
    """A distributed tensor as this rank sees it.

    `group` tells replicas of one kind from others: the mesh's ranks and its replicated dimensions. `replica` of
    `replicas` is this rank's place among those that hold the same pieces. `shards`: in how many the tensor is cut.
    """

    pieces: tuple[Piece, ...]
    group: tuple[Any, ...]
    replica: int
    replicas: int
    shards: int


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor. Imports nothing: where its module is not imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def layout_of(tensor: Any, fqn: str) -> Layout:
    """The layout of a DTensor on this rank. UnsupportedTypeError for partial sums, which are no values yet."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedTypeError(
                f"{fqn}: a DTensor with the placement {placement!r} holds partial sums: redistribute it to Shard or Replicate",
                fqn=fqn,
            )
    sizes = tuple(mesh.shape)
    same = tuple(d for d, p in enumerate(placements) if p.is_replicate())
    group = (tuple(mesh.mesh.flatten().tolist()), sizes, same)
    replicas = math.prod(sizes[d] for d in same)
    shards = math.prod(sizes) // replicas
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh: it holds nothing
        return Layout((), group, 0, replicas, shards)
    replica = 0
    for d in same:
        replica = replica * sizes[d] + coordinate[d]
    return Layout(tuple(pieces(tuple(tensor.shape), sizes, coordinate, placements)), group, replica, replicas, shards)


def pieces(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Piece]:
    """The boxes of a tensor of `shape` that the rank at `coordinate` holds, in the order of its local tensor; none is empty."""
    ranges: list[list[Range]] = [[(0, n)] for n in shape]
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not hasattr(placement, "dim"):
            continue
        d = placement.dim % len(shape)
        factor = int(getattr(placement, "split_factor", 1))
        ranges[d] = [r for k in range(factor) for r in _part(_part(ranges[d], factor, k), size, at)]
    local: list[list[tuple[int, Range]]] = []
    for merged in map(_merge, ranges):
        starts = itertools.accumulate((end - start for start, end in merged), initial=0)
        local.append(list(zip(starts, merged, strict=False)))
    out = []
    for combination in itertools.product(*local):
        extent = tuple(end - start for _, (start, end) in combination)
        offset = tuple(start for _, (start, _) in combination)
        if math.prod(extent):
            out.append(Piece(Box(offset, extent), Box(tuple(at for at, _ in combination), extent)))
    return out


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


def local_part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a tensor that `box` names."""
    for d, (at, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        if length != tensor.shape[d]:
            tensor = tensor.narrow(d, at, length)
    return tensor


@dataclass(frozen=True, slots=True)
class Replicated:
    """What all replicas of a leaf know of it: enough to choose who writes it, the same everywhere."""

    fqn: str
    nbytes: int  # of one shard, on average
    group: tuple[Any, ...]
    replicas: int


def choose_writers(leaves: Iterable[Replicated]) -> dict[str, int]:
    """For each leaf the replica that writes it: small ones the first, the others so that bytes are even in each group.

    Every rank that holds a leaf of a group must give the same leaves of this group; then all choose the same.
    """
    loads: dict[tuple[Any, ...], list[int]] = {}
    out = {}
    for leaf in sorted(leaves, key=lambda leaf: (-leaf.nbytes, leaf.fqn)):
        load = loads.setdefault(leaf.group, [0] * leaf.replicas)
        chosen = 0 if leaf.nbytes <= SMALL_BYTES else load.index(min(load))
        load[chosen] += leaf.nbytes
        out[leaf.fqn] = chosen
    return out
