"""Words that spare a user days: a forgotten restore, a wrapped model, options in the wrong place."""

from __future__ import annotations

import logging

import pytest
import torch
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.errors import MismatchError, UsageError

URL = "s3://bucket/run"
THREAD = SaveOptions(uploader="thread")


def test_a_run_that_begins_anew_under_a_url_in_use_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    with memory_engine(MemoryBucket()), caplog.at_level(logging.WARNING, "objckpt"):
        with Checkpointer(URL, options=THREAD) as first:
            first.save(1, {"n": 1})
            first.save(2, {"n": 2})
        assert "forgotten" not in caplog.text
        with Checkpointer(URL, options=THREAD) as resumed:
            resumed.restore({"n": 0})
            resumed.save(3, {"n": 3})
        assert "forgotten" not in caplog.text
        with Checkpointer(URL, options=THREAD) as anew:
            anew.save(1, {"n": 1})
            anew.save(2, {"n": 2})
    assert (
        caplog.text.count("has 3 checkpoints of other runs, the newest of step 3, and none of them was restored") == 1
    )


def test_a_wrapped_model_is_named_as_what_differs() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = torch.nn.Linear(2, 2)
    with memory_engine(MemoryBucket()), Checkpointer(URL, options=THREAD) as ckpt:
        ckpt.save(1, {"model": Wrapper(model)}).wait_committed(20)
        with pytest.raises(MismatchError, match=r'differ in 4 leaves.*(?s:.*)adds "module."\): pass what is inside'):
            ckpt.restore({"model": model})


def test_a_state_that_is_a_level_up_or_down_is_told_so() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with memory_engine(MemoryBucket()), Checkpointer(URL, options=THREAD) as ckpt:
        ckpt.save(1, {"model": model}).wait_committed(20)
        with pytest.raises(MismatchError, match=r"differ in 8 leaves.*(?s:.*)in the checkpoint they are below 'model'"):
            ckpt.restore(model.state_dict())
        with pytest.raises(MismatchError, match=r"(?s)in the state they are below 'all'"):
            ckpt.restore({"all": {"model": model}})
        with pytest.raises(MismatchError, match=r"differ in 1 leaf; nothing was changed\n  not in the checkpoint: n\n"):
            ckpt.restore({"model": model, "n": 1})


def test_a_name_that_is_not_there_is_answered_with_those_near_it() -> None:
    with memory_engine(MemoryBucket()), Checkpointer(URL, options=THREAD) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(2, 2)}).wait_committed(20)
        weights = ckpt.open()
        with pytest.raises(KeyError, match="model: the checkpoint of step 1 has no such leaf; near it: model/"):
            weights["model"]
        with pytest.raises(KeyError, match="near it: model/weight"):
            weights["model/wieght"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("difflib.get_close_matches", lambda *_: pytest.fail("who asks for a default needs no names"))
            assert "model" not in weights and weights.get("model") is None and weights.get("modle", 3) == 3
        assert weights.get("model/weight").shape == (2, 2)


@pytest.mark.parametrize("wrong", [{"options": StoreOptions()}, {"store": SaveOptions()}, {"store": {}}])
def test_options_in_the_wrong_place(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"must be (Save|Store)Options, not"):
        Checkpointer(URL, **wrong)  # type: ignore[arg-type]
