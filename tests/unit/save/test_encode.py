"""From snapshot to parts: nothing lost, nothing twice, and every checksum that of the bytes it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.format import checksums, codecs
from objckpt.save import arena, encode, plan

SLAB = 64


@dataclass
class Run:
    """All that came out of one snapshot."""

    leaves: list[plan.LeafPlan]
    snapshot: bytes
    out: encode.Encoded = field(default_factory=encode.Encoded)
    parts: list[encode.Part] = field(default_factory=list)

    def pack(self, number: int) -> bytes:
        return b"".join(p for part in self.parts if part.pack == number for p in part.pieces)


class Now(Executor):
    """Does the work when it is submitted."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def run(
    sizes: list[int],
    *,
    compression: str = "none",
    chunk_bytes: int = 32,
    part_bytes: int = 64,
    limit: int = 1 << 40,
    itemsize: int = 2,
    alphabet: int = 256,
    pool: Executor | None = None,
    window: int = 3,
    slab_bytes: int = SLAB,
) -> Run:
    leaves, total = plan.lay_out(sizes)
    snapshot = np.random.default_rng(total).integers(0, alphabet, total, np.uint8).tobytes()
    slabs = plan.slabs_for(total, slab_bytes)
    memory = memoryview(bytearray(snapshot.ljust(slabs * slab_bytes, b"\xee")))
    views = [memory[at : at + slab_bytes] for at in range(0, len(memory), slab_bytes)]
    result = Run(leaves, snapshot)
    with mock.patch.object(plan, "pack_limit", return_value=limit):
        parts = encode.encode(
            leaves,
            [itemsize] * len(sizes),
            lambda start, nbytes: arena.pieces(views, slab_bytes, start, nbytes),
            compression=compression,
            chunk_bytes=chunk_bytes,
            part_bytes=part_bytes,
            pool=pool or Now(),
            window=window,
            out=result.out,
        )
        result.parts = list(parts)
    return result


def check(got: Run, *, chunk_bytes: int, part_bytes: int, limit: int) -> None:
    """Everything that a reader and the store rely on."""
    out = got.out
    packs = sorted({part.pack for part in got.parts})
    assert packs == list(range(len(out.pack_sizes)))
    for number in packs:
        parts = [p for p in got.parts if p.pack == number]
        assert [p.number for p in parts] == list(range(1, len(parts) + 1))
        assert [p.last for p in parts] == [False] * (len(parts) - 1) + [True]
        assert all(p.size == part_bytes for p in parts[:-1]) and 0 < parts[-1].size <= part_bytes
        for part in parts:
            body = b"".join(part.pieces)
            assert len(body) == part.size
            assert checksums.crc64(body) == part.crc
        assert out.pack_sizes[number] == len(got.pack(number)) <= max(limit, chunk_bytes)
    raw = bytearray()
    reached = dict.fromkeys(packs, 0)
    for pack, offset, stored_bytes, raw_bytes, codec, crc in out.rows:
        assert offset == reached[pack]  # back to back
        reached[pack] += stored_bytes
        stored = got.pack(pack)[offset : offset + stored_bytes]
        assert checksums.crc64(stored) == crc
        assert 0 < raw_bytes <= chunk_bytes
        decoded = bytearray(raw_bytes)
        codecs.decode(encode.CODECS[codec], memoryview(stored), memoryview(decoded))
        raw += decoded
    assert reached == dict(enumerate(out.pack_sizes))
    assert raw == got.snapshot
    wanted = [got.snapshot[leaf.start : leaf.start + leaf.nbytes] for leaf in got.leaves]
    assert out.digests == [checksums.crc64(w) for w in wanted]
    assert len(out.rows) == sum(-(-leaf.nbytes // chunk_bytes) for leaf in got.leaves)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=8),
    st.integers(1, 90),
    st.integers(1, 150),
    st.integers(1, 400) | st.just(1 << 40),
    st.sampled_from([1, 16, 64, 1024]),
)
def test_raw_any_sizes(sizes: list[int], chunk_bytes: int, part_bytes: int, limit: int, slab_bytes: int) -> None:
    got = run(sizes, chunk_bytes=chunk_bytes, part_bytes=part_bytes, limit=limit, slab_bytes=slab_bytes)
    check(got, chunk_bytes=chunk_bytes, part_bytes=part_bytes, limit=limit)
    if limit == 1 << 40:  # with the raw codec the pack is the snapshot itself
        assert got.pack(0) == got.snapshot


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9000), max_size=5),
    st.integers(1000, 5000),
    st.integers(500, 6000),
    st.integers(4000, 20000) | st.just(1 << 40),
    st.sampled_from([2, 40, 256]),
    st.integers(1, 5),
)
def test_compressed_any_sizes(
    sizes: list[int], chunk_bytes: int, part_bytes: int, limit: int, alphabet: int, window: int
) -> None:
    got = run(
        sizes,
        compression="zstd",
        chunk_bytes=chunk_bytes,
        part_bytes=part_bytes,
        limit=limit,
        alphabet=alphabet,
        window=window,
        slab_bytes=4096,
    )
    check(got, chunk_bytes=chunk_bytes, part_bytes=part_bytes, limit=limit)


def test_compression_in_threads_keeps_the_order() -> None:
    with ThreadPoolExecutor(4) as pool:
        sizes = {"chunk_bytes": 8192, "part_bytes": 10_000}
        got = run([100_000, 30_000], compression="zstd", alphabet=16, pool=pool, window=8, slab_bytes=65536, **sizes)
    check(got, **sizes, limit=1 << 40)
    assert {row[4] for row in got.out.rows} == {encode.CODECS.index("zstd")}
    assert sum(got.out.pack_sizes) < 80_000


def test_no_bytes_no_packs() -> None:
    for sizes in ([], [0], [0, 0]):
        got = run(sizes)
        assert got.parts == [] and got.out.rows == [] and got.out.pack_sizes == []
        assert got.out.digests == [0] * len(sizes)


def test_raw_bytes_are_not_copied() -> None:
    leaves, _ = plan.lay_out([100])
    memory = bytearray(100)
    parts = encode.encode(
        leaves,
        [1],
        lambda start, nbytes: [memoryview(memory)[start : start + nbytes]],
        compression="none",
        chunk_bytes=32,
        part_bytes=48,
        pool=Now(),
        window=1,
        out=encode.Encoded(),
    )
    assert all(piece.obj is memory for part in parts for piece in part.pieces)


def test_a_chunk_is_not_split_over_packs() -> None:
    got = run([100], chunk_bytes=40, part_bytes=16, limit=70)
    assert [row[:3] for row in got.out.rows] == [(0, 0, 40), (1, 0, 40), (1, 40, 20)]
    assert got.out.pack_sizes == [40, 60]


class Counting(Executor):
    """Holds the work back, and counts what is under way."""

    def __init__(self) -> None:
        self.waiting: list[Future[Any]] = []
        self.most = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        outer = self

        class Late(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                outer.waiting.remove(self)
                return fn(*args, **kwargs)

        future = Late()
        self.waiting.append(future)
        self.most = max(self.most, len(self.waiting))
        return future


@pytest.mark.parametrize("window", [1, 2, 7])
def test_the_window_bounds_what_is_encoded_ahead(window: int) -> None:
    pool = Counting()
    run([32 * 20], compression="zstd", pool=pool, window=window)
    assert pool.most == window


def test_a_failure_or_an_early_end_cancels_what_is_ahead() -> None:
    pool = Counting()
    leaves, total = plan.lay_out([1000])
    memory = memoryview(bytearray(total))
    parts: Iterator[encode.Part] = encode.encode(
        leaves,
        [1],
        lambda start, nbytes: [memory[start : start + nbytes]],
        compression="zstd",
        chunk_bytes=10,
        part_bytes=10,
        pool=pool,
        window=4,
        out=encode.Encoded(),
    )
    next(parts)
    assert pool.waiting
    parts.close()  # type: ignore[attr-defined]
    assert all(future.cancelled() for future in pool.waiting)
