"""The pieces of a distributed tensor are those that torch's placements cut; every replica writes its share of the bytes."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from objckpt.geometry import Box, Layout, Piece, tiles
from objckpt.state.shards import SMALL_BYTES, Replicated, choose_writers, layout_from, local_part

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]


@st.composite
def layouts(draw: Any) -> Case:
    """Shape, mesh shape and a placement for each of its dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    placements = []
    for _ in mesh:
        kind = draw(st.sampled_from(["replicate", "shard", "strided"])) if shape else "replicate"
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if kind == "strided":
            placements.append(_StridedShard(dim, split_factor=draw(st.integers(1, 4))))
        else:
            placements.append(Shard(dim) if kind == "shard" else Replicate())
    return shape, mesh, tuple(placements)


def cut_by_torch(tensor: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: Any) -> torch.Tensor:
    """The local tensor of the rank at a mesh coordinate, as torch distributes a tensor: placement by placement."""
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if not placement.is_replicate():
            tensor = placement._split_tensor(tensor, size, with_padding=False)[0][index]
    return tensor


def on_mesh(case: Case) -> Layout:
    """Rank n + 100 is the n-th of the mesh."""
    shape, mesh, placements = case
    return layout_from(range(100, 100 + math.prod(mesh)), mesh, placements, len(shape))


def read(whole: torch.Tensor, local_shape: torch.Size, found: list[Piece]) -> torch.Tensor:
    out = torch.full(local_shape, -1)
    for piece in found:
        local_part(out, piece.local).copy_(local_part(whole, piece.box))
    return out


@settings(max_examples=400, deadline=None)
@example(((8, 8), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))))  # FSDP2 over TP
@example(((5, 3), (4,), (Shard(0),)))  # ranks: 2, 2, 1 and 0 rows
@example(((7,), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))))
@example(((), (2, 3), (Replicate(), Replicate())))
@given(layouts())
def test_pieces_are_what_torch_cuts(case: Case) -> None:
    shape, mesh, placements = case
    whole = torch.arange(math.prod(shape)).view(shape)
    copies = math.prod(size for size, p in zip(mesh, placements, strict=True) if p.is_replicate())
    times_held = torch.zeros(shape, dtype=torch.int64)
    for at in itertools.product(*map(range, mesh)):
        local = cut_by_torch(whole, mesh, at, placements)
        found = on_mesh(case).pieces(shape, at)
        assert torch.equal(read(whole, local.shape, found), local)
        # Each element of the local tensor is in one piece, and no piece is empty.
        assert sum(piece.box.elements for piece in found) == local.numel()
        assert all(piece.box.elements and piece.box.shape == piece.local.shape for piece in found)
        for piece in found:
            local_part(times_held, piece.box).add_(1)
    assert bool((times_held == copies).all())


@given(layouts())
def test_pieces_that_touch_are_one(case: Case) -> None:
    """An index entry a piece: an unstrided layout has one, however many dimensions cut the tensor."""
    shape, mesh, placements = case
    if any(isinstance(p, _StridedShard) and p.split_factor > 1 for p in placements):
        return
    for at in itertools.product(*map(range, mesh)):
        assert len(on_mesh(case).pieces(shape, at)) <= 1


@given(layouts(), st.data())
def test_the_layout_tells_which_ranks_hold_a_box(case: Case, data: st.DataObject) -> None:
    """What `pieces` says of each rank, and `boxes` of all; in one replica they tile the tensor."""
    shape, mesh, _ = case
    layout = on_mesh(case)
    held = {
        rank: layout.pieces(shape, at)
        for rank, at in zip(layout.ranks, itertools.product(*map(range, mesh)), strict=True)
    }
    ranks, boxes = layout.boxes(shape)
    assert [(rank, boxes[n]) for n, rank in enumerate(ranks.tolist())] == [
        (rank, piece.box) for rank, found in held.items() for piece in found
    ]
    replica = data.draw(st.integers(0, layout.replicas - 1))
    ranks, boxes = layout.boxes(shape, replica)
    assert tiles(boxes, shape, 10**6) is None
    low = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(low, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)))
    wanted = {rank for n, rank in enumerate(ranks.tolist()) if boxes[n].intersect(box) is not None}
    assert layout.holders(shape, replica, box) == wanted


def alike(name: str, copies: int) -> Layout:
    """Replicated `copies` times, on a mesh of its own."""
    first = ord(name) * 100
    return Layout(tuple(range(first, first + copies)), (copies,), (None,))


leaves = st.lists(
    st.tuples(st.integers(0, 40 * SMALL_BYTES), st.sampled_from([("a", 1), ("b", 2), ("c", 4), ("d", 7)])), max_size=40
).map(lambda rows: [Replicated(f"leaf{i}", n, alike(name, copies)) for i, (n, (name, copies)) in enumerate(rows)])


@settings(deadline=None)
@given(leaves, st.randoms(use_true_random=False))
def test_writers_are_the_same_on_every_rank_and_even(found: list[Replicated], order: random.Random) -> None:
    chosen = choose_writers(found)
    again = list(found)
    order.shuffle(again)
    assert choose_writers(again) == chosen
    assert set(chosen) == {leaf.fqn for leaf in found}
    for group in {leaf.layout for leaf in found}:
        mine = [leaf for leaf in found if leaf.layout == group]
        # A rank that is not in the other groups chooses the same in this one.
        assert choose_writers(mine) == {leaf.fqn: chosen[leaf.fqn] for leaf in mine}
        large = [leaf for leaf in mine if leaf.nbytes > SMALL_BYTES]
        assert all(chosen[leaf.fqn] == 0 for leaf in mine if leaf.nbytes <= SMALL_BYTES)
        if large:
            loads = [
                sum(leaf.nbytes for leaf in large if chosen[leaf.fqn] == r) for r in range(large[0].layout.replicas)
            ]
            assert max(loads) <= sum(loads) / len(loads) + max(leaf.nbytes for leaf in large)
