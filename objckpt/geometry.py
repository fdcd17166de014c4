"""n-d boxes of a tensor, in elements; ranges are half-open. Pure integers, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


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
