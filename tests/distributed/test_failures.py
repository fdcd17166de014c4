"""One rank refuses, differs or dies: all learn it within the deadline, nothing half is visible, and the next save works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.ranks import KILLED, Ranks

from objckpt import Checkpointer


def test_refusals_reach_every_rank_by_name(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    found = ranks.run(4, jobs, "refusals", weed_url)
    for rank, out in enumerate(found):
        kind, text = out["partial"]
        assert kind == "UnsupportedTypeError" and "model/sum" in text and "partial" in text
        kind, text = out["differs"]
        assert kind == "SaveError" and "rank 2 and rank 0 differ in lr" in text and "per_rank" in text
        assert out["again"] == ("", "1")
        kind, text = out["cuts"]
        assert kind == "SaveError" and re.search(r"rank \d and rank 0 differ in w: .*how tensors are sharded", text)
        kind, text = out["stages"]
        assert kind == "SaveError" and "rank 1 and rank 0 differ in extra" in text
        kind, text = out["type"]
        if rank == 2:
            assert kind == "UnsupportedTypeError" and "bad" in text
        else:
            assert kind == "SaveError" and "rank 2 could not save its part" in text, "it was told, not missed"
        assert out["after"] == ("", "4")
    with Checkpointer(weed_url) as ckpt:
        assert [c.step for c in ckpt.checkpoints()] == [1, 4]
    for rank, out in enumerate(ranks.run(4, jobs, "restore_refusals", weed_url)):
        kind, text = out["mismatch"]
        assert (kind == "MismatchError" and "more" in text) if rank == 1 else (kind == "PeerError" and "rank 1" in text)
        assert out["untouched"]
        kind, text = out["missing"]
        assert "step 99 is not committed" in text
        assert kind == ("PeerError" if rank else "NotCommittedError")
        kind, text = out["read"]
        assert (kind == "ConnectError") if rank == 1 else (kind == "PeerError" and "no route to the store" in text)


@pytest.mark.parametrize(("victim", "uploader"), [(0, "process"), (2, "process"), (2, "thread")])
def test_a_rank_that_dies_in_mid_save(victim: int, uploader: str, ranks: Ranks, jobs: Path, weed_url: str) -> None:
    found = ranks.run(4, jobs, "die", weed_url, victim, uploader, may_die=(victim,))
    assert found.pop(victim) == KILLED
    for (kind, text), took_s, visible in found:  # another one may be late beside it
        assert kind == "SaveError" and re.search(rf"ranks? [0-9, ]*\b{victim}\b.* within 2 s", text), text
        assert took_s < 2 + 12
        assert visible == [1]
    for result in ranks.run(3, jobs, "resume", weed_url, 2):
        assert result == (1, (3.0, float(4 * (9 << 18))), ("", "2"))


def test_two_jobs_under_one_url(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    for outcomes, steps in ranks.run(3, jobs, "two_jobs", weed_url):
        assert outcomes[:2] == [("", "1"), ("", "2")] and outcomes[3] == ("", "4")
        kind, text = outcomes[2]
        assert kind == "WriterFencedError" and "was replaced by session" in text
        assert steps == [1, 2, 4]


def test_nothing_communicates_between_save_and_commit(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    assert ranks.run(4, jobs, "no_collectives", weed_url) == [(("", "1"), [])] * 4


def test_tensors_on_parts_of_the_ranks_must_make_up_one_tensor(ranks: Ranks, jobs: Path, weed_url: str) -> None:
    """Namesakes on different meshes: what no reader could put together is not committed."""
    whole = [[5.0 + 4 * row + column for column in range(4)] for row in range(6)]
    for out in ranks.run(4, jobs, "on_parts", weed_url):
        assert out["same"] == ("", "1") and out["again"] == ("", "5")
        assert out["restored"] == whole
        for case, why in (("values", "hold different bytes"), ("cuts", "w: its shards"), ("held", "w: its shards")):
            kind, text = out[case]
            assert kind == "SaveError" and why in text and "names of their own" in text, (case, text)
    with Checkpointer(weed_url) as ckpt:
        assert [c.step for c in ckpt.checkpoints()] == [1, 5]
        assert ckpt.load()["w"].tolist() == whole
        assert ckpt.load(1)["w"].tolist() == [[value - 5 for value in row] for row in whole]
