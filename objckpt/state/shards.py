"""What a rank holds of a distributed tensor, and which of the replicas writes it. Nothing here communicates."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from objckpt.errors import UnsupportedTypeError
from objckpt.geometry import Box, Layout, Piece

# Replicated leaves up to this size are always written by the first replica: readers find them there.
SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Held:
    """A distributed tensor as this rank sees it: its pieces, and its place among those that hold the same pieces."""

    layout: Layout
    pieces: tuple[Piece, ...]
    replica: int


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor. Imports nothing: where its module is not imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def layout_of(tensor: Any, fqn: str) -> Held:
    """What this rank holds of a DTensor. UnsupportedTypeError for partial sums, which are no values yet."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedTypeError(
                f"{fqn}: a DTensor with the placement {placement!r} holds partial sums: redistribute it to Shard or Replicate",
                fqn=fqn,
            )
    whole = layout_from(_ranks_of(mesh), mesh.shape, placements, tensor.ndim)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh: it holds nothing
        return Held(whole, (), 0)
    return Held(whole, tuple(whole.pieces(tensor.shape, coordinate)), whole.replica_of(coordinate))


@lru_cache(64)
def _ranks_of(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def layout_from(ranks: Sequence[int], mesh: Sequence[int], placements: Sequence[Any], dims: int) -> Layout:
    """torch's placements of a tensor of `dims` dimensions on a mesh of ranks, row-major."""
    cuts = [(p.dim % dims, int(getattr(p, "split_factor", 1))) if hasattr(p, "dim") else None for p in placements]
    return Layout(tuple(ranks), tuple(mesh), tuple(cuts))


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
    layout: Layout


def choose_writers(leaves: Iterable[Replicated]) -> dict[str, int]:
    """For each leaf the replica that writes it: small ones the first, the others so that bytes are even in each group.

    Leaves on one mesh that are replicated along the same dimensions are a group. Every rank that holds a leaf of a group
    must give the same leaves of this group; then all choose the same.
    """
    loads: dict[tuple[Any, ...], list[int]] = {}
    out = {}
    for leaf in sorted(leaves, key=lambda leaf: (-leaf.nbytes, leaf.fqn)):
        load = loads.setdefault((leaf.layout.ranks, leaf.layout.mesh, leaf.layout.same), [0] * leaf.layout.replicas)
        chosen = 0 if leaf.nbytes <= SMALL_BYTES else load.index(min(load))
        load[chosen] += leaf.nbytes
        out[leaf.fqn] = chosen
    return out
