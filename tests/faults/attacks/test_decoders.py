"""Hostile bytes against everything that decodes: bounded memory and time, and no other error than those that are announced."""

from __future__ import annotations

import functools
import json
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from faults.attacks import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore
from support.written import ATTEMPT, write_ranks

from objckpt import limits
from objckpt.cli.plain import short
from objckpt.errors import FormatError, IntegrityError
from objckpt.format import checksums, codecs, keys, records, values, wire
from objckpt.format.index import Index
from objckpt.format.tables import CHUNK_DTYPE, ChunkTable
from objckpt.restore import open_checkpoint, verify

ROOT = Path(__file__).resolve().parents[3]
MiB = 1 << 20
BIGINT, MAP, SET = 7, 5, 2
CPU_S = 5.0  # of one decoding; the slowest here takes a tenth of it


def in_bounds(act: Callable[[], object], limit_bytes: int) -> None:
    """Refused, with less than `limit_bytes` allocated at any time and in bounded time."""
    tracemalloc.start()
    began_s = time.process_time()
    try:
        with pytest.raises((FormatError, IntegrityError)):
            act()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, peak
    assert time.process_time() - began_s < CPU_S


def ext(code: int, body: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, body if type(body) is bytes else msgpack.packb(body))))


def in_record(meta: bytes) -> bytes:
    """A commit record with these bytes as the user's metadata."""
    body = wire.unseal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, fuzz.some_records()[0], "test")
    return wire.seal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, body | {"meta": meta})


def in_index(fields: dict[str, Any]) -> bytes:
    _, _, data = fuzz.some_checkpoints()[0]
    body = wire.unseal(wire.MAGIC_INDEX, limits.FORMAT_VERSION, data, "test")
    return wire.seal(wire.MAGIC_INDEX, limits.FORMAT_VERSION, body | fields)


# ---- fuzzing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_mutations_of_valid_objects(seed: int) -> None:
    """In a process with a limit on its memory. To look for more: `python -m faults.attacks.fuzz SEED 1000000`."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "faults.attacks.fuzz", str(seed), "12000"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == {}, json.dumps(found["failures"], indent=1)
    assert found["slowest_s"][0] < CPU_S and found["grown_bytes"] < 256 * MiB, found
    # The mutations are no mere noise: some of each kind get through, and all the code behind is reached.
    assert all(found["readable"].get(kind, 0) > 5 for kind in ("record", "value", "index", "checkpoint", "chunk")), (
        found
    )


def test_the_fuzzer_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(fuzz, "REFUSALS", (IntegrityError,))
    found = fuzz.run(3, 300)
    assert any(kind.startswith("record: FormatError at ") for kind in found["failures"]), found


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", wire.MAGIC_RECORD + b"\0\1", wire.MAGIC_INDEX + b"\0\1"]))
def test_any_bytes(data: bytes, head: bytes) -> None:
    for decode in (
        lambda: records.decode(head + data, 1),
        lambda: Index.decode(head + data),
        lambda: values.unpack(head + data, "x"),
        lambda: codecs.decode("zstd", memoryview(head + data), memoryview(bytearray(64))),
    ):
        try:
            decode()
        except (FormatError, IntegrityError):
            pass


plain_msgpack = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
        | st.tuples(st.integers(0, 22), inner).map(lambda pair: msgpack.ExtType(pair[0], msgpack.packb(pair[1])))
    ),
    max_leaves=12,
)


@settings(max_examples=600, deadline=None)
@given(plain_msgpack)
def test_any_tree_of_extensions(tree: Any) -> None:
    try:
        value = values.unpack(msgpack.packb(tree), "x")
    except FormatError:
        return
    short(value)


# ---- msgpack ---------------------------------------------------------------------------------------------------------

LIES = {
    "array of 4 G": b"\xdd\xff\xff\xff\xff",
    "map of 4 G": b"\xdf\xff\xff\xff\xff\xc0",
    "bytes of 4 GB": b"\xc6\xff\xff\xff\xff",
    "text of 4 GB": b"\xdb\xff\xff\xff\xffx",
    "ext of 4 GB": b"\xc9\xff\xff\xff\xff\x01",
    "arrays of arrays": b"\x91" * 500_000 + b"\xc0",
    "maps as keys": b"\x81" * 500_000 + b"\xc0" * 500_001,
    "arrays of 4 G each": b"\xdd\xff\xff\xff\xff" * 1000,
    "no text": b"\xa4\xff\xfe\xfd\xfc",
    "half a surrogate": b"\xa3\xed\xa0\x80",
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_lengths_that_lie(data: bytes) -> None:
    for act in (
        lambda: values.unpack(data, "x"),
        lambda: records.decode(wire.MAGIC_RECORD + b"\0\1" + data, 1),
        lambda: records.decode(in_record(data), 1),
        lambda: Index.decode(wire.MAGIC_INDEX + b"\0\1" + data),
    ):
        in_bounds(act, 8 * MiB)


@pytest.mark.parametrize("code", [*range(20), 127])
def test_nests_of_extensions(code: int) -> None:
    data = msgpack.packb(None)
    for _ in range(2000):
        data = ext(code, data)
    try:
        values.unpack(data, "x")
    except FormatError:
        pass
    else:
        assert code in (BIGINT, 18)  # big int and pickled bytes: their content is opaque
    wide = msgpack.packb([msgpack.ExtType(code, msgpack.packb([[]] * 50))] * 5000)
    began_s = time.process_time()
    try:
        values.unpack(wide, "x")
    except FormatError:
        pass
    assert time.process_time() - began_s < CPU_S


def colliding(count: int) -> list[msgpack.ExtType]:
    """Different big ints, all of hash 0."""
    return [msgpack.ExtType(BIGINT, ((2**61 - 1) * (n + 10)).to_bytes(11, "big")) for n in range(count)]


@pytest.mark.parametrize("form", ["map", "ext map", "set", "tuples"])
def test_keys_of_one_hash_are_no_hours(form: str) -> None:
    """A dict compares each of them with all before it: 100,000 took minutes, and a record has place for ten times as many."""
    many = colliding(100_000)
    if form == "map":
        data = b"\xdf" + struct.pack(">I", len(many)) + b"".join(msgpack.packb(key) + b"\xc0" for key in many)
    elif form == "ext map":
        data = ext(MAP, [[key, None] for key in many])
    elif form == "tuples":
        data = ext(MAP, [[msgpack.ExtType(1, msgpack.packb([key])), None] for key in many])
    else:
        data = ext(SET, many)
    began_s = time.process_time()
    with pytest.raises(FormatError, match="share a hash"):
        records.decode(in_record(data), 1)
    assert time.process_time() - began_s < CPU_S


def test_many_honest_keys_are_fine() -> None:
    value = dict.fromkeys(range(5000)) | {(n, "x"): 1 for n in range(3000)} | {2**70 + n: 2 for n in range(3000)}
    assert values.unpack(values.pack(value), "x") == value


def test_numbers_too_long_to_print() -> None:
    """Python prints no int of more than 4300 digits. As a value it is stored; as a key or in a path no FQN could name it."""
    number = msgpack.ExtType(BIGINT, b"\x7f" * 60_000)
    value = values.unpack(msgpack.packb(number), "x")
    assert short(value).startswith('"0x7f7f')
    for data in (
        ext(MAP, [[number, 1]]),
        ext(MAP, [[msgpack.ExtType(1, msgpack.packb([number])), 1]]),
        ext(SET, [number]),
    ):
        with pytest.raises(FormatError, match="absurd"):
            values.unpack(data, "x")
    row = [ext(1, [number]), "float32", [1], None, 0]
    with pytest.raises(FormatError, match="absurd"):
        Index.decode(in_index({"tensors": msgpack.packb({"layouts": [], "tensors": [row]})}))


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (9, []), (9, ["<f4"]), (8, []), (11, []), (11, ["2020-01-01"]), (13, [1e400]), (13, ["a"]), (6, [1, 2, 3]),
        (9, ["O", [1], b"x" * 8]), (9, ["V8", [1], b"x" * 8]), (9, ["i4,f4", [1], b"x" * 8]), (9, ["(1000000,)f8", [1], b"x" * 8]),
        (9, ["(1+)f8", [1], b"x" * 8]), (9, ["(" * 3000, [1], b"x" * 8]), (9, ["<f4", [2**62, 4], b""]),
        (9, ["<f4", [0, 2**62], b"a"]),
        (9, ["<f4", [-1], b""]), (9, ["<U1", [1], b"\xff\xff\xff\x7f"]), (9, [">U1", [1], b"\x7f\xff\xff\xff"]),
        (8, ["<U1", b"\xff\xff\xff\x7f"]), (9, ["M8[999999999999Y]", [1], b"x" * 8]), (10, 5), (10, "x" * 5000),
        (14, ["a"]), (14, ["a", True, "int8", -1, [1], [1]]), (14, ["a", True, "int8", 0, [1], [1, 1]]), (15, "nothing"),
        (17, [-1]), (17, [1] * 65), (3, 5), (4, [5]), (5, [[1]]), (5, [[[], 1]]), (5, [[1, 1], [1, 2]]), (19, [[{}, 1]]),
    ],
)  # fmt: skip
def test_malformed_extensions(code: int, body: Any) -> None:
    with pytest.raises(FormatError):
        values.unpack(ext(code, body), "x")


# ---- zstd ------------------------------------------------------------------------------------------------------------


@functools.cache
def bomb(nbytes: int, *, declared: bool, window_log: int = 17) -> bytes:
    """A frame of a few kilobytes that gives `nbytes` zeros."""
    params = zstandard.ZstdCompressionParameters(
        window_log=window_log, write_content_size=declared, compression_level=19
    )
    compressor = zstandard.ZstdCompressor(compression_params=params)
    if declared:
        return bytes(compressor.compress(bytes(nbytes)))
    stream = compressor.compressobj()
    piece = bytes(16 * MiB)
    return b"".join([*(stream.compress(piece) for _ in range(nbytes // len(piece))), stream.flush()])


def chunk(frame: bytes, planes: int = 1) -> bytes:
    return struct.pack(f"<BB{planes}I", 1, planes, *[len(frame) | 1 << 31] * planes) + frame * planes


def with_content_size(frame: bytes, nbytes: int) -> bytes:
    """A single-segment frame's header with another size of 8 bytes."""
    return frame[:4] + b"\xe0" + struct.pack("<Q", nbytes) + frame[4:]


@pytest.mark.parametrize("planes", [1, 16])
@pytest.mark.parametrize("out_bytes", [4096, MiB])
@pytest.mark.parametrize(
    "kind", ["declared", "undeclared", "wide window", "absurd size", "largest size", "two frames", "skippable"]
)
def test_zstd_bombs(kind: str, out_bytes: int, planes: int) -> None:
    if kind == "declared":
        frame = bomb(64 * MiB, declared=True)
    elif kind == "undeclared":
        frame = bomb(64 * MiB, declared=False)
    elif kind == "wide window":
        frame = bomb(64 * MiB, declared=False, window_log=27)
    elif kind in ("absurd size", "largest size"):
        frame = with_content_size(b"\x28\xb5\x2f\xfd", 2**50 if kind == "absurd size" else 2**64 - 1) + b"\x01\0\0"
    elif kind == "two frames":
        one = zstandard.ZstdCompressor().compress(bytes(out_bytes // planes))
        frame = bytes(one) * 2
    else:
        frame = b"\x50\x2a\x4d\x18" + struct.pack("<I", 2**31) + b"x" * 20
    assert len(frame) < 64 << 10
    stored, out = chunk(frame, planes), bytearray(out_bytes)
    tracemalloc.start()
    began_s = time.process_time()
    try:
        with pytest.raises(IntegrityError):
            codecs.decode("zstd", memoryview(stored), memoryview(out))
        assert tracemalloc.get_traced_memory()[1] < 2 * MiB + out_bytes
    finally:
        tracemalloc.stop()
    assert time.process_time() - began_s < CPU_S


# ---- indexes ---------------------------------------------------------------------------------------------------------


def table_of(index: Index) -> list[list[int]]:
    return [[int(getattr(index.chunks, name)[i]) for name in CHUNK_DTYPE.names or ()] for i in range(len(index.chunks))]


def opened(change: Callable[[Index, list[list[int]]], Index | None], **record: Any) -> Any:
    """A two-rank checkpoint whose first index was changed by somebody who can write digests, opened."""
    store, commit, data = fuzz.some_checkpoints()[0]
    index = Index.decode(data)
    rows = table_of(index)
    index = change(index, rows) or index
    index.chunks = ChunkTable.from_rows([tuple(row) for row in rows])  # type: ignore[misc]
    new = index.encode()
    commit = replace(commit, ranks=[(checksums.digest_hex(new), len(new)), *commit.ranks[1:]], **record)
    store.put(commit.index_key(0), new)
    return store, open_checkpoint(store, commit)


def test_the_checkpoint_as_it_was() -> None:
    store, checkpoint = opened(lambda index, rows: None)
    assert verify(store, checkpoint) == []


PACK, OFFSET, STORED, RAW, CODEC, CRC = range(6)


@pytest.mark.parametrize(
    ("column", "value"),
    [(PACK, 1), (PACK, 2**32 - 1), (OFFSET, 2**63), (OFFSET, 2**64 - 1), (OFFSET, 10**6), (STORED, 2**32 - 1),
     (STORED, 10**6), (RAW, 0), (RAW, 65), (RAW, 2**32 - 1), (CODEC, 2), (CODEC, 255)],
)  # fmt: skip
def test_chunks_out_of_range_are_refused(column: int, value: int) -> None:
    def change(index: Index, rows: list[list[int]]) -> None:
        rows[1][column] = value

    with pytest.raises(FormatError):
        opened(change)


@pytest.mark.parametrize("column", [OFFSET, STORED, CODEC, CRC])
def test_chunks_that_lie_elsewhere_are_no_values(column: int) -> None:
    """Inside its pack, and so not refused at once: overlapping, of another length or codec. The bytes tell."""

    def change(index: Index, rows: list[list[int]]) -> None:
        rows[1][column] = {OFFSET: 0, STORED: 1, CODEC: 1, CRC: 0}[column]

    store, checkpoint = opened(change)
    assert [p.kind for p in verify(store, checkpoint)] in (["corrupt"], ["unreadable"])


def test_overlapping_chunks_with_right_sums_fail_the_shards_digest() -> None:
    def change(index: Index, rows: list[list[int]]) -> None:
        rows[3] = rows[2]

    store, checkpoint = opened(change)
    assert [p.kind for p in verify(store, checkpoint)] == ["corrupt"]


OTHER = keys.attempt(7, "0" * 26, 1)


@pytest.mark.parametrize(
    "pack",
    [keys.pack(OTHER, 0, 0), "../../other/data", "data/../log/00000000000000000000.msgpack", "log/00000000000000000000.msgpack",
     f"data/{ATTEMPT}/../{OTHER}/rank-00000-0000.pack", f"/data/{ATTEMPT}/rank-00000-0000.pack", "", "s3://other/x",
     f"data/{ATTEMPT}/rank-00000-0000.pack\0", f"data/{ATTEMPT}/rank-00000-0000.pack?versionId=1",
     f"data/{ATTEMPT}/rank-0000\u0660-0000.pack"],
)  # fmt: skip
def test_packs_elsewhere_are_refused(pack: str) -> None:
    def change(index: Index, rows: list[list[int]]) -> None:
        index.packs = [(pack, 10**6)]

    with pytest.raises(FormatError):
        opened(change)


@pytest.mark.parametrize("field", ["attempt", "rank", "step", "world_size"])
def test_an_index_of_another_attempt_is_refused(field: str) -> None:
    value = {"attempt": OTHER, "rank": 1, "step": 8, "world_size": 3}[field]
    with pytest.raises(FormatError, match="another checkpoint or rank"):
        opened(lambda index, rows: replace(index, **{field: value}))


def test_no_read_leaves_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an index says, the store is asked for keys of its attempt and of packs that the record names only."""
    chance, asked = random.Random(5), set[str]()

    def note(name: str) -> None:
        real = getattr(MemoryStore, name)

        def noted(self: MemoryStore, key: str, *rest: Any, **named: Any) -> Any:
            asked.add(key)
            return real(self, key, *rest, **named)

        monkeypatch.setattr(MemoryStore, name, noted)

    for name in ("get", "get_into", "head"):
        note(name)
    for store, commit, data in fuzz.some_checkpoints():
        for _ in range(400):
            try:
                fuzz.use_checkpoint(store, commit, fuzz.mutate(chance, data, True))
            except (FormatError, IntegrityError):
                pass
    assert any(key.endswith(".pack") for key in asked) and any(key.endswith(".index") for key in asked)
    assert all(key.startswith(f"data/{ATTEMPT}/rank-") and ".." not in key for key in asked), asked


@pytest.mark.parametrize("count", [2**32, 2**31, 10**9])
def test_a_chunk_count_without_chunks(count: int) -> None:
    in_bounds(lambda: Index.decode(in_index({"chunk_count": count})), 4 * MiB)


def test_shapes_larger_than_any_memory() -> None:
    def change(index: Index, rows: list[list[int]]) -> Index:
        shards = [replace(s, global_shape=(2**62, 2**62), shape=(2**62, 2**62)) for s in index.shards]
        return replace(index, shards=shards)

    in_bounds(lambda: opened(change), 8 * MiB)


def test_a_view_of_a_few_bytes_that_claims_exabytes() -> None:
    """Strides of zero let a view repeat an element for ever; nothing may be allocated for it."""
    view = values.ViewSpec("uint8", 0, (2**40,), (0,))
    tree = {"w": values.TensorLeaf("w"), "v": values.TensorLeaf("w", False, view)}
    store, checkpoint = write_ranks([[(("w",), "uint8", (8,), (0,), (8,), bytes(8))]], tree)
    from objckpt.restore import load

    state = load(store, checkpoint)
    assert state["v"].shape == (2**40,) and state["v"].untyped_storage().nbytes() == 8


def test_many_boxes_that_meet_in_every_dimension_take_bounded_time() -> None:
    """2 x 2 x 2 x … boxes: in no dimension are there more than two different offsets."""
    dims = 8
    shape = (2,) * dims
    pieces: list[Any] = []
    for n in range(2**dims):
        offset = tuple(n >> d & 1 for d in range(dims))
        pieces.append((("w",), "uint8", shape, offset, (1,) * dims, bytes(1)))
    began_s = time.process_time()
    write_ranks([pieces], {"w": values.TensorLeaf("w")})
    assert time.process_time() - began_s < CPU_S


def test_numpy_values_that_do_not_print() -> None:
    assert short(values.unpack(ext(8, ["M8", b"\1" * 8]), "x")) == '"<datetime64>"'
    assert "datetime" in short([np.datetime64(5, "D")]) or short([np.datetime64(5, "D")]) == '["1970-01-06"]'
