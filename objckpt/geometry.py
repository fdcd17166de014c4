"""n-d boxes of a tensor, in elements; ranges are half-open. Pure integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


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

    def runs(self, within: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Maximal row-major runs `(start, length)`, in elements, of this box inside an array of shape `within`."""
        if self.elements == 0:
            return
        tail = len(within)  # dimensions [tail:] are taken whole
        while tail > 0 and self.shape[tail - 1] == within[tail - 1]:
            tail -= 1
        inner = math.prod(within[tail:])
        if tail == 0:
            yield 0, inner
            return
        length = self.shape[tail - 1] * inner
        strides = [math.prod(within[d + 1 :]) for d in range(len(within))]
        base = sum(o * s for o, s in zip(self.offset, strides, strict=True))
        outer = self.shape[: tail - 1]
        index = [0] * len(outer)
        while True:
            yield base + sum(i * s for i, s in zip(index, strides, strict=False)), length
            for d in reversed(range(len(outer))):
                index[d] += 1
                if index[d] < outer[d]:
                    break
                index[d] = 0
            else:
                return


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), shape)
