"""Pieces between tensors and flat buffers: one by one or many at a time, the bytes are the same."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from objckpt.geometry import Box, Boxes
from objckpt.restore import move
from objckpt.state.shards import local_part

# The size from which pieces are copied alone, and on which devices rows of windows are assigned.
WAYS = {"one by one": (0, ("cpu",)), "many at a time": (1 << 40, ("cpu",)), "many, as on a device": (1 << 40, ())}


def go(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "_ALONE_BYTES", WAYS[way][0])
    monkeypatch.setattr(move, "_WINDOWED", WAYS[way][1])


def grid(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """A cut of the whole shape along random planes, in random order."""
    cuts = []
    for n in shape:
        inner = sorted({0, n, *(chance.randrange(n + 1) for _ in range(chance.randrange(4)))})
        cuts.append(list(itertools.pairwise(inner)))
    boxes = [Box((), ())]
    for ranges in cuts:
        boxes = [Box((*b.offset, lo), (*b.shape, hi - lo)) for b in boxes for lo, hi in ranges]
    chance.shuffle(boxes)
    return boxes


def places(boxes: Boxes, itemsize: int) -> tuple[np.ndarray, int]:
    sizes = move.padded(boxes.elements * itemsize)
    return np.cumsum(sizes) - sizes, int(sizes.sum())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [1, 7, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex128], ids=str)
def test_there_and_back(way: str, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    go(way, monkeypatch)
    monkeypatch.setattr(move, "_BLOCK_ELEMENTS", block)
    chance = random.Random(f"{way} {block} {dtype}")
    for shape in [(), (1,), (13,), (5, 7), (3, 4, 6), (2, 3, 2, 5)] * 4:
        found = grid(shape, chance)
        boxes = Boxes.of(found, len(shape))
        whole = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(-99, 99, shape)
        source = whole.to(dtype)
        starts, nbytes = places(boxes, dtype.itemsize)
        buffer = torch.full((nbytes,), 255, dtype=torch.uint8)
        move.collect(source, boxes, buffer, starts)
        for box, start in zip(found, starts.tolist(), strict=True):
            piece = buffer[start : start + math.prod(box.shape) * dtype.itemsize].clone().view(dtype).view(box.shape)
            assert torch.equal(piece, local_part(source, box))
        target = torch.zeros(shape, dtype=dtype)
        move.distribute(buffer, starts, dtype, target, boxes)
        assert torch.equal(target, source)
        some = Boxes.of(found[::2], len(shape))
        target = torch.zeros(shape, dtype=dtype)
        move.distribute(buffer, starts[::2], dtype, target, some)
        assert sum(int(local_part(target != source, box).sum()) for box in found[::2]) == 0
        assert sum(int(local_part(target, box).ne(0).sum()) for box in found[1::2]) == 0, "nothing beside the boxes"


@pytest.mark.parametrize("way", WAYS)
def test_targets_of_every_kind(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go(way, monkeypatch)
    found = grid((6, 8), random.Random(1))
    boxes = Boxes.of(found, 2)
    source = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    starts, nbytes = places(boxes, 4)
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    move.collect(source.t().contiguous().t(), boxes, buffer, starts)  # a source that is not row-major
    parameter = torch.nn.Parameter(torch.zeros(6, 8))
    before = parameter._version
    with torch.inference_mode():
        inferred = torch.zeros(6, 8)
    targets = [
        parameter,
        inferred,
        torch.zeros(8, 6).t(),
        torch.zeros(12, 16)[::2, ::2],
        torch.zeros(100)[3:51].view(6, 8),
        torch.zeros(6, 8, dtype=torch.float64),
        torch.zeros(6, 8, dtype=torch.bfloat16),
        torch.zeros(6, 8, dtype=torch.complex64).imag,
        torch.zeros(6, 8, dtype=torch.complex64).conj().imag,
    ]
    for target in targets:
        move.distribute(buffer, starts, torch.float32, target, boxes)
        assert torch.equal(target.to(torch.float32), source)
    assert parameter._version > before, "autograd is told"


FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_casts_are_those_of_torch(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    go(way, monkeypatch)
    boxes = Boxes.of(grid((6, 8), random.Random(2)), 2)
    source = torch.rand(6, 8).to(dtype)
    starts, nbytes = places(boxes, dtype.itemsize)
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    move.collect(source, boxes, buffer, starts)
    for other in FLOATS:
        target = torch.zeros(6, 8).to(other)
        expected = torch.zeros(6, 8).to(other).copy_(source)
        move.distribute(buffer, starts, dtype, target, boxes)
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8)), other


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_kept(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not-a-number with a payload, and minus zero."""
    go(way, monkeypatch)
    bits = torch.tensor([0x7F800001, -0x80000000, 0x7FC12345, -1], dtype=torch.int32)
    boxes = Boxes.of([Box((0,), (2,)), Box((2,), (2,))], 1)
    starts, nbytes = places(boxes, 4)
    buffer, target = torch.empty(nbytes, dtype=torch.uint8), torch.zeros(4)
    move.collect(bits.view(torch.float32), boxes, buffer, starts)
    move.distribute(buffer, starts, torch.float32, target, boxes)
    assert torch.equal(target.view(torch.int32), bits)


def test_nothing_to_do() -> None:
    move.collect(torch.zeros(3), Boxes.of([], 1), torch.empty(0, dtype=torch.uint8), np.zeros(0, np.int64))
    move.distribute(
        torch.empty(0, dtype=torch.uint8), np.zeros(0, np.int64), torch.float32, torch.zeros(3), Boxes.of([], 1)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_gets_the_same_bytes(dtype: torch.dtype, deterministic: bool) -> None:
    source = torch.randn(64, 96).to(dtype)
    boxes = Boxes.of([Box((0, at), (64, 12)) for at in range(0, 96, 24)], 2)  # half of it: the rest keeps what it has
    starts, nbytes = places(boxes, dtype.itemsize)
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    move.collect(source, boxes, buffer, starts)
    here, there = torch.zeros(64, 96, dtype=dtype), torch.zeros(64, 96, dtype=dtype, device="cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        move.distribute(buffer, starts, dtype, there, boxes)
    finally:
        torch.use_deterministic_algorithms(before)
    move.distribute(buffer, starts, dtype, here, boxes)
    assert torch.equal(here, there.cpu())
