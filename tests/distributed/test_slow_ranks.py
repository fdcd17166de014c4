"""A rank that is late, in training, in its uploader or as a whole: within the deadline it costs nothing, beyond it one save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.ranks import Ranks

from objckpt import Checkpointer
from objckpt.cli.main import run


def test_a_rank_slower_than_the_others_is_waited_for(ranks: Ranks, jobs: Path, weed_url: str, tmp_path: Path) -> None:
    for out in ranks.run(3, jobs, "waited_for", weed_url, str(tmp_path)):
        assert [result for result, _ in out] == [("", "2"), ("", "3")]
        assert all(waits for _, waits in out), "it has not been waited for"
    with Checkpointer(weed_url) as ckpt:
        assert [(c.step, c.world_size) for c in ckpt.checkpoints()] == [(1, 3), (2, 3), (3, 3)]
    assert run(["verify", weed_url, "--all"]) == 0


@pytest.mark.slow
def test_a_rank_slower_than_the_deadline_costs_one_save(
    ranks: Ranks, jobs: Path, weed_url: str, tmp_path: Path
) -> None:
    """The late one is refused, whatever it has done: the others have given up in the log what it would complete or commit."""
    plan = [(0, "uploader"), (1, ""), (1, "training"), (1, "")]
    for first, second, third, fourth in ranks.run(3, jobs, "too_late", weed_url, plan, 2.0, str(tmp_path)):
        assert second == ("", "3") and fourth == ("", "5")
        for (kind, text), slow in ((first, 0), (third, 1)):  # another one may be late beside it
            assert kind == "SaveError" and re.search(rf"ranks? [0-9, ]*\b{slow}\b.* within 2 s", text), text
    with Checkpointer(weed_url) as ckpt:
        assert [(c.step, c.world_size) for c in ckpt.checkpoints()] == [(1, 3), (3, 3), (5, 3)]
    assert run(["verify", weed_url, "--all"]) == 0
