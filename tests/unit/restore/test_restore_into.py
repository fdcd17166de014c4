"""load() and restore_into(): bits, ties, matching, errors before anything is touched."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from support.written import damage, new_store, only_pack, write, write_shards

from objckpt.errors import IntegrityError, MismatchError, UsageError
from objckpt.format.dtypes import ITEMSIZE
from objckpt.geometry import Box
from objckpt.restore import lazy, load, restore_into
from objckpt.state.dtypes import as_bits

DTYPES = sorted(n for n in ITEMSIZE if isinstance(getattr(torch, n, None), torch.dtype) and not n.startswith("bits"))


def bits(name: str, *shape: int) -> torch.Tensor:
    """A tensor of random bits (valid ones for bool)."""
    generator = torch.Generator().manual_seed(len(name))
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * ITEMSIZE[name]), dtype=torch.uint8, generator=generator)
    return (raw & 1).view(torch.bool) if name == "bool" else raw.view(getattr(torch, name))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bits(a), as_bits(b))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    value = bits(name, 50, 60)
    store, checkpoint = write({"t": value}, chunk_bytes=4096)
    assert same(load(store, checkpoint)["t"], value)
    plain, strided = torch.empty_like(value), torch.empty(60, 50, dtype=value.dtype).t()
    for target in (plain, strided):
        as_bits(target).zero_()
        restore_into(store, checkpoint, {"t": target})
        assert same(target, value)
    assert same(lazy(store, checkpoint)["t"][3:40:2, 5], value[3:40:2, 5])


def test_raw_chunks_are_read_into_the_tensor_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store, checkpoint = write({"w": torch.rand(10_000)})
    target = torch.zeros(10_000)
    start, end = target.data_ptr(), target.data_ptr() + target.nbytes
    seen = []
    get_into = store.get_into

    def spy(key: str, offset: int, buffers: Any, **more: Any) -> None:
        seen.extend(np.frombuffer(b, np.uint8).ctypes.data for b in buffers)
        get_into(key, offset, buffers, **more)

    monkeypatch.setattr(store, "get_into", spy)
    restore_into(store, checkpoint, {"w": target})
    assert seen and all(start <= address < end for address in seen)


def test_values_containers_and_empty_tensors() -> None:
    state = {
        "log": [{"k": 1}, {"k": 2}], "e": [], "d": {}, "n": None, "nested": [[torch.ones(1)], []],
        "o": OrderedDict(b=1, a=torch.zeros(0, 3)), "dtype": torch.bfloat16, "size": torch.Size([1, 2]),
        "device": torch.device("cuda:3"), "s": torch.tensor(3.5), "arr": np.arange(3), "t": (1, (2, torch.ones(2))),
    }  # fmt: skip
    store, checkpoint = write(state)
    found = load(store, checkpoint)
    assert found["log"] == [{"k": 1}, {"k": 2}] and found["e"] == [] and found["d"] == {} and found["n"] is None
    assert torch.equal(found["nested"][0][0], torch.ones(1)) and found["nested"][1] == []
    assert list(found["o"]) == ["b", "a"] and type(found["o"]) is OrderedDict and found["o"]["a"].shape == (0, 3)
    assert found["dtype"] is torch.bfloat16 and found["size"] == (1, 2) and found["device"] == torch.device("cuda:3")
    assert found["s"].shape == () and found["s"].item() == 3.5
    assert type(found["arr"]) is np.ndarray and found["arr"].tolist() == [0, 1, 2]
    assert not torch.cuda.is_initialized()


def test_plain_values_of_the_template_are_replaced() -> None:
    store, checkpoint = write(
        {"model": {"w": torch.ones(2)}, "epoch": 7, "lr": 0.01, "args": {"a": 1}, "log": [{"k": 1}]}
    )
    into: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "epoch": 0, "lr": 0.1, "args": {}, "log": []}
    restore_into(store, checkpoint, into)
    assert (into["epoch"], into["lr"], into["args"], into["log"]) == (7, 0.01, {"a": 1}, [{"k": 1}])
    assert torch.equal(into["model"]["w"], torch.ones(2))


def test_ties_and_views_share_memory_again() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    store, checkpoint = write({"a": w, "b": w, "row": w[1], "t": w.t()})
    found = load(store, checkpoint)
    assert found["a"] is found["b"]
    found["a"][1, 2] = -1
    assert found["row"][2] == -1 and found["t"][2, 1] == -1
    v = torch.zeros(3, 4)
    apart = {"a": v, "b": v, "row": torch.zeros(4), "t": torch.zeros(4, 3)}
    restore_into(store, checkpoint, apart)
    assert torch.equal(v, w) and torch.equal(apart["row"], w[1]) and torch.equal(apart["t"], w.t())
    separate = {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4), "row": v[1], "t": v.t()}
    restore_into(store, checkpoint, separate)
    assert torch.equal(separate["a"], w) and torch.equal(separate["b"], w) and torch.equal(v[1], w[1])
    assert store.bucket.operations.count(("get_into", only_pack(store))) == 3  # one GET a restore: nothing twice
    assert torch.equal(lazy(store, checkpoint)["t"][1:3, -1], w.t()[1:3, -1])


def test_targets_that_overlap() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    store, checkpoint = write({"left": w[:, :3], "right": w[:, 1:]})
    v = torch.zeros(3, 4)
    restore_into(store, checkpoint, {"left": v[:, :3], "right": v[:, 1:]})
    assert torch.equal(v, w)


def test_tied_targets_of_different_tensors_are_refused() -> None:
    store, checkpoint = write({"a": torch.zeros(2), "b": torch.ones(2)})
    v = torch.full((2,), 5.0)
    with pytest.raises(MismatchError, match="shares its memory with a"):
        restore_into(store, checkpoint, {"a": v, "b": v})
    assert v.tolist() == [5, 5]
    store, checkpoint = write({"a": torch.ones(2), "b": torch.ones(2)})
    restore_into(store, checkpoint, {"a": v, "b": v})  # equal bytes: one tensor will do
    assert v.tolist() == [1, 1]


def test_dtype_is_never_changed_in_silence() -> None:
    saved = {"f": torch.rand(1000) * 100, "i": torch.tensor([16777217], dtype=torch.int32)}
    store, checkpoint = write(saved)
    into = {"f": torch.zeros(1000, dtype=torch.bfloat16), "i": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(MismatchError, match=r"f: dtype float32 in the checkpoint, bfloat16 in the state"):
        restore_into(store, checkpoint, into)
    assert not into["f"].any() and not into["i"].any()
    restore_into(store, checkpoint, into, cast=True)
    assert torch.equal(into["f"], saved["f"].to(torch.bfloat16))
    with pytest.raises(MismatchError, match="int32"):
        restore_into(store, checkpoint, {"f": torch.zeros(1000), "i": torch.zeros(1)}, cast=True)


def test_one_error_lists_every_difference() -> None:
    store, checkpoint = write({"m": {"a": torch.ones(2), "b": torch.ones(3), "x": torch.ones(1)}, "y": 1})
    target = torch.zeros(2)
    with pytest.raises(MismatchError) as caught:
        restore_into(store, checkpoint, {"m": {"a": target, "b": torch.zeros(4), "new": torch.zeros(1)}})
    assert caught.value.context["missing"] == ["m/new"] and caught.value.context["unexpected"] == ["m/x", "y"]
    assert all(name in str(caught.value) for name in ("m/b", "m/new", "m/x", "y", "(3,)", "(4,)"))
    assert not target.any() and store.bucket.operations == []
    report = restore_into(store, checkpoint, {"m": {"a": target, "new": torch.zeros(1)}}, strict=False)
    assert (report.missing, report.unexpected) == (["m/new"], ["m/b", "m/x", "y"]) and target.all()


def test_half_of_a_parameters_state_is_an_error_always() -> None:
    whole = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    store, checkpoint = write({"optim": {"state": {0: {"exp_avg": torch.ones(2)}, 1: dict(whole)}}})
    into = {"optim": {"state": {0: dict(whole), 1: dict(whole)}}}
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"state/%\(0\).*step"):
            restore_into(store, checkpoint, into, strict=strict)


def test_only() -> None:
    store, checkpoint = write({"model": {"w": torch.ones(2), "b": torch.ones(1)}, "optim": {"lr": 3}})
    for pattern in ("model/*", "model.*", ["model/w", "model/b"]):
        assert set(load(store, checkpoint, only=pattern)) == {"model"}
    assert set(load(store, checkpoint, only="*/w")["model"]) == {"w"}
    into: dict[str, Any] = {"model": {"w": torch.zeros(2), "b": torch.zeros(1)}, "optim": {"lr": 0}}
    restore_into(store, checkpoint, into, only="model/w")
    assert into["model"]["w"].all() and not into["model"]["b"].any() and into["optim"]["lr"] == 0
    with pytest.raises(MismatchError, match="no leaf matches"):
        load(store, checkpoint, only="modle/*")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("modle/*", r"'modle/\*' matches no leaf of the checkpoint, which has model, ema"),
        (["model/*", "nothing"], r"'nothing' matches no leaf of the checkpoint"),
        ("ema/*", r"ema/w"),  # in the checkpoint only
        ("head/*", r"head/w|no leaf of the checkpoint"),  # in the state only
        (["model/*", "ema/*"], r"ema/w"),
        ("loader/b", r"loader/b"),  # inside an object that takes what was saved
    ],
)
def test_a_pattern_must_match_on_both_sides(strict: bool, only: str | list[str], said: str) -> None:
    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {"b": 1}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("nothing is to be loaded")

    store, checkpoint = write({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}, "loader": {"a": 1}})
    into = {"model": {"w": torch.zeros(2)}, "head": {"w": torch.zeros(2)}, "loader": Loader()}
    with pytest.raises(MismatchError, match=said):
        restore_into(store, checkpoint, into, only=only, strict=strict)
    assert not into["model"]["w"].any()
    if "nothing" in only:
        with pytest.raises(MismatchError, match=said):
            load(store, checkpoint, only=only)


def test_a_pattern_matches_what_only_the_checkpoint_can_name() -> None:
    """The state of a fresh optimizer and the content of a mapping of values are not in the state given."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    store, checkpoint = write({"optim": optim, "args": {"a": 1}, "lr": 3})
    fresh = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    into: dict[str, Any] = {"optim": fresh, "args": {}, "lr": 0}
    restore_into(store, checkpoint, into, only=["optim/state/*", "args/a"])
    assert len(fresh.state) == 2 and into["args"] == {"a": 1} and into["lr"] == 0
    restore_into(store, checkpoint, into, only=["args", "l?"])
    assert into["lr"] == 3


def make_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optim


def train(model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.zero_grad()
    model(torch.arange(20.0).reshape(5, 4)).square().sum().backward()
    optim.step()


def test_modules_and_optimizers_go_on_as_before() -> None:
    model, optim = make_training()
    train(model, optim)
    store, checkpoint = write({"model": model, "optim": optim})
    fresh, used = make_training(), make_training()
    train(*used)
    train(*used)
    for m, o in (fresh, used):
        pointers = [p.data_ptr() for p in m.parameters()]
        restore_into(store, checkpoint, {"model": m, "optim": o})
        assert [p.data_ptr() for p in m.parameters()] == pointers
    train(model, optim)
    for m, o in (fresh, used):
        train(m, o)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), m.state_dict().values(), strict=True))
        for number, entry in optim.state_dict()["state"].items():
            assert all(torch.equal(entry[k], o.state_dict()["state"][number][k]) for k in entry)


def test_nothing_global_changes() -> None:
    store, checkpoint = write({"w": torch.rand(100), "r": torch.get_rng_state()})
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index,union-attr]
    settings = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    restore_into(store, checkpoint, load(store, checkpoint))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tobytes() == before[2]  # type: ignore[index,union-attr]
    assert settings == (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())


def test_devices() -> None:
    store, checkpoint = write({"w": torch.rand(3, 2)})
    found = load(store, checkpoint, device="meta")
    assert found["w"].device.type == "meta" and found["w"].shape == (3, 2) and store.bucket.operations == []
    for wrong in ({"cuda:0": "cpu"}, "no-such-device", 3):
        with pytest.raises(UsageError):
            load(store, checkpoint, device=wrong)


def test_a_default_device_does_not_lead_the_bytes_astray() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    saved = {"plain": w, "strided": w + 1, "cast": w + 2, "left": (w + 3)[:, :3], "row": w[1], "array": np.arange(3)}
    store, checkpoint = write(saved)
    base, zeros = torch.zeros(3, 4), np.zeros(3, np.int64)
    into = {"plain": torch.zeros(3, 4), "strided": torch.zeros(4, 3).t(), "cast": torch.zeros(3, 4, dtype=torch.float64),
            "left": base[:, :3], "row": torch.zeros(4), "array": zeros}  # fmt: skip
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(5))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5)
    optimizer.step()
    other, kept = write({"optim": optimizer})
    fresh = torch.optim.AdamW([torch.nn.Parameter(torch.ones(5))])
    with torch.device("meta"):
        restore_into(store, checkpoint, into, cast=True)
        found = load(store, checkpoint)
        part = lazy(store, checkpoint)["plain"][1:, 2]
        restore_into(other, kept, {"optim": fresh})
    for name, value in saved.items():
        assert np.array_equal(np.asarray(into[name]), np.asarray(value)), name
        assert np.array_equal(np.asarray(found[name]), np.asarray(value)), name
    assert part.tolist() == w[1:, 2].tolist()
    (state,) = fresh.state.values()
    assert torch.equal(state["exp_avg"], next(iter(optimizer.state.values()))["exp_avg"])


def test_autograd_notices_the_writing() -> None:
    w = torch.ones(3, requires_grad=True)
    store, checkpoint = write({"w": torch.zeros(3)})
    loss = (w * w).sum()
    restore_into(store, checkpoint, {"w": w})
    assert not w.any() and w.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_and_expanded_ones() -> None:
    store, checkpoint = write({"w": torch.ones(3, 2)})
    with torch.inference_mode():
        target = torch.zeros(2, 3).t()
    restore_into(store, checkpoint, {"w": target})
    assert target.all()
    with pytest.raises(MismatchError, match="expanded"):
        restore_into(store, checkpoint, {"w": torch.zeros(3, 1).expand(3, 2)})


def test_conjugate_targets_show_the_saved_values() -> None:
    saved = torch.complex(torch.arange(4.0), torch.ones(4))
    store, checkpoint = write({"w": saved})
    target = torch.zeros(4, dtype=torch.complex64).conj()
    restore_into(store, checkpoint, {"w": target})
    assert torch.equal(target, saved)


def test_sharded_checkpoints_fill_whole_tensors() -> None:
    array = np.arange(1000 * 3, dtype="float32").reshape(1000, 3)
    rows = [Box((at, 0), (250, 3)) for at in range(0, 1000, 250)]
    columns = [Box((0, at), (1000, 1)) for at in range(3)]
    empty = [Box((0,), (2,)), Box((2,), (2,)), Box((4,), (2,)), Box((6,), (0,))]
    six = np.arange(6, dtype="int64")
    tensors = {"rows": (array, rows), "columns": (array, columns), "copies": (array, rows * 2), "six": (six, empty)}
    store, checkpoint = write_shards(tensors, ranks=3)
    into = {name: torch.zeros_like(torch.from_numpy(a)) for name, (a, _) in tensors.items()}
    restore_into(store, checkpoint, into)
    assert all(np.array_equal(into[name].numpy(), a) for name, (a, _) in tensors.items())


def test_damage_is_an_error_with_key_leaf_and_range() -> None:
    store, checkpoint = write({"w": torch.rand(10_000)}, chunk_bytes=4096)
    damage(store, only_pack(store), 5000)
    target = {"w": torch.zeros(10_000)}
    with pytest.raises(IntegrityError) as caught:
        restore_into(store, checkpoint, target)
    assert caught.value.context["fqn"] == "w" and caught.value.context["key"] == only_pack(store)
    assert "bytes [4096, 8192)" in str(caught.value)
    assert any("mixture" in note for note in caught.value.__notes__)


def test_an_empty_state() -> None:
    store, checkpoint = write({})
    assert load(store, checkpoint) == {} and len(lazy(store, checkpoint)) == 0
    restore_into(store, checkpoint, {})
    assert new_store().bucket.objects == {}
