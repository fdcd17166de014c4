"""The plug-in for torch.distributed.checkpoint in one process, over a store in memory."""

from __future__ import annotations

import datetime as dt
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket, MemoryStore, MemoryUploads
from support.roundtrip import bits
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.futures import Future

import objckpt.integrations.dcp as plugin
import objckpt.store
from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.cli.main import run
from objckpt.errors import ConnectError, SaveError, UnsupportedTypeError, UsageError
from objckpt.integrations.dcp import ObjckptReader, ObjckptWriter, step_of
from objckpt.log import read_log
from objckpt.restore import load, open_checkpoint, verify

URL = "s3://bucket/run1"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def bucket(monkeypatch):
    """What every part of the package opens, under any URL."""
    made = MemoryBucket()

    def store(url, options=None):
        return MemoryStore(made, objckpt.store.parse_url(url).url, options)

    monkeypatch.setattr(plugin, "open_store", store)
    monkeypatch.setattr(plugin, "open_uploads", lambda url, options: MemoryUploads(made, url))
    monkeypatch.setattr(objckpt.store, "open_store", store)
    with memory_engine(made):
        yield made


def save(state, step=1, *, writer=None, planner=None):
    return dcp.save(
        state, checkpoint_id=str(step), storage_writer=writer or ObjckptWriter(URL), planner=planner, no_dist=True
    )


def load_into(state, step=1, *, reader=None, planner=None):
    dcp.load(state, checkpoint_id=str(step), storage_reader=reader or ObjckptReader(URL), planner=planner, no_dist=True)
    return state


def checkpointer():
    return Checkpointer(URL, options=SaveOptions(uploader="thread"))


def committed(bucket):
    return [commit.step for commit in read_log(MemoryStore(bucket, URL)).checkpoints]


def whole(bucket, step=None):
    """The checkpoint as its own reader gives it, verified."""
    store = MemoryStore(bucket, URL)
    checkpoint = open_checkpoint(store, read_log(store).find(step))
    assert verify(store, checkpoint) == []
    return load(store, checkpoint)


def cause(raised):
    """The one failure of a rank in what DCP raises."""
    ((error, _),) = raised.value.failures.values()
    return error


def example():
    base = torch.arange(60.0).view(6, 10)
    return {
        "model": {
            "w": torch.randn(33, 20),
            "half": torch.randn(7).to(torch.bfloat16),
            "f8": torch.randn(40).to(torch.float8_e4m3fn),
            "int": torch.arange(5),
            "bool": torch.tensor([True, False, True]),
            "complex": torch.randn(3, dtype=torch.complex64),
            "transposed": base.t(),
            "column": base[:, 3],
            "zero_dim": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "conj": torch.randn(4, dtype=torch.complex64).conj(),
            "nan": torch.tensor([0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32),
            "parameter": torch.nn.Parameter(torch.randn(3)),
        },
        "lists": [torch.ones(2), {"a": torch.zeros(3), "n": 7}, [torch.full((2,), 4.0), "x"]],
    }


def blank(node):
    """The same structure with other contents."""
    if isinstance(node, torch.Tensor):
        return torch.full(node.shape, 1, dtype=node.dtype)
    if isinstance(node, dict):
        return {key: blank(child) for key, child in node.items()}
    if isinstance(node, list):
        return [blank(child) for child in node]
    return None


def assert_same(got, expected, path=""):
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape, path
        assert bits(got) == bits(expected), path
    elif isinstance(expected, dict):
        assert type(got) in (dict, OrderedDict) and list(got) == list(expected), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}/{key}")
    elif type(expected) in (list, tuple):
        assert type(got) is type(expected) and len(got) == len(expected), path
        for number, child in enumerate(expected):
            assert_same(got[number], child, f"{path}/{number}")
    elif isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray and got.dtype == expected.dtype and np.array_equal(got, expected), path
    else:
        assert type(got) is type(expected) and (got == expected or got != got), path


VALUES = {
    "none": None,
    "bool": True,
    "int": -7,
    "big": 1 << 200,
    "float": 1e-300,
    "nan": float("nan"),
    "str": "ä/%",
    "bytes": b"\x80\x04",
    "complex": 1 + 2j,
    "tuple": (1, ("a", None)),
    "list": [1, 2, [3, []]],
    "empty_list": [],
    "empty_tuple": (),
    "set": {1, 2},
    "frozenset": frozenset("ab"),
    "path": Path("a/b"),
    "datetime": dt.datetime(2020, 1, 2, 3, 4, 5, 6),
    "timedelta": dt.timedelta(1, 2, 3),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "npscalar": np.float32(1.5),
}


# ---- round trips -----------------------------------------------------------------------------------------------------


def test_tensors_of_every_kind_come_back_by_each_reader(bucket):
    state = example()
    metadata = save(state)
    assert metadata.state_dict_metadata.keys() >= {"model.w", "lists.0", "lists.1.a", "lists.1.n", "lists.2.1"}
    assert_same(load_into(blank(state)), state)
    assert_same(whole(bucket), state)
    into = blank(state)
    with checkpointer() as ckpt:
        assert ckpt.restore(into) == 1
        assert ckpt.missing == [] and ckpt.unexpected == []
    assert_same(into, state)
    (commit,) = read_log(MemoryStore(bucket, URL)).checkpoints
    assert commit.world_size == 1 and commit.meta == {"by": "dcp"}
    assert commit.raw_bytes == sum(t.nbytes for t in tensors_of(state)) and commit.tensors == len(tensors_of(state))


def tensors_of(node):
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [tensor for child in children for tensor in tensors_of(child)]


def test_values_of_every_kind_come_back_by_each_reader(bucket):
    save({"v": VALUES})
    assert_same(load_into({"v": dict.fromkeys(VALUES)}), {"v": VALUES})
    assert_same(whole(bucket), {"v": VALUES})
    into = {"v": dict.fromkeys(VALUES)}
    with checkpointer() as ckpt:
        ckpt.restore(into)
    assert_same(into, {"v": VALUES})


def test_what_the_checkpointer_saved_is_read_by_dcp(bucket):
    state = example() | {
        "v": VALUES,
        "numbers": {0: torch.ones(2), 5: torch.ones(3)},
        "d": {},
        "holes": [{}, torch.ones(1), [{}], [5]],
    }
    with checkpointer() as ckpt:
        ckpt.save(3, state).wait_committed(20)
    into = blank(example()) | {
        "v": dict.fromkeys(VALUES),
        "numbers": {0: torch.zeros(2), 5: torch.zeros(3)},
        "d": {},
        "holes": [{}, torch.zeros(1), [{}], None],
    }
    assert_same(load_into(into, 3), state)


def test_ties_and_views_that_the_checkpointer_saved(bucket):
    base = torch.arange(12.0)
    state = {"base": base, "tied": base, "rows": base.view(3, 4)[1:], "turned": base.view(3, 4).t()}
    with checkpointer() as ckpt:
        ckpt.save(3, state).wait_committed(20)
    assert_same(load_into({name: torch.zeros_like(t) for name, t in state.items()}, 3), state)


def test_ties_that_dcp_saved(bucket):
    base = torch.arange(12.0)
    state = {"a": base, "b": base, "row": base.view(3, 4)[1]}
    save(state)
    assert_same(whole(bucket), state)


def test_no_name_leads_to_two_leaves(bucket):
    with checkpointer() as ckpt:
        ckpt.save(1, {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "n": {0: 1}, "x": 1}).wait_committed(20)
    with pytest.raises(CheckpointException, match=r"one name, 'a\.b', for a/b and a\.b"):
        load_into({"a": {"b": torch.full((2,), 5.0)}})


def test_a_tuple_with_tensors_is_one_value_and_comes_back(bucket):
    state = {"pair": (torch.arange(4.0), {"n": 3, "t": torch.ones(2, 2, dtype=torch.bfloat16)}), "w": torch.ones(3)}
    save(state)
    assert_same(load_into({"pair": None, "w": torch.zeros(3)}), state)
    assert_same(whole(bucket), state)
    into = {"pair": (torch.zeros(4), {"n": 0, "t": torch.zeros(2, 2, dtype=torch.bfloat16)}), "w": torch.zeros(3)}
    with checkpointer() as ckpt:
        ckpt.restore(into)
        assert_same(into, state)
        ckpt.save(2, state).wait_committed(20)
    assert_same(load_into({"pair": None, "w": torch.zeros(3)}, 2), state)


def test_arrays_are_values_and_come_back(bucket):
    state = {"rng": np.random.RandomState(3).get_state(), "a": np.arange(6).reshape(2, 3), "w": torch.ones(3)}
    save(state)
    assert_same(load_into({"rng": None, "a": None, "w": torch.zeros(3)}), state)
    assert_same(whole(bucket), state)
    with checkpointer() as ckpt:
        ckpt.save(2, state).wait_committed(20)
    assert_same(load_into({"rng": None, "a": None, "w": torch.zeros(3)}, 2), state)


def test_numbered_keys_are_text_as_dcp_has_them(bucket):
    """DCP turns the keys of mappings into text; the positions of lists stay numbers."""
    save({"state": {0: torch.ones(2), 1: {"lr": 0.5}}, "list": [torch.zeros(2), {"lr": 0.25}]})
    found = whole(bucket)
    assert_same(found, {"state": {"0": torch.ones(2), "1": {"lr": 0.5}}, "list": [torch.zeros(2), {"lr": 0.25}]})
    into = {"state": {0: torch.zeros(2), 1: {"lr": 0}}, "list": [torch.ones(2), {"lr": 0}]}
    load_into(into)
    assert torch.equal(into["state"][0], torch.ones(2)) and into["list"][1]["lr"] == 0.25


def test_empty_mappings(bucket):
    """DCP has no name for them: outside of lists they are not stored, and a load leaves them alone."""
    state = {"d": {}, "w": torch.ones(2), "holes": [{}, torch.ones(1), 3]}
    save(state)
    assert_same(load_into({"d": {}, "w": torch.zeros(2), "holes": [{}, torch.zeros(1), 0]}), state)
    found = whole(bucket)
    assert "d" not in found and found["w"].sum() == 2
    assert_same(found["holes"], state["holes"])
    into = {"d": {}, "w": torch.zeros(2), "holes": [{}, torch.zeros(1), 0]}
    with checkpointer() as ckpt:
        ckpt.restore(into, strict=False)
        assert ckpt.missing == ["d"]
    assert_same(into, state)


@pytest.mark.parametrize("by", ["dcp", "checkpointer"])
def test_a_state_is_rebuilt_from_the_metadata_alone(bucket, by):
    """What dcp_to_torch_save and loads by key do: names, kinds and sizes come from read_metadata."""
    state = {
        "model": {"w": torch.randn(4, 5)},
        "list": [torch.ones(2), 5],
        "ids": {"0": torch.ones(1), "1": "x"},
        "n": 3,
    }
    if by == "dcp":
        save(state)
    else:
        state["ids"] = {0: torch.ones(1), 1: "x"}
        with checkpointer() as ckpt:
            ckpt.save(1, state).wait_committed(20)
        state["ids"] = {"0": torch.ones(1), "1": "x"}
    found = _load_state_dict_from_keys(checkpoint_id="1", storage_reader=ObjckptReader(URL))
    assert found.keys() == state.keys()
    assert_same({key: found[key] for key in state}, state)
    found = _load_state_dict_from_keys("model", checkpoint_id="1", storage_reader=ObjckptReader(URL))
    assert_same(found, {"model": state["model"]})


def test_planners_that_do_not_flatten(bucket):
    state = {"w": torch.randn(3), "n": 3, "nested": {"a": [1, 2], "b": ()}}
    save(state, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert_same(whole(bucket), state)
    with pytest.raises(CheckpointException):  # DCP has other names for a nested state then
        load_into({"w": torch.zeros(3), "absent": 1})
    into = {"w": torch.zeros(3), "n": 0}
    load_into(into, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert_same(into, {"w": state["w"], "n": 3})


def test_a_missing_name_is_told_by_dcp_and_a_partial_load_leaves_it(bucket):
    save({"w": torch.ones(2)})
    with pytest.raises(CheckpointException, match="absent"):
        load_into({"w": torch.zeros(2), "absent": torch.zeros(1)})
    into = {"w": torch.zeros(2), "absent": torch.zeros(1)}
    load_into(into, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert into["w"].sum() == 2 and into["absent"].sum() == 0


def test_values_with_a_size_that_do_not_fit_are_told(bucket):
    save({"w": torch.ones(2)})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load_into({"w": torch.zeros(3)})


def test_into_tensors_that_are_strided_or_of_another_dtype(bucket):
    save({"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5.0)})
    into = {"a": torch.zeros(4, 3).t(), "b": torch.zeros(5, dtype=torch.float64)}
    a, b = into["a"], into["b"]
    load_into(into)
    assert torch.equal(a, torch.arange(12.0).view(3, 4)) and torch.equal(b, torch.arange(5.0, dtype=torch.float64))


def test_modules_and_optimizers_are_asked_for_their_state(bucket):
    def make(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        return net, torch.optim.AdamW(net.parameters(), lr=0.1 * seed)

    net, optimizer = make(1)
    net(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    save({"model": net, "optim": optimizer})
    other, other_optimizer = make(2)
    other(torch.randn(8, 3)).sum().backward()
    other_optimizer.step()
    load_into({"model": other, "optim": other_optimizer})
    assert_same(dict(other.state_dict()), dict(net.state_dict()))
    assert_same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])
    assert other_optimizer.param_groups[0]["lr"] == 0.1


def test_large_tensors_in_many_chunks_and_codecs(bucket):
    state = {"w": torch.randn(1 << 20), "z": torch.zeros(1 << 19), "s": torch.randn(300, 400).t()}
    writer = ObjckptWriter(URL, options=SaveOptions(chunk_bytes=1 << 16, part_bytes=8 << 20, compression="zstd"))
    save(state, writer=writer)
    (commit,) = read_log(MemoryStore(bucket, URL)).checkpoints
    assert commit.stored_bytes < commit.raw_bytes
    assert_same(load_into(blank(state)), state)


# ---- nothing pickled -------------------------------------------------------------------------------------------------


def forbid(*args, **kwargs):
    raise AssertionError("unpickled")


def test_nothing_in_the_store_is_a_pickle_and_nothing_is_unpickled(bucket, monkeypatch):
    state = example() | {"v": {name: value for name, value in VALUES.items() if name != "bytes"}}
    writer, reader = ObjckptWriter(URL), ObjckptReader(URL)
    dumps = pickle.dumps
    monkeypatch.setattr(pickle, "dumps", forbid)
    save(state, writer=writer)
    monkeypatch.setattr(pickle, "dumps", dumps)
    for key, (data, _) in bucket.objects.items():
        assert not data.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")), key
        assert all(mark not in data for mark in (b"\x80\x04\x95", b"ctorch", b"_rebuild_tensor", b"archive/data")), key
    into = blank(example())
    allowed = []
    torch_load = torch.load

    def load_value(buffer, **kwargs):
        """DCP's own reading of a value that the reader has just made."""
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "Unpickler", real[0])
            patch.setattr(pickle, "loads", real[1])
            allowed.append(buffer)
            return torch_load(buffer, **kwargs)

    real = pickle.Unpickler, pickle.loads
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", load_value)
        patch.setattr(pickle, "Unpickler", forbid)
        patch.setattr(pickle, "loads", forbid)
        patch.setattr(pickle, "load", forbid)
        load_into(into, reader=reader)
    assert len(allowed) == 2 and into["lists"][2][1] == "x"


def test_pickle_needs_the_option_on_both_sides(bucket):
    state = {"odd": Odd(), "w": torch.ones(1)}
    with pytest.raises(CheckpointException) as raised:
        save(state)
    assert isinstance(cause(raised), UnsupportedTypeError) and "odd" in str(cause(raised))
    assert committed(bucket) == []
    save(state, writer=ObjckptWriter(URL, options=SaveOptions(pickle=True)))
    with pytest.raises(CheckpointException) as raised:
        load_into({"odd": None, "w": torch.zeros(1)})
    assert isinstance(cause(raised), UsageError) and "odd" in str(cause(raised)) and "pickle=True" in str(cause(raised))
    assert load_into({"odd": None, "w": torch.zeros(1)}, reader=ObjckptReader(URL, pickle=True))["odd"] == Odd()


class Odd:
    def __eq__(self, other):
        return type(other) is Odd

    __hash__ = None


# ---- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["put_pieces", "create", "part", "complete", "put_if_absent"])
def test_a_write_error_reaches_the_caller_and_nothing_is_committed(bucket, operation):
    def hook(phase, name, key):
        if phase == "before" and name == operation and armed:
            raise ConnectError("the store is away")

    big = {"w": torch.randn(5 << 19)}
    writer = ObjckptWriter(URL, options=SaveOptions(part_bytes=8 << 20), store=StoreOptions(retry_deadline_s=0.2))
    armed = False
    bucket.hook = hook
    save(big, 1, writer=writer)
    armed = True
    with pytest.raises(CheckpointException) as raised:
        save(big, 2, writer=writer)
    assert isinstance(cause(raised), ConnectError) and "the store is away" in str(cause(raised))
    assert committed(bucket) == [1] and not bucket.uploads
    armed = False
    save(big, 3, writer=writer)  # the same object goes on
    assert committed(bucket) == [1, 3]
    assert_same(whole(bucket), big)


class Drops(DefaultSavePlanner):
    """Forgets one item between the plan that all agreed on and the writing."""

    def finish_plan(self, new_plan):
        plan = super().finish_plan(new_plan)
        return SavePlan(plan.items[:-1], plan.storage_data, plan.planner_data)


@pytest.mark.parametrize("state", [{"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(2), "b": 7}])
def test_a_planned_item_that_was_not_written_is_an_error(bucket, state):
    with pytest.raises(CheckpointException) as raised:
        save(state, planner=Drops())
    error = cause(raised)
    assert isinstance(error, SaveError) and "1 planned items" in str(error) and " b" in str(error)
    assert committed(bucket) == []


class Cuts(ObjckptWriter):
    """Loses some results of a rank on their way, as torch does with those of a thread that failed."""

    keep: slice

    def write_data(self, plan, planner):
        done: Future[list] = Future()
        done.set_result(super().write_data(plan, planner).value()[self.keep])
        return done


@pytest.mark.parametrize("keep", [slice(1, None), slice(None, -1), slice(0, 0)])
def test_results_that_are_cut_are_an_error(bucket, keep):
    writer = Cuts(URL)
    writer.keep = keep
    with pytest.raises(CheckpointException) as raised:
        save({"a": torch.ones(2), "b": 7}, writer=writer)
    assert isinstance(cause(raised), SaveError)
    assert committed(bucket) == []
    writer.keep = slice(None)
    save({"a": torch.ones(2), "b": 7}, writer=writer)
    assert committed(bucket) == [1]


@pytest.mark.parametrize("bad", [object(), torch.ones(3).to_sparse(), {torch.ones(1)}])
def test_a_value_that_is_not_stored_names_its_place(bucket, bad):
    with pytest.raises(CheckpointException) as raised:
        save({"part": {"bad": bad}, "w": torch.ones(2)})
    assert isinstance(cause(raised), UnsupportedTypeError) and "bad" in str(cause(raised))
    assert committed(bucket) == []


def test_a_planner_without_objects_is_refused(bucket):
    class Minimal(SavePlanner):
        """All that the interface asks for."""

        def __init__(self):
            self.inner = DefaultSavePlanner()

        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

        def create_local_plan(self):
            return self.inner.create_local_plan()

        def create_global_plan(self, all_plans):
            return self.inner.create_global_plan(all_plans)

        def finish_plan(self, new_plan):
            return self.inner.finish_plan(new_plan)

        def resolve_data(self, write_item):
            return self.inner.resolve_data(write_item)

    with pytest.raises(CheckpointException) as raised:
        save({"n": 1, "w": torch.ones(2)}, planner=Minimal())
    assert isinstance(cause(raised), UnsupportedTypeError) and "Minimal" in str(cause(raised))
    assert committed(bucket) == []
    save({"w": torch.ones(2)}, planner=Minimal())  # without values it will do
    assert committed(bucket) == [1]


def test_a_piece_that_is_not_what_was_planned_is_refused(bucket):
    """As of a strided shard, whose rows do not lie together: DCP plans one box for it."""

    class Odd(DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item)[1:]

    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.ones(4)}, planner=Odd())
    assert isinstance(cause(raised), UnsupportedTypeError) and "(4,)" in str(cause(raised))
    assert committed(bucket) == []


@pytest.mark.parametrize("bad", ["", "latest", "step-", "10/latest"])
def test_an_id_without_a_step_is_refused(bucket, bad):
    with pytest.raises(UsageError, match="must be a step"):
        dcp.save({"n": 1}, checkpoint_id=bad, storage_writer=ObjckptWriter(URL), no_dist=True)
    with pytest.raises(UsageError, match="must be a step"):
        dcp.load({"n": 1}, checkpoint_id=bad, storage_reader=ObjckptReader(URL), no_dist=True)
    assert not ObjckptWriter.validate_checkpoint_id(bad) and not ObjckptReader.validate_checkpoint_id(bad)
    assert bucket.objects == {}


@pytest.mark.parametrize(
    ("name", "step"), [("7", 7), ("out/step-0012", 12), ("step_3/", 3), (Path("a/9"), 9), (5, 5), ("a1/b2", 2)]
)
def test_the_step_of_an_id(name, step):
    assert step_of(name) == step
    assert ObjckptWriter.validate_checkpoint_id(name) and ObjckptReader.validate_checkpoint_id(name)


def test_no_id_at_all_is_refused_by_the_writer_and_the_newest_for_the_reader(bucket):
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"n": 1}, storage_writer=ObjckptWriter(URL), no_dist=True)
    assert isinstance(cause(raised), UsageError) and "checkpoint_id" in str(cause(raised))
    for step in (4, 9):
        save({"n": step}, step)
    into = {"n": 0}
    dcp.load(into, storage_reader=ObjckptReader(URL), no_dist=True)
    assert into["n"] == 9


def test_an_id_is_good_for_one_save(bucket):
    """DCP calls reset() only when it has an id: the one of the last save must not serve again."""
    writer = ObjckptWriter(URL)
    save({"n": 1}, 4, writer=writer)
    with pytest.raises(CheckpointException):
        dcp.save({"n": 2}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException):
        save({"n": object()}, 5, writer=writer)
    with pytest.raises(CheckpointException):
        dcp.save({"n": 2}, storage_writer=writer, no_dist=True)
    assert committed(bucket) == [4]


def test_no_collectives_is_refused(bucket):
    with pytest.raises(UsageError, match="use_collectives=False"):
        dcp.save({"n": 1}, checkpoint_id="1", storage_writer=ObjckptWriter(URL), no_dist=True, use_collectives=False)
    assert bucket.objects == {}


def test_what_reading_the_metadata_meets_is_in_the_message(bucket):
    with pytest.raises(
        CheckpointException, match="metadata read failed: step 1 is not committed under s3://bucket/run1"
    ):
        load_into({"n": 1})
    save({"n": 1})
    with pytest.raises(CheckpointException, match="step 99 is not committed"):
        load_into({"n": 1}, 99)

    def hook(phase, name, key):
        raise ConnectError("NoSuchBucket: there is no bucket of this name")

    bucket.hook = hook
    with pytest.raises(CheckpointException, match="NoSuchBucket: there is no bucket"):
        load_into({"n": 1})


def test_damage_is_found(bucket):
    save({"w": torch.randn(1000)})
    key = next(key for key in bucket.objects if key.endswith(".pack"))
    data = bytearray(bucket.objects[key][0])
    data[17] ^= 1
    bucket.store(key, bytes(data))
    with pytest.raises(CheckpointException, match=r"w: bytes .* are not what was written"):
        load_into({"w": torch.zeros(1000)})


def test_an_unacceptable_url_is_told_at_once():
    with pytest.raises(UsageError):
        ObjckptWriter("ftp://x/y")
    with pytest.raises(UsageError):
        ObjckptReader("ftp://x/y")


# ---- one object, many saves ------------------------------------------------------------------------------------------


def test_one_writer_many_saves_one_epoch(bucket):
    writer, reader = ObjckptWriter(URL), ObjckptReader(URL)
    for step in (1, 2, 3):
        save({"w": torch.full((3,), float(step)), "n": step}, step, writer=writer)
    log = read_log(MemoryStore(bucket, URL))
    assert [(c.step, c.epoch) for c in log.checkpoints] == [(1, 1), (2, 1), (3, 1)]
    assert [c.parent for c in log.checkpoints] == [None, log.at(1).seq, log.at(2).seq]
    for step in (2, 1, 3):
        into = load_into({"w": torch.zeros(3), "n": 0}, step, reader=reader)
        assert into["w"].sum() == 3 * step and into["n"] == step


def test_a_writer_that_was_replaced_cannot_commit(bucket):
    first, second = ObjckptWriter(URL), ObjckptWriter(URL)
    save({"n": 1}, 1, writer=first)
    save({"n": 2}, 2, writer=second)
    with pytest.raises(CheckpointException) as raised:
        save({"n": 3}, 3, writer=first)
    assert type(cause(raised)).__name__ == "WriterFencedError"
    assert committed(bucket) == [1, 2]


def test_the_writer_pickles_between_saves(bucket):
    """`async_save` by process sends it over, a fresh copy for each save."""
    writer = ObjckptWriter(URL, store=StoreOptions(connections=3), options=SaveOptions(compression="none"))
    save({"n": 1}, 1, writer=writer)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.store_options == writer.store_options and copy.options == writer.options
    save({"n": 2}, 2, writer=copy)
    save({"n": 3}, 3, writer=writer)
    assert committed(bucket) == [1, 2, 3]


def test_async_save_by_thread(bucket, monkeypatch):
    writer = ObjckptWriter(URL)
    tensor = torch.ones(1000)
    future = dcp.async_save({"w": tensor, "n": 1}, checkpoint_id="x/step-11", storage_writer=writer, no_dist=True)
    tensor.zero_()  # what was staged is saved
    future.result(20)
    assert committed(bucket) == [11]
    assert whole(bucket)["w"].sum() == 1000
    future = dcp.async_save({"n": object()}, checkpoint_id="12", storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException) as raised:
        future.result(20)
    assert isinstance(cause(raised), UnsupportedTypeError)
    assert committed(bucket) == [11]


@pytest.fixture
def plan_cache(monkeypatch):
    """What torch keeps of plans, in the class, empty."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached")]:
        monkeypatch.setattr(SavePlanner, name, {})


@pytest.mark.usefixtures("plan_cache")
@pytest.mark.parametrize("copied", [False, True])
def test_plans_that_torch_keeps_over_saves(bucket, copied):
    """With plan caching DCP sends plans without items, and a rank takes those of the save before, whose packs have other
    names: those of a checkpoint that is there.
    """
    state = {"w": torch.ones(3)}
    writer = ObjckptWriter(URL)
    for step in (1, 2, 3, 4):
        state["w"] = torch.full((3,), float(step))
        if step == 4:
            state["more"] = torch.full((2,), 4.0)
        # by process each save has a copy of its own
        used = pickle.loads(pickle.dumps(writer)) if copied else writer
        save(state, step, writer=used, planner=DefaultSavePlanner(enable_plan_caching=True))
    assert committed(bucket) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        found = whole(bucket, step)
        assert found["w"].sum() == 3 * step and ("more" in found) == (step == 4)


@pytest.mark.usefixtures("plan_cache")
def test_plans_of_another_writer_are_refused(bucket):
    save({"w": torch.ones(3)}, 1, planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.zeros(3)}, 2, planner=DefaultSavePlanner(enable_plan_caching=True))
    assert isinstance(cause(raised), UsageError) and "one ObjckptWriter for all saves" in str(cause(raised))
    assert committed(bucket) == [1] and whole(bucket)["w"].sum() == 3


@pytest.mark.usefixtures("plan_cache")
def test_plans_that_changed_in_between_are_refused(bucket, tmp_path):
    """Saves elsewhere move torch's cache on; what the writer remembers is older."""
    writer = ObjckptWriter(URL)
    state = {"w": torch.ones(3)}
    save(state, 1, writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
    state["more"] = torch.ones(2)
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(tmp_path),
        planner=DefaultSavePlanner(enable_plan_caching=True),
        no_dist=True,
    )
    with pytest.raises(CheckpointException) as raised:
        save(state, 2, writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
    assert isinstance(cause(raised), SaveError) and "more" in str(cause(raised))
    assert committed(bucket) == [1] and whole(bucket)["w"].sum() == 3


def test_a_plan_of_another_save_writes_nothing(bucket):
    kept = []

    class Stale(DefaultSavePlanner):
        """Writes by the first plan it was given, for ever."""

        def finish_plan(self, new_plan):
            kept.append(new_plan)
            return super().finish_plan(kept[0])

    writer = ObjckptWriter(URL)
    save({"w": torch.ones(3)}, 1, writer=writer, planner=Stale())
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.zeros(3)}, 2, writer=writer, planner=Stale())
    assert isinstance(cause(raised), SaveError) and "another save" in str(cause(raised))
    assert committed(bucket) == [1] and whole(bucket)["w"].sum() == 3


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_works_on_it(bucket, capsys):
    def cli(*arguments):
        code = run(arguments)
        return code, "".join(capsys.readouterr())

    writer = ObjckptWriter(URL)
    for step in (1, 2):
        save({"model": {"w": torch.randn(50)}, "n": step, "list": [torch.ones(2), 1]}, step, writer=writer)
    code, out = cli("ls", URL)
    assert code == 0 and " 1" in out and " 2" in out
    code, out = cli("show", URL)
    assert code == 0 and "model/w" in out
    code, out = cli("verify", URL)
    assert code == 0, out
    code, out = cli("rm", URL, "1", "--yes")
    assert code == 0, out
    assert committed(bucket) == [2]
    code, out = cli("gc", URL, "--grace", "0s")
    assert code == 0, out
    assert {key.split("/")[2] for key in bucket.objects if "/data/" in key} == {
        read_log(MemoryStore(bucket, URL)).newest().attempt
    }
    assert whole(bucket)["n"] == 2
