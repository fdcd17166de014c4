"""Fixtures: the nursery of ranks, and a checkpoint of every layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.ranks import Ranks
from support.servers import GIVEN, lead_to

JOBS = Path(__file__).with_name("jobs.py")
LAYOUTS = {1: ["fsdp"], 2: ["fsdp", "tp", "ddp"], 3: ["fsdp"], 4: ["fsdp", "ddp", "hsdp", "fsdp_tp"]}


class Saved(NamedTuple):
    url: str
    contents: dict[str, torch.Tensor]
    losses: list[float]  # of the training that went on


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


@pytest.fixture(scope="session")
def jobs() -> Path:
    """The file that has the jobs."""
    return JOBS


@pytest.fixture(scope="package")
def saved(ranks: Ranks, request: pytest.FixtureRequest) -> Iterator[dict[tuple[int, str], Saved]]:
    """By number of ranks and layout. The environment leads to the server while it is in use."""
    with pytest.MonkeyPatch.context() as patch:
        url = lead_to(request.getfixturevalue("given_server" if GIVEN else "weed_server"), patch)
        out = {}
        for size, layouts in LAYOUTS.items():
            urls = {layout: f"{url}/{size}-{layout}" for layout in layouts}
            for layout, (contents, losses) in ranks.run(size, JOBS, "save", urls)[0].items():
                out[size, layout] = Saved(urls[layout], contents, losses)
        yield out
