"""flatten: what becomes a leaf, what shares one, what is refused; the numbers are cases of the project's list."""

from __future__ import annotations

import pathlib
import random
import time
import weakref
from collections import Counter, OrderedDict, deque
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support.roundtrip import bits, collect, roundtrip, staged
from torch._subclasses import FakeTensorMode

from objckpt.errors import UnsupportedDtypeError, UnsupportedTypeError, UsageError
from objckpt.format import values
from objckpt.format.values import TensorLeaf
from objckpt.state.flatten import flatten

Refused = pytest.raises


class Mode(IntEnum):
    A = 1


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: float) -> Wrapped:
        out = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        out.data_, out.scale = data, scale
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Named(torch.Tensor):
    """A subclass that only carries attributes."""


class Loader:
    def __init__(self, pos: int) -> None:
        self.state = {"epoch": 1, "pos": pos}
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


# ---- what is stored ------------------------------------------------------------------------------------------------


def test_e001_a_slice_stores_only_its_bytes() -> None:
    big = torch.arange(1_000_000.0)
    flat = flatten({"s": big[:10], "e": big[10:10]})
    assert [leaf.nbytes for leaf in flat.leaves] == [40, 0]
    back = roundtrip({"s": big[:10]})["s"]
    assert torch.equal(back, big[:10]) and back.untyped_storage().nbytes() == 40


def test_e002_tied_weights_are_one_leaf_and_tied_again() -> None:
    w = torch.nn.Parameter(torch.randn(8, 4))
    state = {"emb.weight": w, "lm_head.weight": w, "detached": w.data}
    assert [leaf.nbytes for leaf in flatten(state).leaves] == [128]
    back = roundtrip(state)
    assert back["emb.weight"] is back["lm_head.weight"] is back["detached"]


def test_e002_tied_arrays_and_tied_conjugates_are_one_leaf() -> None:
    a, c = np.arange(5.0), torch.randn(3, dtype=torch.complex64).conj()
    flat = flatten({"a": a, "b": a, "c": c, "d": c})
    assert [leaf.fqn for leaf in flat.leaves] == ["a", "c"]
    back = roundtrip({"c": c, "d": c})
    assert back["c"] is back["d"] and torch.equal(back["c"], c)


def test_a_conjugate_is_neither_tied_to_its_base_nor_a_view_of_it() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    back = roundtrip({"base": base, "conj": base.conj(), "part": base.conj()[1:], "neg": base.conj().imag})
    assert torch.equal(back["base"], base) and torch.equal(back["conj"], base.conj())
    assert torch.equal(back["part"], base.conj()[1:]) and torch.equal(back["neg"], -base.imag)


def test_e003_views_of_other_dtypes_share_one_leaf() -> None:
    a = torch.arange(64, dtype=torch.uint8)
    state = {"a": a, "b": a.view(torch.float32), "c": a.view(torch.complex64)}
    flat = flatten(state)
    assert sum(leaf.nbytes for leaf in flat.leaves) == 64
    back = roundtrip(state)
    for key, want in state.items():
        assert back[key].dtype == want.dtype and back[key].shape == want.shape and bits(back[key]) == bits(want)
    assert len({t.untyped_storage().data_ptr() for t in back.values()}) == 1


def test_views_inside_a_leaf_become_views_again() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"row": base[1], "t": base.t(), "base": base, "step": base[:, ::2], "one": base[3, 5]}
    assert [leaf.fqn for leaf in flatten(state).leaves] == ["base"]
    back = roundtrip(state)
    assert all(torch.equal(back[k], state[k]) and back[k].stride() == state[k].stride() for k in state)
    back["base"].fill_(7)
    assert all((t == 7).all() for t in back.values())


def test_a_view_that_would_not_be_aligned_inside_its_base_is_a_leaf() -> None:
    a = torch.arange(64, dtype=torch.uint8)
    state = {"a": a[2:], "b": a.view(torch.float32)[1:]}
    assert len(flatten(state).leaves) == 2
    back = roundtrip(state)
    assert all(bits(back[k]) == bits(state[k]) for k in state)


def test_partly_overlapping_and_disjoint_windows_are_leaves_of_their_own() -> None:
    a = torch.arange(10.0)
    state = {"x": a[:6], "y": a[4:], "z": a[7:9], "strided": a[::3]}
    assert [leaf.fqn for leaf in flatten(state).leaves] == ["x", "y", "strided"]
    assert all(torch.equal(roundtrip(state)[k], state[k]) for k in state)


def test_many_windows_of_one_storage_take_no_quadratic_time() -> None:
    flat = torch.zeros(200_000)
    began = time.perf_counter()
    assert len(flatten({i: flat[i * 10 : i * 10 + 10] for i in range(20_000)}).leaves) == 20_000
    assert time.perf_counter() - began < 10  # the quadratic search takes a minute


def test_leaves_come_by_descending_item_size() -> None:
    state = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(1)}
    state["d"] = torch.ones(2, dtype=torch.complex128)
    assert [leaf.fqn for leaf in flatten(state).leaves] == ["d", "b", "c", "a"]


def test_e007_zero_dim_and_one_element() -> None:
    back = roundtrip({"step": torch.tensor(7.0), "i": torch.tensor(2**40), "p": torch.ones(1)})
    assert [t.shape for t in back.values()] == [(), (), (1,)]
    assert back["step"].item() == 7.0 and back["i"].item() == 2**40 and back["p"].item() == 1.0


def test_e009_any_layout_is_stored_row_major_and_restored_contiguous() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    last = torch.arange(32.0).reshape(1, 2, 4, 4).to(memory_format=torch.channels_last)
    for t in (a.t(), a[:, ::2], last, torch.ones(1).expand(1000), a[2:, 1:], a.reshape(3, 2, 2).permute(2, 0, 1)):
        back = roundtrip({"t": t})["t"]
        assert torch.equal(back, t) and back.shape == t.shape and back.is_contiguous()


def test_e013_a_parameter_is_stored_plain_and_keeps_its_graph_and_flag() -> None:
    p = torch.nn.Parameter(torch.randn(3))
    loss = (p * 2).sum()
    flat = flatten({"w": p, "y": p * 3})
    assert all(not leaf.tensor.requires_grad and leaf.tensor.grad_fn is None for leaf in flat.leaves)
    assert p.requires_grad and loss.requires_grad
    back = roundtrip({"w": p})["w"]
    assert type(back) is torch.Tensor and torch.equal(back, p.detach())


def test_e015_keys_with_separators_stay_apart() -> None:
    state = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "a/b": torch.full((2,), 2.0)}
    state |= {0: torch.full((2,), 3.0), "0": torch.full((2,), 4.0), "%(0)": torch.full((2,), 5.0), "": torch.ones(2)}
    assert len({leaf.fqn for leaf in flatten(state).leaves}) == 7
    back = roundtrip(state)
    assert back["a"]["b"].tolist() == [1, 1] and list(back) == list(state)
    assert [back[k].tolist()[0] for k in ("a.b", "a/b", 0, "0", "%(0)", "")] == [0, 2, 3, 4, 5, 1]


def test_e016_empty_and_nested_containers_and_their_order() -> None:
    state = {"log": [{"k": 1}, {"k": 2}], "e": [], "d": {}, "n": None, "nested": [[torch.ones(1)], []], "t": ((), (1,))}
    state["o"] = OrderedDict([("z", 1), ("a", torch.ones(1))])
    back = roundtrip(state)
    assert list(back) == list(state) and list(back["o"]) == ["z", "a"] and type(back["o"]) is OrderedDict
    assert back["log"] == state["log"] and back["e"] == [] and back["d"] == {} and back["n"] is None
    assert back["nested"][0][0].tolist() == [1.0] and back["nested"][1] == [] and back["t"] == ((), (1,))


def test_the_versions_that_a_module_keeps_beside_its_state_survive() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert roundtrip({"m": state})["m"]._metadata == state._metadata


def test_e018_numpy_scalars_and_arrays_keep_their_type() -> None:
    state = {"f64": np.float64(0.1), "f32": np.float32(0.1), "i": np.int64(3), "b": np.bool_(True), "arr": np.arange(3)}
    state |= {"when": np.array(["2024-01-01"], "M8[D]"), "big": np.arange(3, dtype=">f4"), "s": np.array([b"ab"])}
    state |= {"rev": np.arange(5)[::-1], "zero": np.array(2.5), "field": np.zeros(3, [("a", "f4"), ("b", "i1")])["a"]}
    back = roundtrip(state)
    for key, want in state.items():
        assert type(back[key]) is type(want) and back[key].dtype == want.dtype and np.array_equal(back[key], want), key


def test_an_ordinary_array_is_a_leaf_and_a_read_only_one_too() -> None:
    fixed = np.broadcast_to(np.float32(2), (3, 4))
    flat = flatten({"a": fixed, "c": np.arange(4, dtype=np.longlong)})
    assert [(leaf.fqn, leaf.numpy, leaf.dtype) for leaf in flat.leaves] == [
        ("c", True, "int64"),
        ("a", True, "float32"),
    ]
    assert np.array_equal(roundtrip({"a": fixed})["a"], fixed)


def test_e019_values_keep_their_type() -> None:
    cfg = {"out": pathlib.Path("/x"), "dt": torch.bfloat16, "dev": torch.device("cuda:0"), "sz": torch.Size([1, 2])}
    cfg |= {"set": {1, "a"}, "big": 2**200, "tuple": (1, (2,)), "c": 1 + 2j, "b": b"\0"}
    back = roundtrip({"cfg": cfg})["cfg"]
    assert back == cfg and all(type(back[k]) is type(cfg[k]) for k in cfg)


def test_e021_a_generator_state_stays_bytes_on_the_host() -> None:
    back = roundtrip({"rng": torch.get_rng_state()})["rng"]
    assert back.dtype == torch.uint8 and back.device.type == "cpu"
    torch.Generator().set_state(back)


def test_e112_an_object_is_asked_once_and_its_state_is_not_shared() -> None:
    loader = Loader(75)
    flat = flatten({"loader": loader})
    assert loader.asked == 1
    packed = values.pack(flat.tree)
    loader.state["pos"] = 80
    assert values.unpack(packed, "tree")["loader"]["pos"] == 75
    assert roundtrip({"loader": loader})["loader"]["pos"] == 80


def test_e038_new_storages_are_seen() -> None:
    module = torch.nn.Linear(2, 2)
    first = roundtrip({"m": module})["m"]["weight"]
    for p in module.parameters():
        p.data = p.data.clone() + 1
    assert torch.equal(roundtrip({"m": module})["m"]["weight"], first + 1)
    module.weight = torch.nn.Parameter(torch.full((2, 2), 9.0))
    assert roundtrip({"m": module})["m"]["weight"].tolist() == [[9.0, 9.0], [9.0, 9.0]]


def test_e060_nothing_holds_the_sources_after_staging() -> None:
    t = torch.ones(100)
    dead = weakref.ref(t)
    flat = flatten({"t": t, "view": t[2:]})
    staged(flat)
    del t, flat
    collect()
    assert dead() is None


def test_e128_global_settings_do_not_change() -> None:
    def settings() -> list[Any]:
        numpy_state = np.random.get_state()
        return [
            torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:],
            torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
        ]  # fmt: skip

    before = settings()
    roundtrip({"w": torch.ones(9000), "a": np.ones(3), "c": torch.ones(2, dtype=torch.complex64).conj()})
    assert settings() == before


def test_a_default_device_does_not_lead_the_copies_astray() -> None:
    state = {"w": torch.arange(3.0), "a": np.arange(2)}
    with torch.device("meta"):
        assert [len(b) for b in staged(flatten(state))] == [16, 12]


def test_the_top_may_be_any_mapping_and_must_be_one() -> None:
    assert flatten(MappingProxyType({"a": 1})).tree == {"a": 1}
    with Refused(UsageError, match="must be a mapping"):
        flatten([torch.ones(1)])  # type: ignore[arg-type]


# ---- what is refused -----------------------------------------------------------------------------------------------


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _freed() -> torch.Tensor:
    t = torch.ones(4)
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (_jagged, "NestedTensor"),
        (_fake, "FakeTensor"),
        (_freed, "freed"),
        (lambda: Wrapped(torch.ones(3), 2.0), "Wrapped"),
        (lambda: torch.ones(3).as_subclass(Named), "Named"),
        (lambda: torch.nn.LazyLinear(2).weight, "run the lazy module"),
        (object, "builtins.object"),
        (lambda: Mode.A, "Mode"),
        (lambda: deque("ab"), "deque"),
        (lambda: np.array([object()]), "object"),
        (lambda: np.ma.masked_array([1, 2]), "MaskedArray"),
        (torch.Generator, "Generator"),
        (lambda: torch.nn.Linear, "type"),
        (lambda: {2, Mode.A}, "Mode"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_e010_e012a_e013_e019_refusals_name_path_type_and_remedy(make: Any, words: str) -> None:
    with Refused(UnsupportedTypeError) as caught:
        flatten({"ok": torch.ones(2), "cfg": {"bad": make()}})
    message = str(caught.value)
    assert message.startswith("cfg/bad") and words in message and caught.value.context["fqn"].startswith("cfg/bad")
    assert any(f" {verb} " in message for verb in ("save", "take", "run", "materialise", "convert"))  # the remedy


@pytest.mark.filterwarnings("ignore")
def test_e006_quantised_tensors_are_refused_by_dtype() -> None:
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        with Refused(UnsupportedDtypeError, match=f"m/q: .*{dtype}.*int_repr"):
            flatten({"m": {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, dtype)}})


def test_cycles_and_depth_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with Refused(UnsupportedTypeError, match=r"l/%\(0\)/again: this list contains itself"):
        flatten({"l": loop})
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with Refused(UnsupportedTypeError, match="nested deeper than"):
        flatten({"deep": deep})
    same = [1]
    assert flatten({"a": same, "b": [same, same]}).tree == {"a": [1], "b": [[1], [1]]}


def test_an_object_whose_state_has_no_end_is_refused() -> None:
    class Endless:
        def state_dict(self) -> Endless:
            return Endless()

    with Refused(UnsupportedTypeError, match="s/…: nested deeper"):
        flatten({"s": Endless()})


def test_names_that_a_reader_would_not_accept_are_refused() -> None:
    with Refused(UnsupportedTypeError, match="more than 4096 bytes"):
        flatten({"s" * 5000: torch.ones(1)})
    with Refused(UnsupportedTypeError, match="two leaves have this name"):
        flatten({"a": {float("nan"): torch.ones(1), float("nan") + 0: torch.zeros(1)}})


def test_a_state_dict_that_wants_arguments() -> None:
    class Odd:
        def state_dict(self, must: int) -> dict[str, int]:
            return {"must": must}

    with Refused(UnsupportedTypeError, match=r"o: .*Odd.state_dict\(\) failed"):
        flatten({"o": Odd()})


# ---- pickle --------------------------------------------------------------------------------------------------------


def test_with_pickle_other_values_survive() -> None:
    state = {"mode": Mode.A, "count": Counter("aab"), "w": torch.ones(1), "plain": 3}
    flat = flatten(state, pickle=True)
    assert type(flat.tree["w"]) is TensorLeaf and flat.tree["plain"] == 3
    back = roundtrip(state, pickle=True)
    assert back["mode"] is Mode.A and back["count"] == Counter("aab") and type(back["count"]) is Counter


def test_pickle_takes_no_tensor_along() -> None:
    class Holder:
        pass

    for value in ({torch.ones(1)}, Counter({"t": torch.ones(1)}), torch.ones(1).untyped_storage()):
        with Refused(UnsupportedTypeError, match=r"a: .*holds a"):
            flatten({"a": value}, pickle=True)
    with Refused(UnsupportedTypeError, match=r"a: .*cannot be pickled"):
        flatten({"a": Holder()}, pickle=True)
