"""Opening checks the chain of digests and the shards' geometry; verify() finds every wrong byte without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.written import ATTEMPT, Piece, damage, only_pack, write, write_ranks, write_shards

from objckpt.errors import AccessError, FormatError, IntegrityError, UsageError
from objckpt.events import ignore
from objckpt.format import codecs, keys
from objckpt.format.values import TensorLeaf, ViewSpec
from objckpt.geometry import Box, whole
from objckpt.group import Group
from objckpt.restore import lazy, load, open_checkpoint, restore_into, verify
from objckpt.resume import restore_together


def piece(offset: int, count: int, *, value: int = 0, total: int = 8, dtype: str = "uint8") -> Piece:
    return (("w",), dtype, (total,), (offset,), (count,), bytes([value]) * count)


TREE = {"w": TensorLeaf("w")}


def test_an_index_that_is_not_the_committed_one() -> None:
    store, commit = write_ranks([[piece(0, 8)]], TREE, opened=False)
    key = commit.index_key(0)
    damage(store, key, 40)
    with pytest.raises(IntegrityError, match="not those that were committed") as caught:
        open_checkpoint(store, commit)
    assert caught.value.context["key"] == key
    store.delete([key])
    with pytest.raises(IntegrityError, match=r"is missing .* removed meanwhile"):
        open_checkpoint(store, commit)
    longer = replace(commit, ranks=[(commit.ranks[0][0], commit.ranks[0][1] - 1)])
    store, commit = write_ranks([[piece(0, 8)]], TREE, opened=False)
    with pytest.raises(IntegrityError):
        open_checkpoint(store, longer)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([[piece(0, 4)], [piece(5, 3)]], "do not tile"),
        ([[piece(0, 5)], [piece(4, 3)]], "overlap"),
        ([[piece(0, 8)], [piece(0, 8), piece(4, 4)]], "do not tile"),
        ([[piece(0, 8)], [piece(0, 8, value=1)]], "different bytes"),
        ([[piece(0, 4)], [piece(4, 4, dtype="bool")]], "disagree"),
        ([[piece(0, 4)], [piece(4, 4, total=9)]], "disagree"),
        ([[]], "not stored"),
    ],
)
def test_shards_must_tile_their_tensor(ranks: list[list[Piece]], why: str) -> None:
    _, commit = store_and_commit = write_ranks(ranks, TREE, opened=False)
    with pytest.raises(FormatError, match=why):
        open_checkpoint(*store_and_commit)
    assert commit.step == 7


@pytest.mark.parametrize("part", [5, [1]])
def test_what_belongs_to_ranks_must_be_a_mapping_of_them(part: Any) -> None:
    with pytest.raises(FormatError, match="per_rank is no mapping"):
        write_ranks([[], []], {"per_rank": part})
    store, checkpoint = write_ranks([[]], {"per_rank": part})  # of one rank it is a name like any other
    report = restore_together(
        store, Group(), checkpoint.commit, {}, {"x": 1},
        strict=False, only=None, cast=False, pickle=False, sharing="off", progress=ignore,
    )  # fmt: skip
    assert report.missing == ["per_rank/%(0)"]


def test_copies_of_a_box_and_empty_shards_are_fine() -> None:
    store, checkpoint = write_ranks([[piece(0, 8, value=3)], [piece(0, 8, value=3)], [piece(8, 0)]], TREE)
    assert load(store, checkpoint)["w"].tolist() == [3] * 8
    assert [op for op, _ in store.bucket.operations] == ["get_into"]


@pytest.mark.parametrize("view", [ViewSpec("uint8", 4, (5,), (1,)), ViewSpec("int16", 1, (2,), (1,))])
def test_a_view_must_lie_in_its_tensor(view: ViewSpec) -> None:
    with pytest.raises(FormatError, match="view leaves w"):
        write_ranks([[piece(0, 8)]], {"v": TensorLeaf("w", view=view)})


def test_verify_finds_nothing_and_then_everything() -> None:
    state = {f"t{i}": torch.rand(3000) for i in range(10)}
    store, checkpoint = write(state, pack_bytes=40_000)
    told: list[tuple[str, int, int]] = []
    assert verify(store, checkpoint, progress=lambda *args: told.append(args)) == []
    assert told[-1] == ("verify", 120_000, 120_000)
    (bad, _), (gone, _), (short, _) = checkpoint.indexes[0].packs[:3]
    damage(store, bad, 13_000)
    store.delete([gone])
    full = f"run/{short}"
    store.bucket.objects[full] = (store.bucket.objects[full][0][:-1], 0.0)
    problems = verify(store, checkpoint)
    assert [p.kind for p in problems if p.key == bad] == ["corrupt"]
    assert {p.kind for p in problems if p.key == gone} == {"missing"}
    assert [p.kind for p in problems if p.key == short] == ["corrupt"]
    assert all(p.fqn in p.message and p.key in p.message for p in problems)


def test_verify_checks_the_digest_of_the_shard() -> None:
    store, checkpoint = write({"w": torch.rand(3000)})
    index = checkpoint.indexes[0]
    index.shards = [replace(index.shards[0], digest=12345)]
    assert "digest of its raw bytes" in verify(store, checkpoint)[0].message


def test_verify_does_not_call_a_refusal_corruption() -> None:
    store, checkpoint = write({"w": torch.rand(3000)})

    def refuse(phase: str, operation: str, key: str) -> None:
        raise AccessError("403")

    store.bucket.hook = refuse
    with pytest.raises(AccessError):
        verify(store, checkpoint)


def test_encoded_chunks() -> None:
    state: dict[str, Any] = {"w": torch.arange(30_000.0).reshape(100, 300), "i": torch.arange(9)}
    store, checkpoint = write(state, codec="zstd")
    into = {"w": torch.zeros(300, 100).t(), "i": torch.zeros(9, dtype=torch.int64)}
    restore_into(store, checkpoint, into)
    assert torch.equal(into["w"], state["w"]) and torch.equal(load(store, checkpoint)["w"], state["w"])
    assert torch.equal(lazy(store, checkpoint)["w"][7:90:3, -2], state["w"][7:90:3, -2])
    assert any(chunk for chunk in checkpoint.indexes[0].chunks.codec), "nothing was compressed"
    assert verify(store, checkpoint) == []


def test_an_encoded_chunk_that_holds_other_bytes_than_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    store, checkpoint = write({"w": torch.zeros(30_000)}, codec="zstd")
    codec = "zstd"
    whole_chunk = codecs.encode(codec, memoryview(bytes(4096)), 4)
    assert whole_chunk is not None
    monkeypatch.setattr(codecs, "encode", lambda name, raw, itemsize: bytes(whole_chunk)[:-3])
    store, checkpoint = write({"w": torch.zeros(30_000)}, codec=codec)
    with pytest.raises(IntegrityError, match=r"step 7: w: bytes \[") as caught:
        load(store, checkpoint)
    assert caught.value.context["fqn"] == "w"
    assert verify(store, checkpoint)[0].kind == "corrupt"


def test_lazy_reads_only_the_chunks_it_needs() -> None:
    array = np.arange(1024 * 1024, dtype="float32").reshape(1024, 1024)
    store, checkpoint = write_shards({"w": (array, [whole(array.shape)])}, chunk_bytes=4096)
    tensor = lazy(store, checkpoint)["w"]
    assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.nbytes, len(tensor)) == (
        (1024, 1024),
        "float32",
        2,
        4 << 20,
        1024,
    )
    assert store.bucket.operations == []
    assert np.array_equal(tensor[::256, 5:9].numpy(), array[::256, 5:9])
    assert len(store.bucket.operations) == 4  # a row is a chunk; the gaps are too wide to read through
    assert tensor[-1, -1].item() == array[-1, -1] and tensor[...].shape == (1024, 1024)
    for wrong in (None, [1, 2], True, "a", np.array([1])):
        with pytest.raises((UsageError, TypeError)):
            tensor[wrong]
    for beyond in (1024, (0, -1025), (0, 0, 0), (..., ...)):
        with pytest.raises(IndexError):
            tensor[beyond]


def test_lazy_values_and_views() -> None:
    w = torch.arange(12.0).reshape(3, 4)
    store, checkpoint = write({"w": w, "v": w[1:, 1:3], "n": 5, "e": [], "d": torch.float16, "b": {"c": "x"}})
    found = lazy(store, checkpoint)
    assert list(found) == ["w", "v", "n", "e", "d", "b/c"] and found["n"] == 5 and found["b/c"] == "x"
    assert found["d"] is torch.float16 and found["e"] == [] and "w" in found and "x" not in found
    assert torch.equal(found["v"].load(), w[1:, 1:3]) and torch.equal(found["v"][::-1, 0], w[1:, 1:3][:, 0].flip(0))
    assert found["v"].numpy().shape == (2, 2)
    with pytest.raises(KeyError):
        found["x"]


def test_pickled_values_are_refused_before_anything_is_touched() -> None:
    store, checkpoint = write({"w": torch.ones(2), "p": slice(1, 2)}, pickle=True)
    into: dict[str, Any] = {"w": torch.zeros(2), "p": None}
    with pytest.raises(UsageError, match=r"p: .*pickle=True"):
        restore_into(store, checkpoint, into)
    assert not into["w"].any()
    restore_into(store, checkpoint, into, pickle=True)
    assert into["p"] == slice(1, 2) and into["w"].all()
    assert lazy(store, checkpoint, pickle=True)["p"] == slice(1, 2)


def test_no_torch_without_tensors() -> None:
    code = "import sys, objckpt.restore; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_foreign_packs_must_be_named_by_the_commit() -> None:
    store, commit = write_ranks([[piece(0, 8)]], TREE, opened=False)
    other = keys.attempt(6, "01ARZ3NDEKTSV4RRFFQ69G5FAV", 0)
    assert only_pack(store).startswith(keys.attempt_prefix(ATTEMPT)) and other != ATTEMPT
    assert open_checkpoint(store, replace(commit, foreign_packs=[keys.pack(other, 0, 0)])).tensors["w"].shape == (8,)
    assert Box((0,), (8,)) == open_checkpoint(store, commit).tensors["w"].shards[0].entry.box
