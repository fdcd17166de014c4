"""Layouts of DTensors and what each rank writes of them. One process plays every rank in turn: nothing communicates here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from objckpt.errors import UnsupportedTypeError, UsageError
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box
from objckpt.state.flatten import Flat, flatten
from objckpt.state.shards import SMALL_BYTES, layout_from, layout_of, local_part

LARGE = SMALL_BYTES // 4 * 4  # elements of fp32: above the limit


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distribute(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """What `distribute_tensor` gives on this rank, without a message."""
    local = whole
    for size, at, placement in zip(mesh.shape, mesh.get_coordinate() or (), placements, strict=False):
        if not placement.is_replicate():
            local = placement._split_tensor(local, size, with_padding=False)[0][at]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def on_all_ranks(mesh_shape: tuple[int, ...], state_on: Callable[[Any, int], Any], **options: Any) -> list[Flat]:
    size = int(torch.tensor(mesh_shape).prod())
    flats = []
    for rank in range(size):
        with rank_of(rank, size):
            mesh = init_device_mesh("cpu", mesh_shape)
            flats.append(flatten(state_on(mesh, rank), rank=rank, world_size=size, **options))
    return flats


def together(flats: list[Flat], fqn: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor out of what all ranks write; every element must be written exactly once."""
    out, times = torch.zeros(shape), torch.zeros(shape)
    for flat in flats:
        for leaf in flat.leaves:
            if leaf.fqn == fqn:
                box = Box(leaf.offset or (0,) * len(shape), leaf.shape)
                local_part(out, box).copy_(leaf.tensor)
                local_part(times, box).add_(1)
    assert bool((times == 1).all()), fqn
    return out


def written(flat: Flat) -> int:
    return sum(leaf.nbytes for leaf in flat.leaves)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(1), Replicate()]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2), [Replicate(), Replicate()]),
        ((2, 2, 2), [Replicate(), Shard(1), Shard(0)]),
    ],
)
def test_ranks_write_every_element_once(mesh_shape, placements):
    wholes = {f"w{i}": torch.rand(shape) for i, shape in enumerate([(5, 7), (8, 8), (1, 3), (3, LARGE), (2, 0)])}

    def state(mesh: Any, rank: int) -> Any:
        return {"model": {name: distribute(whole, mesh, placements) for name, whole in wholes.items()}}

    flats = on_all_ranks(mesh_shape, state)
    for name, whole in wholes.items():
        assert torch.equal(together(flats, f"model/{name}", tuple(whole.shape)), whole)
        assert any(leaf.fqn == f"model/{name}" for flat in flats for leaf in flat.leaves), "empty ones are listed, too"
    assert {tuple(flat.replicated) for flat in flats} == {tuple(flats[0].replicated)}
    assert {flat.global_bytes for flat in flats} == {sum(w.nbytes for w in wholes.values())}
    assert {flat.tensors for flat in flats} == {len(wholes)}


def test_replicas_share_the_writing():
    """HSDP: of two replicas each writes one of two equal leaves; small ones are with the first."""
    large, small = torch.rand(4, LARGE), torch.rand(4, 4)

    def state(mesh: Any, rank: int) -> Any:
        return {n: distribute(w, mesh, [Replicate(), Shard(0)]) for n, w in [("a", large), ("b", large), ("c", small)]}

    flats = on_all_ranks((2, 2), state)
    assert [sorted({leaf.fqn for leaf in flat.leaves}) for flat in flats] == [["a", "c"], ["a", "c"], ["b"], ["b"]]
    assert [written(flat) for flat in flats] == [large.nbytes // 2 + small.nbytes // 2] * 2 + [large.nbytes // 2] * 2


def test_plain_tensors_are_written_once_by_ranks_in_turn():
    def state(mesh: Any, rank: int) -> Any:
        return {f"w{i}": torch.full((LARGE,), 1.0) for i in range(8)} | {"b": torch.ones(3), "step": 7}

    flats = on_all_ranks((4,), state)
    assert sorted(leaf.fqn for flat in flats for leaf in flat.leaves) == ["b", *(f"w{i}" for i in range(8))]
    assert [written(flat) for flat in flats] == [8 * LARGE + 12, *[8 * LARGE] * 3]


def test_e002_a_tied_distributed_tensor_is_one_leaf_on_every_rank():
    def state(mesh: Any, rank: int) -> Any:
        tied = distribute(torch.rand(3, 5), mesh, [Shard(0)])  # rank 3 has no row of it
        other = distribute(torch.rand(3, 5), mesh, [Shard(0)])
        # Not detach(): torch's cache of dispatched operations would give it the mesh of the first rank played here.
        again = DTensor.from_local(
            tied.to_local(), mesh, [Shard(0)], run_check=False, shape=tied.shape, stride=tied.stride()
        )
        return {"embed": tied, "head": again, "other": other}

    flats = on_all_ranks((4,), state)
    for flat in flats:
        assert flat.tree == {"embed": TensorLeaf("embed"), "head": TensorLeaf("embed"), "other": TensorLeaf("other")}
        assert {leaf.fqn for leaf in flat.leaves} <= {"embed", "other"}
    assert len({tuple(flat.replicated) for flat in flats}) == 1


@pytest.mark.parametrize(
    "differs",
    [
        lambda mesh, rank: {"step": rank},
        lambda mesh, rank: {"mode": "a" if rank else "b"},
        lambda mesh, rank: {"w": torch.ones(3 + rank)},
        lambda mesh, rank: {"w": torch.ones(3, dtype=[torch.float32, torch.float64][rank])},
        lambda mesh, rank: {"stages": {f"stage{rank}": distribute(torch.ones(4), mesh, [Shard(0)])}},
        lambda mesh, rank: {"w": distribute(torch.ones(4 + rank), mesh, [Shard(0)])},
        lambda mesh, rank: {"w": distribute(torch.ones(4), mesh, [Shard(0)]) if rank else torch.ones(4)},
        lambda mesh, rank: {"w": torch.ones(3)} if rank else {"w": {}},
    ],
)
def test_what_ranks_do_not_have_alike_shows_in_their_digests(differs):
    def state(mesh: Any, rank: int) -> Any:
        return {"same": torch.ones(2), "parts": differs(mesh, rank)}

    first, second = (dict(flat.replicated) for flat in on_all_ranks((2,), state))
    names = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    assert names and all(name.startswith("parts/") for name in names)


def test_partial_sums_are_refused_by_name():
    with rank_of(1, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        value = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()], run_check=False)
        with pytest.raises(UnsupportedTypeError, match=r"model/w: .*Partial.*partial sums: redistribute it") as caught:
            flatten({"model": {"w": value}}, rank=1, world_size=4)
        assert caught.value.context["fqn"] == "model/w"


def test_a_rank_outside_the_mesh_holds_nothing():
    with rank_of(3, 4):
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        value = distribute(torch.ones(4), mesh, [Shard(0)])
        assert layout_of(value, "w").pieces == ()
        assert flatten({"w": value}, rank=3, world_size=4).leaves == []


def test_the_layout_tells_replicas_apart():
    seen = []
    for rank in range(8):
        with rank_of(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2))
            held = layout_of(distribute(torch.ones(4, 4), mesh, [Replicate(), Shard(0), Replicate()]), "w")
            seen.append((held.replica, held.pieces[0].box.offset))
            assert held.layout.replicas == 4 and held.layout.same == (0, 2)
    assert seen == [(r, o) for r0 in (0, 2) for o in ((0, 0), (2, 0)) for r in (r0, r0 + 1)]


def test_what_belongs_to_a_rank_is_written_by_it():
    flats = []
    for rank in range(2):
        own = {"rng": torch.full((3,), rank), "position": rank * 10}
        flats.append(flatten({"w": torch.ones(2)}, per_rank=own, rank=rank, world_size=2))
    assert [flat.own["per_rank"][rank]["position"] for rank, flat in enumerate(flats)] == [0, 10]
    assert [sorted(leaf.fqn for leaf in flat.leaves) for flat in flats] == [
        ["per_rank/%(0)/rng", "w"],
        ["per_rank/%(1)/rng"],
    ]
    assert flats[0].replicated == flats[1].replicated


def test_per_rank_refusals():
    with pytest.raises(UsageError, match='a part "per_rank"'):
        flatten({"per_rank": 1}, per_rank={})
    with pytest.raises(UsageError, match="per_rank must be a mapping of names to parts, not list"):
        flatten({}, per_rank=[])  # type: ignore[arg-type]
    with rank_of(0, 2):
        value = distribute(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(UnsupportedTypeError, match=r"per_rank/%\(0\)/w: a DTensor belongs to several ranks"):
            flatten({}, per_rank={"w": value}, rank=0, world_size=2)


def test_no_piece_is_empty():
    assert layout_from([0], (1,), [Replicate()], 1).pieces((0,), (0,)) == []
    assert layout_from([0, 1], (2,), [Shard(0)], 1).pieces((1,), (1,)) == []


def test_a_job_without_dtensors_does_not_load_their_module():
    code = "import sys, torch; from objckpt.state.flatten import flatten; flatten({'w': torch.ones(1)})"
    code += "; sys.exit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_local_tensor_that_is_not_its_placements_is_refused():
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        odd = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1))
        with pytest.raises(UnsupportedTypeError, match=r"w: the local tensor of this DTensor has the shape \(3, 2\)"):
            flatten({"w": odd}, rank=1, world_size=2)


def test_a_conjugate_view_is_not_tied_to_its_base():
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        base = distribute(torch.ones(4, dtype=torch.complex64) * 1j, mesh, [Shard(0)])
        flat = flatten({"a": base, "b": base.conj()}, rank=0, world_size=2)
        assert flat.tree == {"a": TensorLeaf("a"), "b": TensorLeaf("b")}
        assert not flat.submesh and flatten({"a": base}, rank=0, world_size=4).submesh


def test_the_name_of_what_belongs_to_ranks_is_taken():
    with pytest.raises(UsageError, match="rename it"):
        flatten({"per_rank": {0: 1}})
