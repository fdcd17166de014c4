"""A rank is killed, with its uploader or without, at a known moment of a save or of a restore.

The others learn it within the deadline or commit, what is visible is whole, and a new job of fewer ranks goes on from it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.ranks import KILLED, Ranks

from objckpt.cli.main import run

DEADLINE_S, LONG_S = 2.0, 100.0  # of the save in which a rank dies: one that runs out, and one that nobody waits for


def committed(url: str, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The steps of the checkpoints, every one of which is there to the last byte."""
    capsys.readouterr()
    assert run(["ls", url, "--json"]) == 0
    steps = [commit["step"] for commit in json.loads(capsys.readouterr().out)]
    assert not steps or run(["verify", url, "--all"]) == 0
    return steps


@pytest.mark.slow
def test_a_rank_that_dies_before_the_commit_costs_this_checkpoint_only(
    ranks: Ranks, jobs: Path, weed_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job after the other, each of which restores what the one before has left."""
    steps: list[int] = []
    for victim, moment, why in (
        (0, "staging the first", r"ranks? 0\b.* of 3 did not finish"),
        (2, "staging", r"ranks? [0-9, ]*\b2 of 3 did not finish"),
        (0, "index", r"rank 0 did not commit|of 3 did not finish"),  # the second: one of the others was late, too
    ):
        folder = tmp_path / moment
        folder.mkdir()
        given = (weed_url, victim, moment, str(folder), DEADLINE_S)
        found = ranks.run(3, jobs, "die_in_save", *given, may_die=(victim,))
        assert found.pop(victim) == KILLED
        for restored, (kind, text), took_s in found:
            assert restored == ((steps[-1], {float(steps[-1])}) if steps else (None, {0.0})), moment
            assert kind == "SaveError" and re.search(f"({why}).* within 2 s", text), (moment, text)
            assert took_s < DEADLINE_S + 10, moment
        steps += [] if moment == "staging the first" else [len(steps) + 1]
        assert committed(weed_url, capsys) == steps, moment
    assert ranks.run(2, jobs, "go_on", weed_url, 3) == [(2, {2.0}, ("", "3"))] * 2
    assert committed(weed_url, capsys) == [1, 2, 3]


@pytest.mark.slow
def test_a_rank_that_dies_while_its_part_is_safe_costs_nothing(
    ranks: Ranks, jobs: Path, weed_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uploaded, or with an uploader that lives: then it also commits. The others save when it is dead already."""
    for victim, moment, last in ((2, "index", 2), (0, "alone", 4)):
        folder = tmp_path / moment
        folder.mkdir()
        found = ranks.run(3, jobs, "die_in_save", weed_url, victim, moment, str(folder), LONG_S, may_die=(victim,))
        assert found.pop(victim) == KILLED
        assert [result for _, result, _ in found] == [("", str(last))] * 2, moment
        assert committed(weed_url, capsys) == list(range(1, last + 1)), moment
    assert ranks.run(2, jobs, "go_on", weed_url, 5) == [(4, {4.0}, ("", "5"))] * 2
    assert committed(weed_url, capsys) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_rank_that_dies_in_a_restore_fails_it_on_all(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    """Saved by two ranks, restored by three: "shared" is read once and passed on. One that only stops closes no connection."""
    ranks.run(2, jobs, "save_filled", weed_url)
    for moment in ("fetch", "exchange", "hand over", "stopped"):
        found = ranks.run(3, jobs, "die_in_restore", weed_url, 1, moment, 3.0, may_die=(1,), group_timeout_s=LONG_S)
        assert found.pop(1) == KILLED
        for kind, text, took_s in found:
            assert kind == "PeerError", (moment, kind, text)
            assert took_s < LONG_S / 2, f"{moment}: {text}"
    assert ranks.run(2, jobs, "go_on", weed_url, 2) == [(1, {1.0}, ("", "2"))] * 2
