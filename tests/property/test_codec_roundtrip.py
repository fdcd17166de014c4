"""Whatever the bytes, a codec gives them back; whatever is stored, decoding ends in an error or in the exact length."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.errors import FormatError, IntegrityError
from objckpt.format import codecs

# Runs, ramps and noise, so that planes of every kind meet.
pieces = st.one_of(
    st.binary(max_size=600),
    st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=9), st.integers(0, 3000)),
    st.builds(lambda n, k: bytes(i * k % 256 for i in range(n)), st.integers(0, 3000), st.integers(0, 255)),
)
raws = st.lists(pieces, max_size=5).map(b"".join)


def decode(stored: bytes, nbytes: int) -> bytes:
    out = bytearray(nbytes + 2)
    codecs.decode("zstd", memoryview(stored), memoryview(out)[1:-1])
    assert out[0] == out[-1] == 0
    return bytes(out[1:-1])


@settings(max_examples=150, deadline=None)
@given(raws, st.integers(1, 20))
def test_bytes_come_back(raw: bytes, itemsize: int) -> None:
    stored = codecs.encode("zstd", memoryview(raw), itemsize)
    if stored is not None:
        assert len(stored) < len(raw) and decode(stored, len(raw)) == raw


@settings(max_examples=150, deadline=None)
@given(st.data(), raws.filter(lambda raw: len(raw) >= 1024), st.sampled_from([1, 2, 4, 8]))
def test_damage_is_an_error_or_keeps_the_length(data: st.DataObject, raw: bytes, itemsize: int) -> None:
    stored = codecs.encode("zstd", memoryview(raw), itemsize)
    if stored is None:
        return
    cut = data.draw(st.integers(0, len(stored) - 1))
    broken = data.draw(st.sampled_from([stored[:cut], stored[:cut] + b"\xff" + stored[cut + 1 :], stored + b"\0"]))
    try:
        assert len(decode(broken, len(raw))) == len(raw) and len(broken) == len(stored)
    except (IntegrityError, FormatError):
        pass


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 255), st.lists(st.integers(0, 2**32 - 1), max_size=17), st.binary(max_size=200), st.integers(0, 5000)
)
def test_no_header_leads_astray(layout: int, sizes: list[int], rest: bytes, nbytes: int) -> None:
    stored = struct.pack(f"<BB{len(sizes)}I", layout if layout > 3 else 1, len(sizes), *sizes) + rest
    try:
        decode(stored, nbytes)
    except (IntegrityError, FormatError):
        pass
