"""Codecs: exact round trips, and that damaged, cut, foreign or hostile bytes are errors that cost no memory."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from objckpt.errors import FormatError, IntegrityError
from objckpt.format import codecs

RNG = np.random.default_rng(0)
WEIGHTS = (RNG.standard_normal(1 << 18) * 0.02).astype(np.float32)
BF16 = (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16)


def decode(stored: bytes, nbytes: int, name: str = "zstd") -> bytes:
    out = bytearray(b"\xa5" * nbytes)
    codecs.decode(name, memoryview(stored), memoryview(out))
    return bytes(out)


def wrap(*planes: tuple[bytes, bool], tail: bytes = b"", layout: int = 1) -> bytes:
    """A chunk made by hand: planes and whether each is a frame."""
    sizes = [len(data) | (compressed << 31) for data, compressed in planes]
    head = struct.pack(f"<BB{len(planes)}I", layout, len(planes), *sizes)
    return head + b"".join(data for data, _ in planes) + tail


@pytest.mark.parametrize(
    ("array", "ratio"),
    [
        (BF16, 1.45), (WEIGHTS, 1.18), (WEIGHTS.astype(np.float16), 1.15), (np.zeros(1 << 18, np.float32), 1000),
        (RNG.integers(0, 50_000, 1 << 17), 3.9), (RNG.standard_normal(1 << 16) + 1j, 1.05), (np.arange(5000, dtype="u1"), 15),
    ],
)  # fmt: skip
def test_what_compresses_comes_back(array: np.ndarray, ratio: float) -> None:
    raw = array.tobytes()
    stored = codecs.encode("zstd", memoryview(raw), array.itemsize)
    assert stored is not None and type(stored) is bytes and len(raw) / len(stored) > ratio
    assert decode(stored, len(raw)) == raw


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1025, 4096 + 3])
@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16, 17])
def test_sizes_that_are_no_multiple_of_the_item(nbytes: int, itemsize: int) -> None:
    raw = bytes(i % 7 for i in range(nbytes))
    stored = codecs.encode("zstd", memoryview(raw), itemsize)
    assert (stored is None) == (nbytes < 1024)
    assert stored is None or decode(stored, nbytes) == raw


def test_noise_and_raw_are_not_worth_it() -> None:
    noise = RNG.integers(0, 256, 1 << 20, np.uint8).tobytes()
    assert codecs.encode("zstd", memoryview(noise), 4) is None and codecs.encode("zstd", memoryview(noise), 1) is None
    assert codecs.encode("raw", memoryview(bytes(5000)), 1) is None


def test_a_plane_that_compresses_in_places_only_is_found() -> None:
    raw = RNG.integers(0, 256, 1 << 20, np.uint8)
    raw[3 * len(raw) // 4 :] = 0
    stored = codecs.encode("zstd", raw.data, 1)
    assert stored is not None and len(stored) < 0.8 * len(raw) and decode(stored, len(raw)) == raw.tobytes()


def test_raw() -> None:
    assert decode(b"abc", 3, "raw") == b"abc" and decode(b"", 0, "raw") == b""
    for nbytes in (2, 4):
        with pytest.raises(IntegrityError, match=f"3 bytes are stored raw, expected {nbytes}"):
            decode(b"abc", nbytes, "raw")


def test_an_unknown_codec_or_layout() -> None:
    for call in (lambda: codecs.encode("lz9", memoryview(b""), 1), lambda: decode(b"", 0, "lz9")):
        with pytest.raises(FormatError, match=r"codec 'lz9' is unknown.*upgrade"):
            call()
    with pytest.raises(FormatError, match=r"layout 2 .*upgrade"):
        decode(wrap((b"abc", False), layout=2), 3)


def test_e125_a_frame_of_unknown_content_size_is_read() -> None:
    raw = bytes(i % 11 for i in range(100_000))
    stream = zstandard.ZstdCompressor().compressobj()
    frame = stream.compress(raw) + stream.flush()
    assert zstandard.get_frame_parameters(frame).content_size == zstandard.CONTENTSIZE_UNKNOWN
    assert decode(wrap((frame, True)), len(raw)) == raw
    for nbytes in (len(raw) - 1, len(raw) + 1, 10):
        with pytest.raises(IntegrityError):
            decode(wrap((frame, True)), nbytes)
    for cut in (frame[:-1], frame[:-10], frame[:4], b""):
        with pytest.raises(IntegrityError):
            decode(wrap((cut, True)), len(raw))


def test_e125_a_chunk_that_was_cut() -> None:
    raw = WEIGHTS.tobytes()
    stored = codecs.encode("zstd", memoryview(raw), 4)
    assert stored is not None
    for end in (len(stored) - 1000, len(stored) - 1, 17, 4, 2):
        with pytest.raises(IntegrityError, match=f"{end} bytes are stored"):
            decode(stored[:end], len(raw))
    with pytest.raises(IntegrityError, match="0 bytes are stored"):
        decode(b"", len(raw))
    for nbytes in (len(raw) - 4, len(raw) + 4, 0):
        with pytest.raises(IntegrityError, match="expected"):
            decode(stored, nbytes)


def test_e126_several_frames_and_garbage_are_refused() -> None:
    half = zstandard.ZstdCompressor().compress(bytes(100_000))
    whole = zstandard.ZstdCompressor().compress(bytes(200_000))
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    for plane in (half + half, whole + b"garbage", whole + half, skippable + whole, b"garbage"):
        with pytest.raises(IntegrityError):
            decode(wrap((plane, True)), 200_000)
    with pytest.raises(IntegrityError, match="announces"):
        decode(wrap((whole, True)) + b"garbage", 200_000)


@pytest.mark.parametrize("known_size", [True, False])
def test_a_bomb_costs_no_memory(known_size: bool) -> None:
    if known_size:
        frame = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    else:
        stream = zstandard.ZstdCompressor().compressobj()
        frame = b"".join(stream.compress(bytes(1 << 20)) for _ in range(256)) + stream.flush()
    codecs._contexts.decompressor  # noqa: B018 - made before the measurement
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            decode(wrap((frame, True)), 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_wants_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(bytes(1 << 20)) + stream.flush()
    with pytest.raises(IntegrityError):
        decode(wrap((frame, True)), 1 << 20)


@pytest.mark.parametrize("stored", [b"\x01\x00", b"\x01\x11" + bytes(68), wrap((bytes(9), False), (bytes(7), False))])
def test_a_header_that_makes_no_sense(stored: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(stored, 16)


def test_any_altered_byte_is_an_error_or_gives_the_exact_length() -> None:
    raw = BF16[:3000].tobytes()
    stored = codecs.encode("zstd", memoryview(raw), 2)
    assert stored is not None
    for at in range(0, len(stored), 7):
        for flip in (1, 0x80):
            broken = bytearray(stored)
            broken[at] ^= flip
            try:
                assert len(decode(bytes(broken), len(raw))) == len(raw)
            except (IntegrityError, FormatError):
                pass


def test_threads_do_not_disturb_each_other() -> None:
    arrays = [np.roll(BF16, i * 1000) ^ np.uint16(i) for i in range(24)]

    def there_and_back(array: np.ndarray) -> bool:
        stored = codecs.encode("zstd", array.data.cast("B"), 2)
        return stored is not None and decode(stored, array.nbytes) == array.tobytes()

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(there_and_back, arrays))
