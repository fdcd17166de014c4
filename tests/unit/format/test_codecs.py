"""Codecs of chunks: round trips of any bytes, and damage of every kind refused with bounded memory."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.errors import FormatError, IntegrityError
from objckpt.format import codecs

FRAME = 1 << 31  # the flag of a plane that is one zstd frame


def weights(count: int, *, bf16: bool, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if bf16 else values.tobytes()


def decoded(stored: bytes, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    codecs.decode("zstd", memoryview(stored), memoryview(out))
    return bytes(out)


def one_plane(frame: bytes, size: int | None = None) -> bytes:
    """A chunk of one plane, which is `frame`."""
    return struct.pack("<BBI", 1, 1, (len(frame) if size is None else size) | FRAME) + frame


def stored_weights() -> tuple[bytes, bytes]:
    raw = weights(40_000, bf16=True)
    stored = codecs.encode("zstd", memoryview(raw), 2)
    assert stored is not None
    return raw, stored


@pytest.mark.parametrize(("bf16", "itemsize", "ratio"), [(True, 2, 1.4), (False, 4, 1.15)])
def test_weights_shrink(bf16: bool, itemsize: int, ratio: float) -> None:
    raw = weights(200_000, bf16=bf16)
    stored = codecs.encode("zstd", memoryview(raw), itemsize)
    assert stored is not None
    assert len(raw) / len(stored) > ratio
    assert decoded(stored, len(raw)) == raw


def test_noise_and_small_chunks_are_left_raw() -> None:
    assert codecs.encode("zstd", memoryview(np.random.default_rng(0).bytes(1 << 20)), 4) is None
    assert codecs.encode("zstd", memoryview(b""), 4) is None
    assert codecs.encode("zstd", memoryview(bytes(64)), 4) is None
    assert codecs.encode("raw", memoryview(bytes(1 << 20)), 4) is None


def test_a_gain_far_from_the_start_is_seen() -> None:
    raw = np.random.default_rng(0).bytes(1 << 20) + bytes(1 << 20)
    stored = codecs.encode("zstd", memoryview(raw), 1)
    assert stored is not None
    assert decoded(stored, len(raw)) == raw


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, 17]),
    st.integers(0, 6000),
    st.integers(0, 255),
    st.binary(max_size=40),
    st.integers(0, 2**32),
)
def test_round_trip(itemsize: int, count: int, spread: int, tail: bytes, seed: int) -> None:
    """Any length, also one that is no multiple of the item size (a chunk's border may cut an element)."""
    raw = np.random.default_rng(seed).integers(0, spread + 1, count, np.uint8).tobytes() + tail
    stored = codecs.encode("zstd", memoryview(raw), itemsize)
    if stored is not None:
        assert len(stored) < len(raw)
        assert decoded(stored, len(raw)) == raw


def test_raw_is_copied_and_its_length_checked() -> None:
    out = bytearray(3)
    codecs.decode("raw", memoryview(b"abc"), memoryview(out))
    assert out == b"abc"
    for stored in (b"ab", b"abcd"):
        with pytest.raises(IntegrityError, match=rf"{len(stored)}.*expected 3"):
            codecs.decode("raw", memoryview(stored), memoryview(out))


def test_unknown_codec_and_layout_ask_for_an_upgrade() -> None:
    with pytest.raises(FormatError, match="upgrade"):
        codecs.encode("lz4", memoryview(b"abc"), 1)
    with pytest.raises(FormatError, match="upgrade"):
        codecs.decode("lz4", memoryview(b"abc"), memoryview(bytearray(3)))
    raw, stored = stored_weights()
    with pytest.raises(FormatError, match="upgrade"):
        decoded(b"\x02" + stored[1:], len(raw))


# ---- E125: no content size in the frame; truncated frames ----------------------------------------------------------


def streamed(raw: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    frame = compressor.compress(raw) + compressor.flush()
    assert zstandard.get_frame_parameters(frame).content_size == zstandard.CONTENTSIZE_UNKNOWN
    return frame


def test_e125_a_frame_without_content_size_is_read() -> None:
    raw = weights(100_000, bf16=True)
    assert decoded(one_plane(streamed(raw)), len(raw)) == raw


@pytest.mark.parametrize("make", [streamed, zstandard.ZstdCompressor(level=3).compress])
@pytest.mark.parametrize("keep", [-1000, -1, 4, 1, 0])
def test_e125_a_truncated_frame_is_refused(make: Callable[[bytes], bytes], keep: int) -> None:
    raw = weights(100_000, bf16=True)
    with pytest.raises(IntegrityError, match=r"expected to give 200000|expected 200000"):
        decoded(one_plane(make(raw)[:keep]), len(raw))


@pytest.mark.parametrize("keep", [-1000, -1, 9, 4, 2, 1, 0])
def test_e125_a_truncated_chunk_is_refused(keep: int) -> None:
    raw, stored = stored_weights()
    with pytest.raises(IntegrityError, match="bytes are stored"):
        decoded(stored[:keep], len(raw))


@pytest.mark.parametrize("unknown_size", [False, True])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_e125_a_frame_of_another_length_is_refused(unknown_size: bool, wrong: int) -> None:
    raw = weights(10_000, bf16=True)
    frame = streamed(raw) if unknown_size else zstandard.compress(raw)
    with pytest.raises(IntegrityError, match=f"expected.*{len(raw) + wrong}"):
        decoded(one_plane(frame), len(raw) + wrong)


# ---- E126: several frames, trailing garbage ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [b"\0", b"garbage", zstandard.compress(bytes(1000)), b"\x50\x2a\x4d\x18\0\0\0\0"])
@pytest.mark.parametrize("before", [streamed, zstandard.compress])
@pytest.mark.parametrize("nbytes", [1000, 2000])
def test_e126_bytes_after_the_first_frame_are_refused(
    before: Callable[[bytes], bytes], after: bytes, nbytes: int
) -> None:
    with pytest.raises(IntegrityError):
        decoded(one_plane(before(bytes(1000)) + after), nbytes)


def test_e126_bytes_after_the_planes_are_refused() -> None:
    raw, stored = stored_weights()
    with pytest.raises(IntegrityError, match="announces"):
        decoded(stored + b"\0", len(raw))


@pytest.mark.parametrize("nbytes", [0, 8, 16])
def test_a_skippable_frame_is_no_content(nbytes: int) -> None:
    with pytest.raises(IntegrityError):
        decoded(one_plane(b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + bytes(8)), nbytes)


@pytest.mark.parametrize("header", [struct.pack("<BB", 1, 0), struct.pack("<BB", 1, 17) + bytes(68)])
def test_absurd_plane_counts_are_refused(header: bytes) -> None:
    with pytest.raises(IntegrityError, match="planes"):
        decoded(header, 0)


def test_a_raw_plane_of_another_length_is_refused() -> None:
    with pytest.raises(IntegrityError, match="plane 0 has 3 bytes, expected 4"):
        decoded(struct.pack("<BBII", 1, 2, 3, 5) + bytes(8), 8)


# ---- bombs and fuzz ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown_size", [False, True])
def test_a_bomb_allocates_no_more_than_the_chunk(unknown_size: bool) -> None:
    frame = (streamed if unknown_size else zstandard.compress)(bytes(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            decoded(one_plane(frame), 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_claimed_size_allocates_nothing() -> None:
    """A header of a few bytes that announces 2^60 bytes."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + b"\x01\0\0"
    with pytest.raises(IntegrityError, match="announces"):
        decoded(one_plane(frame), 1 << 20)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=4),
    st.booleans(),
    st.none() | st.integers(0, 2**31),
)
def test_mutated_bytes_raise_integrity_errors_only(changes: list[tuple[int, int]], head: bool, cut: int | None) -> None:
    raw = weights(2000, bf16=True)
    stored = codecs.encode("zstd", memoryview(raw), 2)
    assert stored is not None
    mutated = bytearray(stored)
    for at, value in changes:
        mutated[1 + at % (40 if head else len(mutated) - 1)] = value  # byte 0 is the layout: a FormatError
    if cut is not None:
        del mutated[cut % len(mutated) :]
    try:
        decoded(bytes(mutated), len(raw))  # other bytes of the right length: the chunk's CRC is what notices those
    except IntegrityError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 5000), st.sampled_from([b"", b"\x01\x01", b"\x01\x02"]))
def test_arbitrary_bytes_raise_integrity_errors_only(tail: bytes, nbytes: int, head: bytes) -> None:
    try:
        decoded(head + tail, nbytes)
    except IntegrityError:
        pass
    except FormatError:
        assert (head + tail)[0] != 1


def test_threads_do_not_share_contexts() -> None:
    chunks = [weights(50_000, bf16=True, seed=i) for i in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            stored = codecs.encode("zstd", memoryview(chunks[i]), 2)
            if stored is None or decoded(stored, len(chunks[i])) != chunks[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
