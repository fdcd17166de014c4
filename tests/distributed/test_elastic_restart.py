"""A job of FSDP2 is killed and goes on with fewer ranks, twice: the same bits, the same line of checkpoints, the same losses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.ranks import KILLED, Ranks
from support.roundtrip import bits

from objckpt import Checkpointer
from objckpt.cli.main import run


@pytest.mark.slow
def test_killed_on_four_ranks_goes_on_with_three_and_then_two(
    ranks: Ranks, jobs: Path, weed_url: str, tmp_path: Path
) -> None:
    for size, last, dies in ((4, 2, True), (3, 3, True), (2, 4, False)):
        found = ranks.run(
            size, jobs, "train_on", weed_url, last, dies, 4 - size, str(tmp_path), may_die=tuple(range(size))
        )
        assert found == [KILLED if dies else None] * size
    with Checkpointer(weed_url) as ckpt:
        commits = ckpt.checkpoints()
    assert [(c.step, c.world_size) for c in commits] == [(1, 4), (2, 3), (3, 2), (4, 2)]
    assert [c.parent for c in commits] == [None, *(c.seq for c in commits[:-1])]
    assert run(["verify", weed_url, "--all"]) == 0
    for step in (1, 2):
        saved, restored = torch.load(tmp_path / f"saved-{step}"), torch.load(tmp_path / f"restored-{step}")
        assert len(saved) == 9 + 8 * 3 and saved.keys() == restored.keys()
        assert [name for name in saved if bits(saved[name]) != bits(restored[name])] == []
    losses = [torch.load(tmp_path / f"loss-{step}") for step in range(1, 5)]
    assert losses == pytest.approx(undisturbed(jobs, 4), rel=1e-4)


def undisturbed(jobs: Path, steps: int) -> list[float]:
    """The losses of one process that was never stopped."""
    spec = importlib.util.spec_from_file_location("jobs", jobs)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, wrapped, optimizer = module.build("plain", 1)
    losses: list[float] = module.train(wrapped, optimizer, steps, 1)
    return losses
