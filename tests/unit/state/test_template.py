"""What `restore(into)` is told to do with modules, objects and plain containers; through a checkpoint in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from support.written import write
from torch import nn

from objckpt.errors import MismatchError
from objckpt.restore import restore_into


def restored(saved: Any, into: Any, **options: Any) -> Any:
    store, checkpoint = write(saved)
    restore_into(store, checkpoint, into, **options)
    return into


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


def test_e002_a_module_is_filled_in_place_and_its_ties_stay() -> None:
    source, model = Tied(), Tied()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    restored({"model": source}, {"model": model})
    assert before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    assert model.emb.weight is model.head.weight and torch.equal(model.emb.weight, source.emb.weight)
    assert model.emb.weight.requires_grad and model.emb.weight.grad_fn is None


def test_e012b_a_module_on_meta_gets_memory_and_its_ties_stay() -> None:
    source = Tied()
    with torch.device("meta"):
        model = Tied()
    model.norm.weight.requires_grad_(False)
    restored({"model": source}, {"model": model})
    for (name, want), (_, got) in zip(source.state_dict().items(), model.state_dict().items(), strict=True):
        assert got.device.type == "cpu" and torch.equal(got, want), name
    assert model.emb.weight is model.head.weight
    assert model.emb.weight.requires_grad and not model.norm.weight.requires_grad
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_e012b_the_real_part_of_a_module_half_on_meta_stays_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    first, pointer = model[0].weight, model[0].weight.data_ptr()
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    restored({"m": source}, {"m": model})
    assert model[0].weight is first and first.data_ptr() == pointer and torch.equal(first, source[0].weight)
    assert torch.equal(model[1].weight, source[1].weight)


def test_e016_lists_that_grew_and_empty_containers_are_as_they_were_saved() -> None:
    saved = {"log": [{"k": 1}, {"k": 2}], "e": [], "d": {}, "n": None, "nested": [[torch.ones(1)], []]}
    saved["o"] = OrderedDict([("z", 1), ("a", 2)])
    into = {"log": [], "e": [1], "d": {"x": 1}, "n": 3, "nested": [], "o": OrderedDict()}
    restored(saved, into)
    assert into["log"] == [{"k": 1}, {"k": 2}] and into["e"] == [] and into["d"] == {} and into["n"] is None
    assert into["nested"][0][0].tolist() == [1.0] and into["nested"][1] == [] and list(into["o"]) == ["z", "a"]


def test_e113_plain_values_are_replaced() -> None:
    model = {"w": torch.zeros(2)}
    into = {"model": model, "epoch": 0, "lr": 0.1, "args": {}}
    restored({"model": {"w": torch.ones(2)}, "epoch": 7, "lr": 0.01, "args": {"a": 1}}, into)
    assert (into["epoch"], into["lr"], into["args"]) == (7, 0.01, {"a": 1})
    assert into["model"] is model and model["w"].tolist() == [1, 1]


def test_a_fresh_optimizer_takes_what_was_saved() -> None:
    source = nn.Linear(2, 2)
    optim = torch.optim.Adam(source.parameters(), lr=0.5)
    source(torch.ones(1, 2)).sum().backward()
    optim.step()
    model = nn.Linear(2, 2)
    fresh = torch.optim.Adam(model.parameters(), lr=0.1)
    restored({"m": source, "o": optim}, {"m": model, "o": fresh})
    assert fresh.param_groups[0]["lr"] == 0.5
    for p, q in zip(source.parameters(), model.parameters(), strict=True):
        assert all(torch.equal(optim.state[p][k], fresh.state[q][k]) for k in ("step", "exp_avg", "exp_avg_sq"))


def test_half_of_a_parameters_state_is_refused() -> None:
    state = {"o": {"state": {0: {"step": torch.ones(1), "m": torch.ones(2)}}}}
    target = {"o": {"state": {0: {"step": torch.zeros(1)}}}}
    with pytest.raises(MismatchError, match="in part only; not in both: m"):
        restored(state, target)
    assert target["o"]["state"][0]["step"].item() == 0


def test_strides_of_the_target_stay() -> None:
    target = torch.zeros(3, 4).t()
    restored({"w": torch.arange(12.0).reshape(4, 3)}, {"w": target})
    assert target.stride() == (1, 4) and torch.equal(target, torch.arange(12.0).reshape(4, 3))


def test_every_difference_is_listed_and_nothing_is_touched() -> None:
    into = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1), "n": 1}
    with pytest.raises(MismatchError) as caught:
        restored({"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(1).int(), "x": torch.ones(1), "n": 2}, into)
    message = str(caught.value)
    assert all(f": {name}" in message for name in ("b: shape (4,)", "c: dtype int32", "x")) and "3 leaves" in message
    assert into["a"].tolist() == [0, 0] and into["n"] == 1


def test_state_of_an_optimizer_that_belongs_to_no_parameter() -> None:
    """As torch.distributed.checkpoint leaves it behind: numbers became text, and torch would drop the moments in silence."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    assert restored({"optim": saved}, {"optim": torch.optim.AdamW([parameter])})["optim"].state[parameter]
    saved["state"] = {str(number): part for number, part in saved["state"].items()}
    with pytest.raises(MismatchError, match="'0' belongs to no parameter"):
        restored({"optim": saved}, {"optim": torch.optim.AdamW([parameter])})
