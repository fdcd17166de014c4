"""`objckpt diff`: what it calls the same, different, and not comparable; it downloads no tensor."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from support.handmade import put_checkpoint
from support.memory_store import MemoryStore
from support.written import write, write_ranks, write_shards

from objckpt.cli.diff import compare
from objckpt.format import keys
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box

URL = "s3://bucket/run1"
ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


def differences(a, b):
    """FQN → change and what, for two states."""
    return {row["fqn"]: (row["change"], *row["what"]) for row in compare(write(a)[1], write(b)[1])}


def layouts(array, first, second, other=None):
    """What is said of one array cut into the boxes `first`, and of it, or of `other`, cut into `second`."""
    cut = ([Box(*box) for box in boxes] for boxes in (first, second))
    a = write_shards({"w": (array, next(cut))}, ranks=2)[1]
    b = write_shards({"w": (array if other is None else other, next(cut))}, ranks=2)[1]
    return [(row["change"], *row["what"]) for row in compare(a, b)]


def test_nothing_differs():
    state = {"w": torch.arange(6.0), "n": {"epoch": 3, "nan": float("nan"), "e": [], "s": {1, 2}}, "a": np.arange(3)}
    assert differences(state, state) == {}


def test_tensors():
    a = {
        "same": torch.ones(3),
        "bytes": torch.ones(3),
        "shape": torch.ones(6),
        "dtype": torch.ones(3),
        "gone": torch.ones(1),
    }
    b = {"same": torch.ones(3), "bytes": torch.zeros(3), "shape": torch.ones(2, 3), "dtype": torch.ones(3).int()}
    assert differences(a, b | {"new": torch.ones(1), "kind": 1}) == {
        "bytes": ("changed", "bytes"),
        "shape": ("changed", "shape"),
        "dtype": ("changed", "dtype"),
        "gone": ("removed",),
        "new": ("added",),
        "kind": ("added",),
    }


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), ((1,), [1]), ([1, 2], [1]), (1, torch.ones(1)), ({}, []), ([], 0)],
)
def test_values_of_another_type_or_length_are_different(a, b):
    assert "v" in {fqn.split("/")[0] for fqn in differences({"v": a}, {"v": b})}
    assert differences({"v": a}, {"v": a}) == {} == differences({"v": b}, {"v": b})


def test_containers():
    assert differences({"c": {"x": 1}}, {"c": OrderedDict(x=1)}) == {"c": ("changed", "kind")}
    assert differences({"c": {}}, {}) == {"c": ("removed",)}
    assert differences({"c": {}}, {"c": {"x": {}}}) == {"c/x": ("added",)}
    assert differences({"c": {"x": 1}}, {"c": 1}) == {"c": ("changed", "kind"), "c/x": ("removed",)}
    one, two = torch.nn.Linear(1, 1).state_dict(), torch.nn.Linear(1, 1).state_dict()
    two.update(one)
    two._metadata[""]["version"] = 9
    assert differences({"m": one}, {"m": two}) == {"m": ("changed", "metadata")}


def test_tied_tensors_are_compared_like_others():
    w = torch.arange(4.0)
    assert differences({"a": w, "b": w}, {"a": w, "b": w.clone()}) == {}
    assert differences({"a": w, "b": w}, {"a": w, "b": w + 1}) == {"b": ("changed", "bytes")}


def test_views_of_shared_memory():
    w, other = torch.arange(64, dtype=torch.uint8), torch.arange(64, dtype=torch.uint8) + 1
    state = {"a": w, "b": w.view(torch.float32)}
    assert differences(state, state) == {}
    assert differences(state, {"a": w, "b": w.clone().view(torch.float32)}) == {}
    part = ("not_compared", "a view of larger memory, bytes not compared")
    assert differences({"a": w, "b": w[:8]}, {"a": w, "b": w[:8]}) == {}
    assert differences({"a": w, "b": w[:8]}, {"a": w, "b": w[:8].clone()}) == {"b": part}
    assert differences({"a": w, "b": w[:8]}, {"a": other, "b": other[:8]}) == {"a": ("changed", "bytes"), "b": part}


def test_cut_by_rows_is_compared_whatever_the_layout():
    halves, thirds = [((0, 0), (3, 4)), ((3, 0), (3, 4))], [((4, 0), (2, 4)), ((0, 0), (2, 4)), ((2, 0), (2, 4))]
    whole, other = [((0, 0), (6, 4))], ROWS + np.eye(6, 4, dtype=np.float32)
    for first, second in ((halves, thirds), (thirds, whole), (whole, halves), (halves, halves)):
        assert layouts(ROWS, first, second) == []
        assert layouts(ROWS, first, second, other) == [("changed", "bytes")]


def test_cut_by_columns_is_not_compared_with_another_layout():
    columns, halves = [((0, 0), (6, 2)), ((0, 2), (6, 2))], [((0, 0), (3, 4)), ((3, 0), (3, 4))]
    said = [("not_compared", "layout differs, bytes not compared")]
    assert layouts(ROWS, columns, halves) == said
    assert layouts(ROWS, halves, columns, ROWS + 1) == said
    assert layouts(ROWS, columns, columns) == []
    assert layouts(ROWS, columns, columns[::-1], ROWS + 1) == [("changed", "bytes")]


def test_leading_dimensions_of_one_and_empty_shards():
    array = np.arange(8, dtype=np.int16).reshape(1, 4, 2)
    parts = [((0, 0, 0), (1, 1, 2)), ((0, 1, 0), (1, 0, 2)), ((0, 1, 0), (1, 3, 2))]
    assert layouts(array, parts, [((0, 0, 0), (1, 4, 2))]) == []
    assert layouts(array, parts, [((0, 0, 0), (1, 4, 2))], array + 1) == [("changed", "bytes")]


def test_one_tensor_held_twice():
    data = ROWS.tobytes()
    piece = (("w",), "float32", (6, 4), (0, 0), (6, 4), data)
    tree = {"w": TensorLeaf("w")}
    assert list(compare(write_ranks([[piece], [piece]], tree)[1], write_ranks([[piece]], tree)[1])) == []


# ---- the verb ------------------------------------------------------------------------------------------------------


def test_command(cli, bucket, store):
    put_checkpoint(store, 1, {"m": {"w": ROWS, "old": ROWS[0]}, "epoch": 1}, seq=0)
    put_checkpoint(store, 2, {"m": {"w": ROWS + 1, "new": ROWS[0]}, "epoch": 2}, seq=1)
    for info in list(store.list("data/")):
        if keys.is_pack(info.key):
            store.delete([info.key])  # it needs none
    assert cli("diff", URL, "1", "1")[:2] == (0, "step 1@0 and step 1@0: the same\n")
    assert cli("diff", URL, "2")[:2] == (0, "step 2@1 and step 2@1: the same\n")
    code, out, err = cli("diff", URL, "1")
    assert (code, err) == (1, "")
    assert [line.split() for line in out.splitlines()] == [
        ["LEAF", "IS"],
        ["~", "m/w", "float32", "6×4:", "bytes"],
        ["-", "m/old", "float32", "4"],
        ["~", "epoch", "1", "→", "2"],
        ["+", "m/new", "float32", "4"],
        ["step", "1@0", "and", "step", "2@1:", "1", "added,", "1", "removed,", "2", "changed"],
    ]
    code, out, err = cli("diff", URL, "2", "1", "--json")
    document = json.loads(out)
    assert (code, err, document["same"]) == (1, "", False)
    assert (document["a"]["step"], document["b"]["step"]) == (2, 1)
    assert document["added"] == [
        {"fqn": "m/old", "change": "added", "what": [], "a": None, "b": {"tensor": {"dtype": "float32", "shape": [4]}}}
    ]
    assert [row["fqn"] for row in document["changed"]] == ["m/w", "epoch"] and document["not_compared"] == []
    assert document["changed"][1] | {"fqn": ""} == {
        "fqn": "", "change": "changed", "what": ["value"], "a": {"value": 2}, "b": {"value": 1}
    }  # fmt: skip


def test_across_prefixes(cli, bucket, store):
    put_checkpoint(store, 1, {"w": ROWS})
    put_checkpoint(MemoryStore(bucket, "s3://bucket/run2"), 7, {"w": ROWS})
    assert cli("diff", URL, "1", "--with", "s3://bucket/run2")[:2] == (0, "step 1@0 and step 7@0: the same\n")
    assert cli("diff", URL, "1", "7")[0] == 4


def test_hostile_names_and_values(cli, store):
    evil = "x\x1b]0;owned\x07\n+ fake"
    put_checkpoint(store, 1, {evil: evil}, seq=0)
    put_checkpoint(store, 2, {evil: evil + "!"}, seq=1)
    for form in ([], ["--json"]):
        code, out, _ = cli("diff", URL, "1", *form)
        assert code == 1 and all(c.isprintable() or c == "\n" for c in out) and "\n+ fake" not in out
