"""The index round-trips, and every relation between its fields is checked on reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objckpt.errors import FormatError
from objckpt.format import keys, values, wire
from objckpt.format.index import Index
from objckpt.format.tables import ChunkTable, ShardEntry, TensorEntry
from objckpt.geometry import Layout

ATTEMPT = keys.attempt(7, "0" * 26, 1)


def make(**changes: object) -> Index:
    shard = ShardEntry(("model", "w"), "float32", (4, 4), (0, 0), (4, 4), 2**64 - 1, 0, 2)
    index = Index(
        step=7,
        attempt=ATTEMPT,
        rank=0,
        world_size=1,
        packs=[(keys.pack(ATTEMPT, 0, 0), 64)],
        shards=[shard, replace(shard, path=("e",), shape=(0, 4), first_chunk=2, chunk_count=0)],
        chunks=ChunkTable.from_rows([(0, 0, 32, 32, 0, 1), (0, 32, 32, 32, 0, 2**64 - 1)]),
        codecs=["raw", "zstd"],
        tree=values.pack({}),
    )
    for name, value in changes.items():
        setattr(index, name, value)
    return index


def test_round_trip() -> None:
    index = make()
    back = Index.decode(index.encode())
    assert back.shards == index.shards and back.packs == index.packs and back.tree == index.tree
    assert back.chunks.encode() == index.chunks.encode()
    assert back.shards[0].fqn == "model/w" and back.shards[0].nbytes == 64


def shard(**changes: object) -> Index:
    return make(shards=[replace(make().shards[0], **changes)])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (shard(shape=(4, 3)), "chunks hold 64 bytes"),
        (shard(shape=(5, 4)), "leaves the global shape"),
        (shard(offset=(1, 0)), "leaves the global shape"),
        (shard(shape=(2**40, 2**40), global_shape=(2**40, 2**40)), "chunks hold"),
        (shard(shape=(-4, -4)), "leaves the global shape"),
        (shard(offset=(2**63 - 1, 0)), "leaves the global shape"),
        (shard(global_shape=(-4, 4)), "negative"),
        (shard(chunk_count=3), "chunks are missing"),
        (shard(path=()), "no path"),
        (shard(path=("x" * 5000,)), "too long"),
        (make(packs=[("../../etc/passwd", 64)]), "pack list"),
        (make(packs=[(keys.pack(ATTEMPT, 0, 0), 63)]), "beyond its pack"),
        (make(packs=[]), "unknown pack"),
        (make(codecs=[]), "unknown codec"),
        (make(rank=1), "rank"),
        (make(attempt="x"), "attempt"),
        (make(shards=[make().shards[0]] * 2), "twice"),
    ],
)
def test_what_does_not_hold_together_is_refused(index: Index, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Index.decode(index.encode())


def test_versions_and_trailing_bytes() -> None:
    data = make().encode()
    with pytest.raises(FormatError, match="version 2"):
        Index.decode(data[:8] + b"\0\2" + data[10:])
    for bad in (data + b"\0", data[:-1], b"PK" + data[2:], data[:9], b""):
        with pytest.raises(FormatError):
            Index.decode(bad)


@given(st.data())
def test_a_flipped_byte_is_never_another_exception(data: st.DataObject) -> None:
    good = bytearray(make().encode())
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    try:
        Index.decode(bytes(good))
    except FormatError:
        pass


@pytest.mark.filterwarnings("error")
def test_an_empty_shard_of_an_absurd_shape_has_no_bytes() -> None:
    shape = (2**62,) * 20 + (0,)
    shards = [ShardEntry(("w",), "uint8", shape, (0,) * 21, shape, 0, 0, 0)]
    back = Index.decode(make(shards=shards, chunks=ChunkTable.from_rows([])).encode())
    assert back.table.nbytes().tolist() == [0]


def test_offsets_do_not_wrap() -> None:
    chunks = ChunkTable.from_rows([(0, 2**64 - 16, 64, 64, 0, 1)])
    with pytest.raises(FormatError):
        Index.decode(make(chunks=chunks, shards=[]).encode())
    assert (np.array([2**64 - 16], np.uint64) + np.uint64(64))[0] == 48  # the sum alone would have passed


def test_unknown_fields_are_ignored() -> None:
    body = wire.unseal(wire.MAGIC_INDEX, 1, make().encode(), "x") | {"later": 1}
    assert Index.decode(wire.seal(wire.MAGIC_INDEX, 1, body)).step == 7


LAYOUT = Layout((0, 1, 2, 3), (2, 2), (None, (0, 1)))


def test_where_tensors_are_is_kept_and_known_tables_are_shared() -> None:
    known = [TensorEntry(("model", "w"), "float32", (4, 4), LAYOUT, 1), TensorEntry(("far",), "int8", (9,), LAYOUT)]
    data = make(tensors=known).encode()
    seen: dict[object, object] = {}
    first, second = (Index.decode(data, "index", seen) for _ in range(2))
    assert list(first.tensors)[:2] == known and [entry.fqn for entry in first.tensors] == ["model/w", "far", "e"]
    assert first.tensors is second.tensors and first.replicated is second.replicated
    assert first.encode() == data


def changed(**fields: object) -> bytes:
    body = wire.unseal(wire.MAGIC_INDEX, 1, make().encode(), "x")
    return wire.seal(wire.MAGIC_INDEX, 1, body | fields)


def tensors(layouts: list[object], *row: object) -> bytes:
    default = (values.pack(("e",)), "int8", [4], 0, 0)
    return wire.pack({"layouts": layouts, "tensors": [[*row, *default[len(row) :]]]})


RANKS = np.arange(4, dtype="<u4").tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(tensors=tensors([], values.pack(("e",)), "float99")), "unknown dtype"),
        (changed(tensors=tensors([], values.pack(("e",)), "int8", [4], 0)), "malformed layout"),
        (changed(tensors=tensors([[RANKS, [2, 2], [None, [1, 1]]]])), "does not fit its shape"),
        (changed(tensors=tensors([[RANKS, [4], [None]]], values.pack(("e",)), "int8", [4], 0, 4)), "does not fit"),
        (changed(tensors=tensors([[RANKS, [2, 3], [None, [0, 1]]]])), "malformed layout"),
        (changed(tensors=tensors([[RANKS[:-1], [4], [None]]])), "malformed layout"),
        (changed(tensors=tensors([[RANKS, [4], [[0, 2**40]]]])), "malformed layout"),
        (changed(tensors=tensors([[RANKS, [4], [[0, 0]]]])), "malformed layout"),
        (changed(tensors=tensors([[np.zeros(100_000, "<u4").tobytes(), [10**5], [[0, 1000]]]])), "malformed layout"),
        (changed(tensors=tensors([], values.pack(([10**6000],)))), "no path"),  # str() of it would raise
        (changed(tensors=tensors([], values.pack(([],) * 101))), "no path"),  # unhashable
        (changed(tensors=tensors([], values.pack((("a", {}),)))), "no path"),
        (changed(tensors=b"\x90"), "malformed table"),
        (changed(shard_count=1), "shard table"),
        (changed(shard_count=2**32), "shard table"),
        (changed(tensors=tensors([], values.pack(("model", "w")), "float32", [4, 4], None)), "unknown tensor"),
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Index.decode(data)


def test_what_is_known_of_one_field_is_not_taken_for_another() -> None:
    seen: dict[object, object] = {}
    Index.decode(make(replicated=wire.pack([["w", 1]])).encode(), "first", seen)
    for data in list(seen):
        with pytest.raises(FormatError):
            Index.decode(changed(tensors=data[1] if data[0] == "replicated" else b""), "second", seen)  # type: ignore[index]
