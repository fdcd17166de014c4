"""Saved on N ranks in one layout, restored on M in another: every bit of model and optimizer, and the training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from support.roundtrip import bits

from objckpt import Checkpointer
from objckpt.cli.main import run

SIZES = {1: ["fsdp"], 2: ["fsdp", "tp", "ddp"], 3: ["fsdp"], 4: ["fsdp", "ddp", "hsdp", "fsdp_tp"]}
OWN_SEED = 100  # of rank 0, see jobs.save


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name in got if bits(got[name]) != bits(expected[name]) or got[name].shape != expected[name].shape]


@pytest.mark.parametrize("size", list(SIZES))
def test_any_layout_to_any_layout(size: int, saved: dict[Any, Any], ranks: Ranks, jobs: Path) -> None:
    sources = {source: saved[source].url for source in saved}
    found = ranks.run(size, jobs, "restore", sources, SIZES[size])
    assert len(found[0]) == len(sources) * len(SIZES[size]) and len(sources) == 9
    for rank, by_case in enumerate(found):
        for (source, layout), (contents, losses) in by_case.items():
            case = f"rank {rank}: {source} to {size, layout}"
            assert differences(contents, saved[source].contents) == [], case
            if source == (size, layout):  # the same sums in the same order
                assert losses == saved[source].losses, case
            assert losses == pytest.approx(saved[source].losses, rel=1e-4), case
    assert len(saved[4, "fsdp"].contents) == 9 + 8 * 3


@pytest.mark.parametrize("source", [(4, "fsdp"), (4, "fsdp_tp"), (4, "ddp"), (2, "tp")])
def test_one_process_reads_what_a_job_has_written(
    source: tuple[int, str], saved: dict[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, contents, _ = saved[source]
    size = source[0]
    with Checkpointer(url) as ckpt:
        state = ckpt.load()
        view = ckpt.open()
        for name, expected in contents.items():
            part, *rest = name.split("/")
            if part == "model":
                assert bits(state["model"][rest[0]]) == bits(expected)
                assert bits(view[name][...]) == bits(expected)
        assert bits(view["model/down.weight"][3:50, ::7]) == bits(contents["model/down.weight"][3:50, ::7])
        number, _, entry = next(name for name in contents if name.startswith("optim")).split("/")[1:][0], 0, "exp_avg"
        assert bits(state["optim"]["state"][int(number)][entry]) == bits(contents[f"optim/{number}/{entry}"])
        assert [state["per_rank"][r]["number"] for r in range(size)] == [OWN_SEED + r for r in range(size)]
        (commit,) = ckpt.checkpoints()
        assert commit.world_size == size and commit.raw_bytes > 0
    assert run(["verify", url]) == 0
    capsys.readouterr()
    assert run(["show", url, "--json"]) == 0
    shown = capsys.readouterr().out
    assert "down.weight" in shown and json.loads(shown)
    target = tmp_path / "state.pt"
    assert run(["restore", url, "--out", str(target)]) == 0
    loaded = torch.load(target, weights_only=False)
    assert bits(loaded["model"]["up.weight"]) == bits(contents["model/up.weight"])


@pytest.mark.parametrize(("source", "size"), [((4, "fsdp"), 4), ((4, "fsdp"), 2), ((2, "fsdp"), 3)])
def test_what_belongs_to_a_rank_comes_back_to_it(
    source: tuple[int, str], size: int, saved: dict[Any, Any], ranks: Ranks, jobs: Path
) -> None:
    found = ranks.run(size, jobs, "restore_own", saved[source].url)
    for rank, (number, place, rng, missing) in enumerate(found):
        there = rank < source[0]  # a rank that was not there keeps what it has, and is told
        seed = OWN_SEED + rank if there else 0
        assert number == place == seed
        assert torch.equal(rng, torch.Generator().manual_seed(seed).get_state())
        assert missing == ([] if there else [f"per_rank/%({rank})"])
