"""Shards must tile their tensor: any cut into boxes is accepted, two that overlap are found, and neither takes long."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.geometry import Box, Boxes, tiles, whole


def why_not(boxes: list[Box], shape: tuple[int, ...]) -> str | None:
    return tiles(Boxes.of(boxes, len(shape)), shape, 1024)


def cut(box: Box, rng: random.Random, depth: int) -> list[Box]:
    wide = [d for d, n in enumerate(box.shape) if n > 1]
    if not depth or not wide:
        return [box]
    d = rng.choice(wide)
    at = rng.randrange(1, box.shape[d])
    low = Box(box.offset, (*box.shape[:d], at, *box.shape[d + 1 :]))
    offset = (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :])
    high = Box(offset, (*box.shape[:d], box.shape[d] - at, *box.shape[d + 1 :]))
    return cut(low, rng, depth - 1) + cut(high, rng, depth - 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 2**32))
def test_any_cut_tiles_and_a_moved_box_does_not(shape: list[int], depth: int, seed: int) -> None:
    rng = random.Random(seed)
    boxes = cut(whole(tuple(shape)), rng, depth)
    rng.shuffle(boxes)
    assert why_not(boxes, tuple(shape)) is None
    twins = [(a, b) for a, b in itertools.combinations(range(len(boxes)), 2) if boxes[a].shape == boxes[b].shape]
    if twins:
        a, b = twins[0]
        moved = [boxes[a] if i == b else box for i, box in enumerate(boxes)]
        assert "overlap" in str(why_not(moved, tuple(shape)))


def test_a_pinwheel_is_a_tiling_too() -> None:
    boxes = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert why_not(boxes, (3, 3)) is None


def test_many_boxes_in_many_dimensions() -> None:
    unit = [Box(offset, (1,) * 12) for offset in itertools.product((0, 1), repeat=12)]
    assert why_not(unit, (2,) * 12) is None
    assert "across each other" in str(why_not([Box((0,), (3000,))] * 3000, (3000 * 3000,)))


def nested(levels: int) -> tuple[list[Box], tuple[int, int]]:
    """A column, a row, a column, …, each of what is left: one plane separates one box at a time."""
    n = levels // 2 + 1
    boxes, x, y = [], 0, 0
    for level in range(levels):
        boxes.append(Box((y, x), (1, n - x)) if level % 2 else Box((y, x), (n - y, 1)))
        x, y = (x, y + 1) if level % 2 else (x + 1, y)
    if y < n and x < n:
        boxes.append(Box((y, x), (n - y, n - x)))
    return boxes, (n, n)


def test_boxes_that_planes_separate_one_at_a_time() -> None:
    assert why_not(*nested(900)) is None
    assert "lie across each other" in str(why_not(*nested(100_000)))  # an attack: it would take minutes
    grid = [Box((y, x), (1, 1)) for y in range(200) for x in range(200)]
    assert why_not(grid, (200, 200)) is None
