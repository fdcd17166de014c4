"""Plans of a save: pure functions from sizes to places.

A snapshot is one logical byte space `[0, total)`: the leaves back to back, in the order given. It is cut into slabs; slab
`i` of the snapshot may be any slab of the arena. With the raw codec the pack is exactly this byte space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from objckpt import limits


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """A leaf's place in the snapshot, in bytes."""

    start: int
    nbytes: int


def lay_out(sizes: Sequence[int]) -> tuple[list[LeafPlan], int]:
    """Leaves back to back. Given in order of descending itemsize, each starts aligned to its itemsize. Returns the total."""
    plans, at = [], 0
    for size in sizes:
        plans.append(LeafPlan(at, size))
        at += size
    return plans, at


def slabs_for(total_bytes: int, slab_bytes: int = limits.SLAB_BYTES) -> int:
    return -(-total_bytes // slab_bytes)


def chunks_of(leaf: LeafPlan, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """`(start, length)` of each chunk of a leaf, in the snapshot's bytes. An empty leaf has none."""
    for at in range(leaf.start, leaf.start + leaf.nbytes, chunk_bytes):
        yield at, min(chunk_bytes, leaf.start + leaf.nbytes - at)


def pack_limit(part_bytes: int) -> int:
    """Bytes after which a new pack begins: no pack needs more than 10,000 parts, or outgrows an S3 object."""
    return min(part_bytes * limits.MAX_PARTS, limits.MAX_OBJECT_BYTES)
