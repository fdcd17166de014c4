"""The public API against real servers: what was saved comes back bit by bit, and the log says what is the newest."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.roundtrip import bits

from objckpt import Checkpointer, SaveOptions
from objckpt.errors import NotCommittedError, StepOrderError, UsageError
from objckpt.limits import MiB

THREAD = SaveOptions(uploader="thread")


def trained(seed: int = 0, steps: int = 2) -> dict[str, Any]:
    """A small state as trainers have it, after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100)
    state = {"model": model, "optim": optim, "sched": sched, "epoch": seed}
    for _ in range(steps):
        train(state)
    return state | {
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
        "args": {"name": "größe", "betas": (0.9, 0.999), "nan": float("nan"), "big": 2**70, "none": None},
    }


def train(state: dict[str, Any]) -> float:
    loss = state["model"](torch.randn(32, 8)).square().mean()
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()
    state["sched"].step()
    return loss.item()


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that two states are equal to the last bit, their types and the order of their keys included."""
    a, b = (x.state_dict() if hasattr(x, "state_dict") else x for x in (a, b))
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert (type(a), len(a)) == (type(b), len(b)), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert bits(a) == bits(b), where
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), where
    else:
        assert type(a) is type(b) and (a == b or (a != a and b != b)), where


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}


@pytest.mark.parametrize(
    "options", [SaveOptions(), SaveOptions(uploader="thread", compression="zstd")], ids=["process", "thread-zstd"]
)
def test_training_goes_on_as_if_it_had_never_stopped(s3_url, options):
    state = trained()
    with Checkpointer(s3_url, options=options) as ckpt:
        handle = ckpt.save(2, state, meta={"who": "me"})
        handle.wait_committed()
        assert handle.done() and handle.exception() is None and handle.seq is not None
        losses = [train(state) for _ in range(3)]
    fresh = trained(seed=1, steps=0)
    with Checkpointer(s3_url, options=options) as ckpt:
        assert ckpt.latest() == 2
        assert ckpt.restore(fresh) == 2
    assert fresh["epoch"] == 0
    torch.set_rng_state(fresh["rng"]["torch"])
    assert [train(fresh) for _ in range(3)] == losses
    same(plain(state), plain(fresh))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_load_and_open_give_the_state_itself(s3_url, compression):
    state = trained()
    with Checkpointer(s3_url, options=SaveOptions(uploader="thread", compression=compression)) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        same(plain(state), ckpt.load())
        lazy = ckpt.open(step=1)
        assert lazy["epoch"] == 0 and lazy["args/name"] == "größe"
        weight = state["model"].state_dict()["0.weight"]
        assert lazy["model/0.weight"].shape == (16, 8)
        assert bits(lazy["model/0.weight"][3:5]) == bits(weight[3:5])
        only = ckpt.load(only="model/0.*")
        assert list(only) == ["model"] and list(only["model"]) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("options", [THREAD, SaveOptions(compression="zstd")], ids=["thread-none", "process-zstd"])
def test_many_slabs_packs_in_parts(s3_url, options):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-128, 128, (70 * MiB,), dtype=torch.int8, generator=generator)
    state = {"noise": noise, "zeros": torch.zeros(9 * MiB), "odd": torch.arange(7, dtype=torch.float64)}
    with Checkpointer(s3_url, options=options) as ckpt:
        handle = ckpt.save(1, state)
        handle.wait_committed()
        stats = handle.stats
        assert stats.staged_bytes == 106 * MiB + 56
        assert stats.sent_bytes == stats.stored_bytes
        if options.compression == "none":
            assert stats.stored_bytes == stats.staged_bytes
        else:
            assert stats.stored_bytes < 72 * MiB
        loaded = ckpt.load()
        for key, value in state.items():
            assert torch.equal(loaded[key], value), key
        across = slice(64 * MiB - 5, 64 * MiB + 5)  # the border of two slabs, for one of the orders of leaves
        assert torch.equal(ckpt.open()["noise"][across], noise[across])


def test_a_resumed_run_goes_on_in_the_same_line(s3_url):
    with Checkpointer(s3_url, options=THREAD) as ckpt:
        assert ckpt.restore({"n": 0}) is None
        for step in (1, 2, 3):
            ckpt.save(step, {"n": step})
    with Checkpointer(s3_url, options=THREAD) as ckpt:
        state = {"n": 0}
        assert ckpt.restore(state) == 3 and state == {"n": 3}
        with pytest.raises(StepOrderError, match="step 3 does not come after step 3"):
            ckpt.save(3, state)
        ckpt.save(4, state)
        ckpt.wait()
        assert ckpt.restore(state, step=2) == 2 and state == {"n": 2}  # a rollback begins a branch
        ckpt.save(3, {"n": 33})
        ckpt.wait()
        found = ckpt.checkpoints()
        seq = [c.seq for c in found]
        assert [c.step for c in found] == [1, 2, 3, 4, 3]
        assert [c.parent for c in found] == [None, seq[0], seq[1], seq[2], seq[1]]
        assert seq == sorted(seq)
        assert [c.epoch for c in found] == [1, 1, 1, 2, 2]
        assert ckpt.latest() == 3 and ckpt.load() == {
            "n": 33
        }  # the newest is the last one, not the one of the highest step
        assert ckpt.load(step=3) == {"n": 33} and ckpt.load(step=4) == {"n": 3}


def test_steps_grow_unless_told_otherwise(s3_url):
    with Checkpointer(s3_url, options=THREAD) as ckpt:
        for bad in (-1, 1.0, True, "1", 10**12):
            with pytest.raises(UsageError, match="step must be an int"):
                ckpt.save(bad, {"n": 0})
        ckpt.save(0, {"n": 0})
        with pytest.raises(StepOrderError, match="step 0 does not come after step 0") as caught:
            ckpt.save(0, {"n": 1})
        assert caught.value.context == {"step": 0, "newest": 0}
        ckpt.save(5, {"n": 5})
        with pytest.raises(StepOrderError, match="step 4 does not come after step 5"):
            ckpt.save(4, {"n": 4})
        ckpt.save(5, {"n": 55}, overwrite=True)
        ckpt.wait()
        assert [c.step for c in ckpt.checkpoints()] == [0, 5, 5]
        assert ckpt.load(step=5) == {"n": 55}
        ckpt.save(6, {"n": 6})


def test_an_empty_prefix_has_no_checkpoint(s3_url):
    with Checkpointer(s3_url) as ckpt:
        state = {"w": torch.ones(3), "n": 1}
        assert ckpt.latest() is None
        assert ckpt.checkpoints() == []
        assert ckpt.restore(state) is None
        assert torch.equal(state["w"], torch.ones(3)) and state["n"] == 1
        for ask in (ckpt.load, ckpt.open, lambda: ckpt.restore(state, step=3), lambda: ckpt.load(3)):
            with pytest.raises(NotCommittedError):
                ask()


def test_meta_and_on_commit(s3_url):
    told: list[int] = []

    def tell(step: int) -> None:
        told.append(step)
        raise RuntimeError("a callback that fails harms nothing")

    with Checkpointer(s3_url, options=THREAD) as ckpt:
        meta = {"loss": 0.5, "tags": ["a", "b"], "nested": {"x": None}}
        handle = ckpt.save(7, {"n": 1}, meta=meta, on_commit=tell)
        meta["loss"] = 9.0
        handle.wait_committed()
        ckpt.save(8, {"n": 2}, on_commit=told.append)
    assert told == [7, 8]
    with Checkpointer(s3_url) as ckpt:
        first, second = ckpt.checkpoints()
    assert first.meta == {"loss": 0.5, "tags": ["a", "b"], "nested": {"x": None}} and second.meta is None


def test_prepare_brings_the_memory_in(s3_url):
    with Checkpointer(s3_url) as ckpt:
        state = {"w": torch.ones(65 * MiB // 4)}
        ckpt.prepare(state)
        ckpt.prepare(state)
        size = sum(os.stat(f"/proc/self/fd/{fd}").st_size for fd in arena_fds())
        assert size >= 128 * MiB
        ckpt.save(1, state).wait_committed()
        assert sum(os.stat(f"/proc/self/fd/{fd}").st_size for fd in arena_fds()) == size
        assert torch.equal(ckpt.load()["w"], state["w"])


def arena_fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "objckpt-arena" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
        except OSError:
            pass  # the descriptor of the listing itself
    return found


def test_a_closed_checkpointer_says_so(s3_url):
    ckpt = Checkpointer(s3_url, options=THREAD)
    ckpt.save(1, {"w": torch.ones(2)})
    ckpt.close()
    ckpt.close()
    for use in (ckpt.latest, ckpt.load, ckpt.wait, lambda: ckpt.save(2, {})):
        with pytest.raises(UsageError, match="closed"):
            use()
