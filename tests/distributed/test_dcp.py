"""torch.distributed.checkpoint over several ranks: saved on N, loaded on M, by DCP and by the Checkpointer; one rank fails.

The functions with `rank, size` in front run on the ranks; see support/ranks.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import Ranks
from support.roundtrip import bits
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import _async_process_executor as by_process
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.futures import Future

import objckpt.integrations.dcp as plugin
from objckpt import Checkpointer
from objckpt.cli.main import run
from objckpt.errors import ConnectError, ObjckptError
from objckpt.integrations.dcp import ObjckptReader, ObjckptWriter

HERE = Path(__file__)
SYNC, BY_THREAD, BY_PROCESS, BY_CHECKPOINTER = 10, 11, 12, 20
FIRST, SECOND = 30, 31
FSDP1 = {FIRST: False, SECOND: True}  # step → whether FSDP1 is given a mesh


@functools.cache
def jobs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jobs", HERE.with_name("jobs.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


jobs()  # once, before ranks are forked


def state_of(net: Any, optimizer: Any, place: int) -> dict[str, Any]:
    """Keyed by FQN. The last linear layer has 3 rows: on 4 ranks one has none."""
    model, optim = get_state_dict(net, optimizer)
    return {
        "model": model,
        "optim": optim,
        "place": place,
        "plain": torch.full((50, 50), float(place)),  # alike on all ranks
        "list": [torch.full((3,), float(place)), {"n": place, "pair": (place, "x")}],
    }


def save(rank: int, size: int, url: str) -> dict[int, dict[str, torch.Tensor]]:
    """Three saves by one writer, with training in between; what each has."""
    tools = jobs()
    net, wrapped, optimizer = tools.build("fsdp", size)
    writer, out = ObjckptWriter(url), {}
    tools.train(wrapped, optimizer, 2)
    dcp.save(state_of(net, optimizer, SYNC), checkpoint_id=str(SYNC), storage_writer=writer)
    out[SYNC] = tools.contents(net, optimizer)
    tools.train(wrapped, optimizer, 1)
    out[BY_THREAD] = tools.contents(net, optimizer)
    future = dcp.async_save(
        state_of(net, optimizer, BY_THREAD), checkpoint_id=f"run/step-{BY_THREAD}", storage_writer=writer
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()  # DCP's copy is saved
    future.result()
    return out


def save_by_process(rank: int, size: int, url: str) -> Any:
    tools = jobs()
    net, wrapped, optimizer = tools.build("fsdp", size)
    writer = ObjckptWriter(url)
    tools.train(wrapped, optimizer, 1)
    for step in (BY_PROCESS, BY_PROCESS + 1):
        dcp.async_save(
            state_of(net, optimizer, step),
            checkpoint_id=str(step),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()
    by_process._CHECKPOINT_PROCESS = None  # ends it
    return tools.contents(net, optimizer)


def load(rank: int, size: int, url: str, step: int, ways: list[str]) -> dict[str, Any]:
    """What each reader makes of a step: model and optimizer, whole, and the place. "back": saved by the Checkpointer first."""
    tools, out = jobs(), {}

    for way in ways:
        net, _, optimizer = tools.build("fsdp", size, seed=1)
        state = state_of(net, optimizer, 0)
        if way == "dcp":
            dcp.load(state, checkpoint_id=str(step), storage_reader=ObjckptReader(url))
        else:
            with tools.checkpointer(url) as ckpt:
                assert ckpt.restore(state, step=step) == step
                assert ckpt.missing == [] and ckpt.unexpected == []
                if way == "back":
                    ckpt.save(BY_CHECKPOINTER, state).wait_committed(60)
                    state = state_of(*tools.build("fsdp", size, seed=2)[::2], 0)
                    dcp.load(state, checkpoint_id=str(BY_CHECKPOINTER), storage_reader=ObjckptReader(url))
        out[way] = finish(tools, net, optimizer, state)
    return out


def finish(tools: Any, net: Any, optimizer: Any, state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], set[Any]]:
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    first, second = state["list"]
    places = {state["place"], *state["plain"].flatten().tolist(), *first.tolist(), second["n"], second["pair"][0]}
    return tools.contents(net, optimizer), places


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name in got if bits(got[name]) != bits(expected[name])]


@pytest.mark.parametrize("size", [2, 4])
def test_saved_on_some_ranks_loaded_on_others(
    size: int, ranks: Ranks, weed_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ranks.run(size, HERE, "save", weed_url)[0]
    with Checkpointer(weed_url) as ckpt:
        commits = ckpt.checkpoints()
        assert [(c.step, c.world_size, c.meta) for c in commits] == [
            (step, size, {"by": "dcp"}) for step in (SYNC, BY_THREAD)
        ]
        assert len({c.epoch for c in commits}) == 1
        assert commits[0].stored_bytes <= commits[0].raw_bytes * 1.01  # what is alike is there once
        assert len(ckpt.load()["model"]) == len([name for name in saved[SYNC] if name.startswith("model/")])
    loads: list[tuple[int, int, list[str]]] = [(SYNC, 1, ["dcp"]), (SYNC, 3, ["checkpointer", "dcp"])]
    if size == 2:
        loads = [(SYNC, 1, ["dcp", "checkpointer"]), (BY_THREAD, 2, ["dcp", "back"])]
    for step, other, ways in loads:
        for rank, found in enumerate(ranks.run(other, HERE, "load", weed_url, step, ways)):
            assert list(found) == ways
            for way, (contents, places) in found.items():
                assert differences(contents, saved[step]) == [], (rank, other, way)
                assert places == {step}, (rank, other, way)
    assert run(["verify", weed_url, "--all"]) == 0
    assert run(["show", weed_url]) == 0
    assert run(["ls", weed_url]) == 0
    assert "down.weight" in capsys.readouterr().out
    assert run(["rm", weed_url, str(SYNC), "--yes"]) == 0
    assert run(["gc", weed_url, "--grace", "0s"]) == 0
    assert run(["verify", weed_url, "--all"]) == 0
    with Checkpointer(weed_url) as ckpt:
        assert SYNC not in [c.step for c in ckpt.checkpoints()]
        assert not [info for info in ckpt._store.list("data/") if commits[0].attempt in info.key]


@pytest.mark.slow
def test_by_process(ranks: Ranks, weed_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    saved = ranks.run(2, HERE, "save_by_process", weed_url, deadline_s=100)[0]
    with Checkpointer(weed_url) as ckpt:
        assert [(c.step, c.epoch) for c in ckpt.checkpoints()] == [(BY_PROCESS, 1), (BY_PROCESS + 1, 1)]
    contents, places = ranks.run(1, HERE, "load", weed_url, BY_PROCESS, ["dcp"])[0]["dcp"]
    assert differences(contents, saved) == [] and places == {BY_PROCESS}


# ---- FSDP1 -----------------------------------------------------------------------------------------------------------


def fsdp1(size: int, seed: int, mesh: bool) -> tuple[Any, torch.optim.Optimizer]:
    """Without a mesh its state dict has ShardedTensors, with one DTensors."""
    net, _, _ = jobs().build("plain", size, seed)
    given = jobs().mesh(size) if mesh else None
    wrapped = FullyShardedDataParallel(net, device_id=torch.device("cpu"), device_mesh=given, use_orig_params=True)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)


def whole(net: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor of both by FQN, whatever they are sharded by. A collective."""
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    entries = {f"{fqn}/{name}": value for fqn, each in optim["state"].items() for name, value in each.items()}
    return {name: value.detach().clone() for name, value in (model | entries).items()}


def save_fsdp1(rank: int, size: int, url: str) -> dict[int, dict[str, torch.Tensor]]:
    out, writer = {}, ObjckptWriter(url)
    for step, mesh in FSDP1.items():
        net, optimizer = fsdp1(size, step, mesh)
        jobs().train(net, optimizer, 2)
        state = state_of(net, optimizer, step)
        assert isinstance(state["model"]["up.weight"], DTensor if mesh else ShardedTensor)
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer)
        out[step] = whole(net, optimizer)
    return out


def load_fsdp1(rank: int, size: int, url: str) -> dict[tuple[int, str], Any]:
    """Both kinds into FSDP1 of the same kind, and into FSDP2."""
    out: dict[tuple[int, str], Any] = {}
    for step, mesh in FSDP1.items():
        for way in ("fsdp1", "fsdp2"):
            net, optimizer = fsdp1(size, 1, mesh) if way == "fsdp1" else jobs().build("fsdp", size, seed=1)[::2]
            state = state_of(net, optimizer, 0)
            dcp.load(state, checkpoint_id=str(step), storage_reader=ObjckptReader(url))
            set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
            out[step, way] = whole(net, optimizer), state["place"]
    return out


def test_fsdp1_is_saved_and_loaded_into_itself_and_fsdp2(ranks: Ranks, weed_url: str) -> None:
    saved = ranks.run(2, HERE, "save_fsdp1", weed_url)[0]
    assert len(saved[FIRST]) == 9 + 8 * 3
    for size in (2, 1):
        for rank, found in enumerate(ranks.run(size, HERE, "load_fsdp1", weed_url)):
            assert len(found) == 4
            for (step, way), (contents, place) in found.items():
                assert differences(contents, saved[step]) == [] and place == step, (size, rank, step, way)
    assert run(["verify", weed_url, "--all"]) == 0


# ---- one rank fails --------------------------------------------------------------------------------------------------


def outcome(work: Any) -> Any:
    """By rank: class and text of what failed there; of an error of this rank alone: under "here"."""
    try:
        work()
    except CheckpointException as err:
        return {rank: (type(error).__name__, str(error)) for rank, (error, _) in err.failures.items()}
    except ObjckptError as err:
        return {"here": (type(err).__name__, str(err))}
    return {}


class Cuts(ObjckptWriter):
    """On rank 1 what was written last is not told."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner).value()
        done: Future[Any] = Future()
        done.set_result(results[1:] if dist.get_rank() == 1 else results)
        return done


def no_route(*args: Any, **kwargs: Any) -> Any:
    raise ConnectError("no route to the store", key="k")


def failures(rank: int, size: int, url: str) -> dict[str, Any]:
    """Saves and loads that one rank fails; a save that works after each."""
    mesh = jobs().mesh(size)
    w = dist.tensor.distribute_tensor(torch.arange(7.0), mesh, [dist.tensor.Shard(0)])
    good, out, writer = {"w": w, "n": 1}, {}, ObjckptWriter(url)

    def saving(step: int, state: Any = good, writer: Any = writer, **options: Any) -> Any:
        return outcome(lambda: dcp.save(state, checkpoint_id=str(step), storage_writer=writer, **options))

    real = plugin.open_uploads
    plugin.open_uploads = no_route if rank == 1 else real
    out["write"] = saving(1)
    plugin.open_uploads = real
    out["after"] = saving(2)
    out["cut"] = saving(3, writer=Cuts(url))
    out["type"] = saving(4, good | {"bad": object()}, writer=ObjckptWriter(url))  # the first one is replaced by Cuts
    out["alone"] = saving(5, use_collectives=False)
    dist.barrier()
    writer = ObjckptWriter(url)
    out["last"] = saving(6, writer=writer)

    def loading(reader: Any, step: int | None = None) -> Any:
        return outcome(lambda: dcp.load({"w": w, "n": 0}, checkpoint_id=step, storage_reader=reader))

    reader = ObjckptReader(url)
    if rank == 1:
        reader._store.get_into = no_route
    out["read"] = loading(reader)
    out["step"] = loading(ObjckptReader(url), 99)
    bucket = url.split("/")[2]
    out["bucket"] = loading(ObjckptReader(url.replace(bucket, bucket + "-that-is-not")))
    return out


def test_what_fails_on_one_rank_is_told_on_all(ranks: Ranks, weed_url: str) -> None:
    for rank, out in enumerate(ranks.run(2, HERE, "failures", weed_url)):
        assert out["write"] == {1: ("ConnectError", "no route to the store")}
        assert out["after"] == out["last"] == {}
        ((failed, (kind, text)),) = out["cut"].items()
        assert failed == 0 and kind == "SaveError" and "1 planned items" in text and "w" in text
        assert [kind for kind, _ in out["type"].values()] == ["UnsupportedTypeError"]
        assert all("bad" in text for _, text in out["type"].values())
        assert out["alone"]["here"][0] == "UsageError" and "use_collectives" in out["alone"]["here"][1]
        assert out["read"] == {1: ("ConnectError", "no route to the store")}
        assert out["step"].keys() == {0, 1} and "step 99 is not committed" in out["step"][rank][1]
        assert "that-is-not" in out["bucket"][rank][1], out["bucket"]
    with Checkpointer(weed_url) as ckpt:
        assert [c.step for c in ckpt.checkpoints()] == [2, 6]
