"""A fuzzer of everything that reads stored bytes: mutations of a corpus of valid objects. The seed gives the same run.

    PYTHONPATH=.:tests python -m faults.attacks.fuzz SEED CASES

Runs with a limit on its address space. Prints one JSON document: the cases, how many were still readable, the largest
growth of memory and of CPU time of one case, and each kind of failure with bytes that show it.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import functools
import json
import random
import resource
import sys
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from support.memory_store import MemoryStore
from support.written import ATTEMPT, SESSION, new_store, write_ranks, write_shards

from objckpt.cli.ls import describe
from objckpt.cli.plain import plain, short
from objckpt.errors import FormatError, IntegrityError, UsageError
from objckpt.format import bundle, checksums, codecs, keys, records, values, wire
from objckpt.format.fqn import to_fqn
from objckpt.format.index import Index
from objckpt.format.tables import TensorEntry
from objckpt.geometry import Box, Layout
from objckpt.restore import lazy, load, open_checkpoint, verify
from objckpt.restore.match import leaves

HEADROOM_BYTES = 1 << 30  # of address space, above what the imports took: one chunk may have 64 MiB
SEQ = 4
REFUSALS = (FormatError, IntegrityError)
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, 1e308, float("inf"),
    float("nan"), "", ".", "..", "../../x", "/etc/passwd", "a\0b", "\u202e\x1b[2J", "x" * 5000, b"", b"\0" * 9, b"\xff" * 64,
    [], {}, [[]], [None] * 70, {0: 1}, {"": {}},
]  # fmt: skip


# ---- the corpus ------------------------------------------------------------------------------------------------------


def some_records() -> list[bytes]:
    head: dict[str, Any] = {"write_id": b"w" * 16, "epoch": 3, "session": SESSION, "time_s": 1.8e9, "host": "h"}
    commit = records.Commit(
        **head, seq=4, step=7, attempt=ATTEMPT, parent=2, world_size=2, raw_bytes=10, stored_bytes=9, tensors=1,
        ranks=[("0" * 32, 10), ("f" * 32, 11)], signature="5" * 16,
        foreign_packs=[f"data/{ATTEMPT}/rank-00000-0000.pack"], meta={"loss": 0.5, "tags": ("a", 1)},
    )  # fmt: skip
    others = [
        records.Open(**head, world_size=8, capabilities={"conditional_put": True, "evidence": "text"}),
        records.Retire(**head, seqs=[1, 2], attempts=[ATTEMPT], reason="retention"),
        records.Tag(**head, name="best", target=3),
    ]
    return [record.encode() for record in (commit, *others)]


def some_values() -> list[bytes]:
    ordered: Any = OrderedDict(a=1)
    ordered._metadata = {"": {"version": 1}}
    found: list[Any] = [
        {"a": [1, 2.5, None, True, "text", b"bytes"], 3: {"b": (1, (2, ()))}},
        [ordered, Counter({3: 1}), {1, 2}, frozenset({"x"}), 2**70, -(2**90), 1 + 2j],
        [np.float32(1), np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.datetime64("2020-01-01"), np.array([b"x"])],
        [Path("a/b"), dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC), dt.date(2020, 1, 1), dt.timedelta(1, 2, 3)],
        [values.TorchDtype("float32"), values.TorchDevice("cuda:1"), values.TorchSize((2, 3)), values.Pickled(b"\x80\x04.")],
        [values.TensorLeaf("w"), values.TensorLeaf("w", True, values.ViewSpec("float32", 4, (1, 2), (2, 1)))],
    ]  # fmt: skip
    return [values.pack(value) for value in found]


def some_checkpoints() -> list[tuple[MemoryStore, records.Commit, bytes]]:
    """A store, its commit record, and the bytes of the index of rank 0."""
    numbers = np.arange(48, dtype=np.float32).reshape(6, 8)
    boxes = [Box((0, 0), (3, 8)), Box((3, 0), (3, 8))]
    made = [write_shards({"a": (numbers, boxes), "b": (numbers, [Box((0, 0), (6, 8))])}, ranks=2, chunk_bytes=64)]
    data = np.sort(np.random.default_rng(1).integers(0, 9, 4096)).astype(np.int64).tobytes()
    tree = {"w": values.TensorLeaf("w"), "v": values.TensorLeaf("w", False, values.ViewSpec("int64", 8, (3,), (2,))),
            "n": 1, "t": (1, "x"), "d": values.TorchDtype("float16"), "p": values.TorchDevice("cpu")}  # fmt: skip
    made.append(write_ranks([[(("w",), "int64", (4096,), (0,), (4096,), data)]], tree, codec="zstd", chunk_bytes=16384))
    # Of a mesh, with layouts: by rows, and by rows as FSDP2 over TP cuts them.
    layouts = {"c": Layout((0, 1), (2, 1), ((0, 1), None)), "s": Layout((0, 1), (2, 1), ((0, 2), (1, 1)))}
    entries = [TensorEntry((name,), "float32", (8, 8), layout) for name, layout in layouts.items()]
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    ranks = [
        [
            (entry.path, "float32", (8, 8), piece.box.offset, piece.box.shape,
             square[piece.box.offset[0] :][: piece.box.shape[0]].tobytes())
            for entry in entries
            for piece in layouts[entry.fqn].pieces((8, 8), (rank, 0))
        ]
        for rank in range(2)
    ]  # fmt: skip
    made.append(write_ranks(ranks, {n: values.TensorLeaf(n) for n in layouts}, chunk_bytes=64, described=entries))
    found = []
    for store, checkpoint in made:
        found.append((store, checkpoint.commit, store.get(checkpoint.commit.index_key(0), max_bytes=1 << 20)))
    return found


def some_chunks() -> list[tuple[bytes, int]]:
    """Encoded chunks and their raw lengths."""
    chance = np.random.default_rng(2)
    raws = [
        (bytes(20_000), 4),
        (chance.normal(size=4000).astype(np.float32).tobytes() + b"abc", 4),
        (np.arange(3000, dtype=np.int64).tobytes(), 8),
        (b"ab" * 900, 1),
    ]
    found = []
    for raw, itemsize in raws:
        stored = codecs.encode("zstd", memoryview(raw), itemsize)
        assert stored is not None
        found.append((stored, len(raw)))
    return found


# ---- mutations -------------------------------------------------------------------------------------------------------


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 9))):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << chance.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = chance.choice((0, 0x7F, 0x80, 0x90, 0xC1, 0xC6, 0xC7, 0xC9, 0xDD, 0xDF, 0xFF))
        elif kind == 2:
            out[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 6)))
        elif kind == 3:
            del out[at : at + chance.randrange(1, 9)]
        elif kind == 4:
            length = chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, chance.randrange(2**32)))
            out[at : at + 4] = length.to_bytes(4, chance.choice(("big", "little")))
        elif kind == 5:
            del out[at:]
        else:
            start = chance.randrange(len(out) + 1)
            out[at:at] = out[start : start + chance.randrange(64)]
    return bytes(out)


def mutate_tree(chance: random.Random, node: Any) -> Any:
    """One node of decoded msgpack replaced, doubled or taken away; ExtTypes and bytes are entered where they hold msgpack,
    and columns of numbers get another number."""
    inner: Any = None
    if isinstance(node, (msgpack.ExtType, bytes)):
        try:
            inner = msgpack.unpackb(node.data if isinstance(node, msgpack.ExtType) else node, strict_map_key=False)
        except Exception:
            inner = None
        if isinstance(node, bytes) and not isinstance(inner, (list, dict)):
            inner = None
    if chance.random() < 0.25 or (not (isinstance(node, (list, dict)) and node) and inner is None):
        return odd(chance, node)
    if isinstance(node, msgpack.ExtType):
        return msgpack.ExtType(node.code, msgpack.packb(mutate_tree(chance, inner)))
    if isinstance(node, bytes):
        return msgpack.packb(mutate_tree(chance, inner))
    if isinstance(node, list):
        out, at = list(node), chance.randrange(len(node))
        kind = chance.randrange(6)
        if kind == 0:
            del out[at]
        elif kind == 1:
            out.insert(at, out[chance.randrange(len(out))])
        else:
            out[at] = mutate_tree(chance, out[at])
        return out
    at = chance.choice(list(node))
    if chance.random() < 0.1:
        return {k: v for k, v in node.items() if k is not at}
    return {k: mutate_tree(chance, v) if k is at else v for k, v in node.items()}


def odd(chance: random.Random, node: Any) -> Any:
    kind = chance.randrange(5)
    if kind == 0 and isinstance(node, bytes) and len(node) > 3:
        width = chance.choice([n for n in (1, 4, 8) if len(node) % n == 0])
        at = chance.randrange(len(node) // width) * width
        number = chance.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, chance.randrange(2**64))) % 256**width
        return node[:at] + number.to_bytes(width, "little") + node[at + width :]
    if kind == 0 and type(node) is int:
        return max(-(2**63), min(2**64 - 1, node + chance.choice((-1, 1, 4096, 2**40))))
    if kind == 1 and isinstance(node, (bytes, str)) and node:
        data = mutate_bytes(chance, node.encode() if isinstance(node, str) else node)
        return data if isinstance(node, bytes) else data.decode(errors="replace")
    if kind == 2:
        body = msgpack.packb(chance.choice(ODD))
        for _ in range(chance.choice((0, 0, 1, 80))):
            body = msgpack.packb(msgpack.ExtType(chance.randrange(20), body))
        return msgpack.ExtType(chance.randrange(21), body)
    return chance.choice(ODD)


def mutate(chance: random.Random, data: bytes, sealed: bool) -> bytes:
    """Bytes, or the tree that they hold. Sealed objects keep magic and version mostly, else nothing behind is reached."""
    if chance.random() < 0.4:
        if sealed and chance.random() < 0.9:
            return data[:10] + mutate_bytes(chance, data[10:])
        return mutate_bytes(chance, data)
    head, body = (data[:10], data[10:]) if sealed else (b"", data)
    tree = msgpack.unpackb(body, strict_map_key=False)
    for _ in range(chance.choice((1, 1, 2, 3))):
        tree = mutate_tree(chance, tree)
    return head + bytes(msgpack.packb(tree))


# ---- what reads them; each raises only REFUSALS -----------------------------------------------------------------------


def use_record(data: bytes) -> None:
    record = records.decode(data, SEQ)
    again = records.decode(record.encode(), SEQ)
    assert again.encode() == record.encode()
    if isinstance(record, records.Commit):
        json.dumps(plain(describe(record)))
        short(record.meta)
        for rank in range(min(3, record.world_size)):
            assert record.index_key(rank).startswith(f"data/{record.attempt}/rank-")


def use_bundle(data: bytes) -> None:
    """As if the attacker had named it, too."""
    for seq, record in enumerate(bundle.decode(data, keys.BundleName(0, 31, checksums.digest_hex(data)))):
        records.decode(record, seq)


def use_value(data: bytes) -> None:
    value = values.unpack(data, "fuzz")
    short(value)
    repr(to_fqn((0, "x")))
    from objckpt.state.unflatten import to_python

    for path, _ in leaves(value):
        to_fqn(path)
    with contextlib.suppress(UsageError):  # a pickled value
        to_python(value, lambda path, leaf: leaf)


def use_index(data: bytes) -> None:
    Index.decode(data, "fuzz")


def use_chunk(data: bytes, raw_bytes: int) -> None:
    codecs.decode("zstd", memoryview(data), memoryview(bytearray(raw_bytes)))


def use_checkpoint(store: MemoryStore, commit: records.Commit, index: bytes) -> None:
    """As if the attacker had written index and commit record both."""
    ranks = [(checksums.digest_hex(index), len(index)), *commit.ranks[1:]]
    try:
        signature = Index.decode(index, "fuzz").signature
    except REFUSALS:
        signature = commit.signature
    commit = replace(commit, ranks=ranks, signature=signature)
    own = new_store()
    own.bucket.objects.update(store.bucket.objects)
    own.put(commit.index_key(0), index)
    for rank in range(1, commit.world_size):
        name = next(k for k in own.bucket.objects if f"rank-{rank:05d}." in k)
        own.put(commit.index_key(rank), own.bucket.objects[name][0])
    checkpoint = open_checkpoint(own, commit)
    verify(own, checkpoint)
    state = lazy(own, checkpoint)
    for name in list(state)[:3]:
        with contextlib.suppress(UsageError):  # a pickled value
            item = state[name]
            if hasattr(item, "shape") and hasattr(item, "dtype"):
                item[...]
    with contextlib.suppress(UsageError):
        load(own, checkpoint)


def run(seed: int, cases: int) -> dict[str, Any]:
    chance = random.Random(seed)
    wrapped = [wire.pack({"value": data}) for data in some_values()]  # as a whole: msgpack within msgpack
    checkpoints = some_checkpoints()
    targets: list[tuple[str, bytes, bool, Callable[[bytes], None]]] = []
    targets += [("record", data, True, use_record) for data in some_records()]
    made = bundle.encode(0, some_records()[1:2] * 32)
    assert made is not None
    targets.append(("bundle", made[1], True, use_bundle))
    targets += [("value", data, False, use_value) for data in [*some_values(), *wrapped]]
    targets += [("index", data, True, use_index) for _, _, data in checkpoints]
    targets += [
        ("checkpoint", data, True, functools.partial(use_checkpoint, store, commit))
        for store, commit, data in checkpoints
    ]
    for _, data, _, use in targets:
        use(data)  # the corpus itself is readable
    chunks = some_chunks()
    readable, slowest_s, failures = Counter[str](), (0.0, ""), dict[str, Any]()
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(cases):
        if chance.random() < 0.2:
            name, (stored, raw_bytes) = "chunk", chance.choice(chunks)
            data = mutate_bytes(chance, stored)
            if chance.random() < 0.2:
                raw_bytes = chance.choice((0, 1, raw_bytes - 1, raw_bytes + 1, 2 * raw_bytes))
            use = functools.partial(use_chunk, raw_bytes=raw_bytes)
        else:
            name, valid, sealed, use = chance.choice(targets)
            data = mutate(chance, valid, sealed)
        began_s = time.process_time()
        try:
            use(data)
            readable[name] += 1
        except REFUSALS:
            pass
        except BaseException as err:
            frame = traceback.extract_tb(err.__traceback__)[-1]
            kind = f"{name}: {type(err).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            failures.setdefault(
                kind, {"base64": base64.b64encode(data[:3000]).decode(), "trace": traceback.format_exc()[-1500:]}
            )
        slowest_s = max(slowest_s, (time.process_time() - began_s, name))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return {"cases": cases, "readable": readable, "slowest_s": slowest_s, "grown_bytes": grown, "failures": failures}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
