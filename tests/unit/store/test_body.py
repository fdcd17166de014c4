from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objckpt.store.body import UploadBody


def body_of(pieces: list[bytes]) -> UploadBody:
    return UploadBody([memoryview(piece) for piece in pieces])


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(1, 20))
def test_slices_and_reads_give_the_bytes_in_order(pieces: list[bytes], most: int) -> None:
    whole = b"".join(pieces)
    body = body_of(pieces)
    assert len(body) == len(whole)
    slices = list(body.slices(most))
    assert b"".join(slices) == whole
    assert all(0 < len(view) <= most for view in slices)
    body.seek(0)
    assert b"".join(iter(lambda: body.read(most), b"")) == whole
    assert body.read() == b""


def test_it_seeks_like_a_file() -> None:
    body, file = body_of([b"abc", b"", b"defgh"]), io.BytesIO(b"abcdefgh")
    for offset, whence in ((2, 0), (0, 2), (-3, 2), (1, 1), (0, 0), (7, 0)):
        assert body.seek(offset, whence) == file.seek(offset, whence)
        assert body.tell() == file.tell()
        assert body.read(2) == file.read(2)
    body.seek(1)
    buffer = bytearray(4)
    assert body.readinto(buffer) == 4
    assert buffer == b"bcde"


def test_slices_do_not_copy() -> None:
    memory = bytearray(b"aaaa")
    (view,) = UploadBody([memoryview(memory)]).slices()
    memory[:] = b"bbbb"
    assert view == b"bbbb"


def test_a_closed_body_gives_no_bytes() -> None:
    body = body_of([b"abc"])
    body.close()
    with pytest.raises(ValueError, match="closed"):
        body.read(1)
