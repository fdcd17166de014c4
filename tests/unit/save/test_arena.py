"""The snapshot arena: growth, hand-out, the agent's mapping, and refusals before anything is allocated."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objckpt.errors import ArenaFullError
from objckpt.save import arena
from objckpt.save.arena import Arena, ArenaReader

SLAB = 64 * 1024  # a multiple of every page size


@pytest.fixture
def made() -> Iterator[Arena]:
    a = Arena(slab_bytes=SLAB)
    yield a
    a.close()


def test_slabs_are_zero_writable_and_apart(made: Arena) -> None:
    made.reserve(3)
    views = made.views([2, 0, 1])
    assert all(len(v) == SLAB and not v.readonly and not any(v) for v in views)
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * SLAB
    assert [v[0] for v in made.views([0, 1, 2])] == [2, 3, 1]
    assert all(len(set(v)) == 1 for v in views)


def test_the_reader_sees_the_same_memory_also_after_growth(made: Arena) -> None:
    reader = ArenaReader(made.fd, SLAB)
    made.reserve(1)
    (before,) = reader.views([0])
    made.views([0])[0][:3] = b"abc"
    assert bytes(before[:3]) == b"abc" and before.readonly
    made.reserve(4)
    made.views([3])[0][-3:] = b"xyz"
    assert bytes(reader.views([3])[0][-3:]) == b"xyz"
    assert bytes(before[:3]) == b"abc"


def test_reserving_less_or_the_same_changes_nothing(made: Arena) -> None:
    made.reserve(3)
    made.reserve(3)
    made.reserve(1)
    assert (made.slabs, made.nbytes, os.fstat(made.fd).st_size) == (3, 3 * SLAB, 3 * SLAB)


def test_slabs_are_handed_out_lowest_first_and_once(made: Arena) -> None:
    made.reserve(4)
    assert made.acquire(2, 0) == [0, 1]
    assert made.acquire(2, 0) == [2, 3]
    assert made.used == 4
    assert made.acquire(1, 0) is None
    made.release([3, 0])
    assert made.acquire(2, 0) == [0, 3]
    assert made.acquire(0, 0) == []


def test_acquire_waits_for_a_release(made: Arena) -> None:
    made.reserve(2)
    taken = made.acquire(2, 0)
    assert taken is not None
    got: list[list[int] | None] = []
    waiter = threading.Thread(target=lambda: got.append(made.acquire(2, 30)))
    waiter.start()
    made.release([taken[0]])  # not yet enough
    made.release([taken[1]])
    waiter.join(30)
    assert got == [[0, 1]]


def test_a_limit_refuses_before_anything_is_allocated() -> None:
    a = Arena(slab_bytes=SLAB, limit_bytes=3 * SLAB)
    try:
        a.reserve(3)
        with pytest.raises(ArenaFullError, match="arena_bytes") as info:
            a.reserve(4)
        assert info.value.context == {"needed_bytes": 4 * SLAB, "allowed_bytes": 3 * SLAB}
        assert (a.slabs, os.fstat(a.fd).st_size) == (3, 3 * SLAB)
    finally:
        a.close()


def test_too_little_host_memory_refuses_before_anything_is_allocated(
    made: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_available_bytes", lambda: 2 * SLAB)
    with pytest.raises(ArenaFullError, match="available on this host"):
        made.reserve(3)
    assert (made.slabs, os.fstat(made.fd).st_size) == (0, 0)
    made.reserve(2)
    monkeypatch.setattr(arena, "_available_bytes", lambda: None)
    made.reserve(3)
    assert made.slabs == 3


def test_memory_that_cannot_be_mapped_is_given_back(made: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    made.reserve(1)
    monkeypatch.setattr(arena.mmap, "mmap", refuse)
    with pytest.raises(ArenaFullError, match="cannot map"):
        made.reserve(2)
    assert (made.slabs, os.fstat(made.fd).st_size) == (1, SLAB)


def test_available_memory_is_a_plausible_number() -> None:
    available = arena._available_bytes()
    assert available is None or 0 < available < 1 << 50


def test_segments_are_pinned_when_resident_and_unpinned_on_close() -> None:
    pinned: list[tuple[int, int]] = []
    unpinned: list[int] = []
    a = Arena(slab_bytes=SLAB, on_segment=lambda at, n: pinned.append((at, n)), on_release=unpinned.append)
    a.reserve(2)
    a.reserve(3)
    a.wait_resident()
    assert sorted(n for _, n in pinned) == [SLAB, 2 * SLAB]
    a.close()
    assert sorted(unpinned) == sorted(at for at, _ in pinned)
    a.close()  # twice is no error
    assert len(unpinned) == 2


def test_close_gives_the_memory_back() -> None:
    a = Arena(slab_bytes=SLAB)
    a.reserve(2)
    (view,) = a.views([0])
    fd = a.fd
    a.close()
    with pytest.raises(ValueError, match="released"):
        len(view)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@given(st.integers(0, 300), st.integers(0, 200), st.sampled_from([1, 7, 16, 64, 512]))
def test_pieces_are_the_bytes_asked_for(start: int, nbytes: int, slab_bytes: int) -> None:
    whole = bytes(i % 251 for i in range(1024))
    views = [memoryview(whole)[at : at + slab_bytes] for at in range(0, 1024, slab_bytes)]
    got = arena.pieces(views, slab_bytes, start, nbytes)
    assert b"".join(got) == whole[start : start + nbytes]
    assert all(got) and len(got) <= nbytes // slab_bytes + 2
