"""A rank that is late, in training, in its uploader or as a whole: within the deadline it costs nothing, beyond it one save."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import Ranks

from objckpt import Checkpointer
from objckpt.cli.main import run


def test_a_rank_slower_than_the_others_is_waited_for(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    late_s = 1.5
    plan = [(0, "uploader", late_s), (1, "all of it", late_s)]
    for rank, out in enumerate(ranks.run(3, jobs, "slow", weed_url, 10.0, plan)):
        assert [result for result, _ in out] == [("", "2"), ("", "3")]
        assert rank == 0 or out[0][1] > late_s, "it has not been waited for"
    with Checkpointer(weed_url) as ckpt:
        assert [(c.step, c.world_size) for c in ckpt.checkpoints()] == [(1, 3), (2, 3), (3, 3)]
    assert run(["verify", weed_url, "--all"]) == 0


@pytest.mark.slow
def test_a_rank_slower_than_the_deadline_costs_one_save(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    """The late one is refused, whatever it has done: the others have given up in the log what it would complete or commit."""
    deadline_s, late_s = 2.0, 4.5
    plan = [(0, "uploader", late_s), (1, "", 0.0), (1, "in training", late_s), (1, "", 0.0)]
    for rank, out in enumerate(ranks.run(3, jobs, "slow", weed_url, deadline_s, plan)):
        (first, first_s), (second, _), (third, third_s), (fourth, _) = out
        assert second == ("", "3") and fourth == ("", "5")
        for (kind, text), took_s, slow in ((first, first_s, 0), (third, third_s, 1)):
            assert kind == "SaveError" and f"rank {slow}" in text and f"{deadline_s:g} s" in text
            if rank != slow:
                assert took_s < late_s, "it has waited longer than it should"
    with Checkpointer(weed_url) as ckpt:
        assert [(c.step, c.world_size) for c in ckpt.checkpoints()] == [(1, 3), (3, 3), (5, 3)]
    assert run(["verify", weed_url, "--all"]) == 0
