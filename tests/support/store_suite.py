"""What every store must do. A test module gets these by `from support.store_suite import *` and a fixture `place`.

Run on each real server and on the in-memory reference: see `tests/conformance/test_store_*.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

import pytest
from awscrt.checksums import crc64nvme
from support.memory_store import MemoryBucket, MemoryStore, MemoryUploads

from objckpt.config import StoreOptions
from objckpt.errors import IntegrityError, NotFoundError, PreconditionFailedError, StoreError
from objckpt.limits import MIN_PART_BYTES
from objckpt.store import Store, Uploads, open_store, open_uploads

OPTIONS = StoreOptions(request_timeout_s=30, retry_deadline_s=60)


class Place:
    """One store under test: opens what belongs together."""

    def __init__(self, url: str, bucket: MemoryBucket | None) -> None:
        self.url, self.bucket = url, bucket
        self.opened: list[Store] = []

    def store(self, url: str | None = None) -> Store:
        url = url or self.url
        made: Store = MemoryStore(self.bucket, url, OPTIONS) if self.bucket else open_store(url, OPTIONS)
        self.opened.append(made)
        return made

    def uploads(self) -> AbstractAsyncContextManager[Uploads]:
        return MemoryUploads(self.bucket, self.url) if self.bucket else open_uploads(self.url, OPTIONS)

    def close(self) -> None:
        for store in self.opened:
            store.close()


@pytest.fixture
def store(place: Place) -> Store:
    return place.store()


def pieces_of(data: bytes, *cuts: int) -> list[memoryview]:
    edges = [0, *cuts, len(data)]
    return [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]


def read(store: Store, key: str, start: int, *sizes: int) -> list[bytes]:
    buffers = [bytearray(size) for size in sizes]
    store.get_into(key, start, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


# ---- small objects


def test_what_was_put_is_got_listed_and_headed(store: Store) -> None:
    store.put("log/00000000000000000001.msgpack", b"first")
    store.put("data/a/rank-0.pack", b"")
    assert store.get("log/00000000000000000001.msgpack", max_bytes=5) == b"first"
    assert store.get("data/a/rank-0.pack", max_bytes=0) == b""
    listed = store.list()
    assert [(info.key, info.size) for info in listed] == [
        ("data/a/rank-0.pack", 0),
        ("log/00000000000000000001.msgpack", 5),
    ]
    head = store.head("log/00000000000000000001.msgpack")
    assert (head.key, head.size) == ("log/00000000000000000001.msgpack", 5)
    assert abs(head.modified_s - listed[1].modified_s) < 2


def test_an_empty_prefix_lists_nothing(store: Store) -> None:
    assert store.list() == []
    assert store.list("log/") == []


def test_listing_is_sorted_and_starts_after(store: Store) -> None:
    keys = ["log/a-b", "log/a.b", "log/a/b", "log/a0", "log/b"]
    for key in keys:
        store.put(key, b"x")
    assert [info.key for info in store.list("log/")] == sorted(keys)
    assert [info.key for info in store.list("log/", start_after="log/b")] == []
    assert [info.key for info in store.list("log/a", start_after="log/a0")] == []
    assert "log/b" in [info.key for info in store.list("log/", start_after="log/a0")]


def test_a_listing_longer_than_a_page_is_complete(place: Place, store: Store) -> None:
    keys = [f"log/{n:020d}.msgpack" for n in range(1030)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    assert [info.key for info in store.list("log/")] == keys
    assert [info.key for info in store.list("log/", start_after=keys[1000])] == keys[1001:]
    assert store.delete(keys) == []
    assert store.list() == []


def test_a_sibling_prefix_is_another_store(place: Place, store: Store) -> None:
    other = place.store(place.url + "0")
    store.put("log/a", b"mine")
    other.put("log/b", b"theirs")
    assert [info.key for info in store.list()] == ["log/a"]
    assert [info.key for info in other.list()] == ["log/b"]


def test_missing_keys(store: Store) -> None:
    store.put("log/there", b"x")
    for call in (
        lambda: store.get("log/missing", max_bytes=10),
        lambda: store.head("log/missing"),
        lambda: read(store, "log/missing", 0, 10),
    ):
        with pytest.raises(NotFoundError, match="log/missing"):
            call()
    assert store.delete(["log/missing", "log/there", "log/other"]) == []
    assert store.list() == []


def test_an_object_longer_than_allowed_is_refused(store: Store) -> None:
    store.put("log/long", b"x" * 11)
    with pytest.raises(IntegrityError, match="11"):
        store.get("log/long", max_bytes=10)


def test_put_if_absent(place: Place, store: Store) -> None:
    store.put_if_absent("log/once", b"first")
    assert store.get("log/once", max_bytes=100) == b"first"
    try:
        store.put_if_absent("log/once", b"second")
    except PreconditionFailedError:
        assert store.get("log/once", max_bytes=100) == b"first"
    else:
        assert place.bucket is None, "the reference honours the condition"
        assert store.get("log/once", max_bytes=100) == b"second"  # a server that ignores the condition says success


# ---- ranges


def test_ranges_fill_the_buffers_in_turn(store: Store) -> None:
    data = os.urandom(3_000_001)
    store.put("data/x", data)
    sizes = [1, 0, 1_500_000, 7, 999_993]
    buffers = [bytearray(size) for size in sizes]
    filled: list[int] = []
    store.get_into("data/x", 500_000, [memoryview(buffer) for buffer in buffers], filled=filled.append)
    assert b"".join(buffers) == data[500_000:3_000_001]
    assert filled == [0, 1, 2, 3, 4]
    assert read(store, "data/x", 0, 3_000_001) == [data]
    assert read(store, "data/x", 3_000_000, 1) == [data[-1:]]
    assert read(store, "data/x", 5_000_000, 0) == [b""]


def test_a_range_beyond_the_end_is_an_error(store: Store) -> None:
    store.put("data/x", b"0123456789")
    for start, size in ((5, 6), (10, 1), (100, 5), (0, 11)):
        with pytest.raises(IntegrityError, match="data/x"):
            read(store, "data/x", start, size)


def test_many_threads_share_one_store(store: Store) -> None:
    data = os.urandom(1 << 20)
    store.put("data/x", data)

    def one(n: int) -> bool:
        return read(store, "data/x", n * 1000, 5000) == [data[n * 1000 : n * 1000 + 5000]]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(100)))


# ---- uploads


def test_put_of_pieces(place: Place, store: Store) -> None:
    data = os.urandom(2_500_000)

    async def upload() -> None:
        async with place.uploads() as uploads:
            await uploads.put("data/a", pieces_of(data, 1, 1_048_577, 2_000_000), crc64nvme(data))
            await uploads.put("data/b", pieces_of(data), None)
            await uploads.put("data/empty", [], crc64nvme(b""))

    asyncio.run(upload())
    assert read(store, "data/a", 0, len(data)) == [data]
    assert read(store, "data/b", 0, len(data)) == [data]
    assert store.head("data/empty").size == 0


@pytest.mark.parametrize("with_crc", [True, False])
def test_multipart(place: Place, store: Store, with_crc: bool) -> None:
    parts = [os.urandom(MIN_PART_BYTES), os.urandom(MIN_PART_BYTES), os.urandom(123_457)]
    data = b"".join(parts)

    async def upload() -> None:
        async with place.uploads() as uploads:
            upload_id = await uploads.create("data/m")
            tasks = [
                uploads.part("data/m", upload_id, n, pieces_of(part, 1000), crc64nvme(part) if with_crc else None)
                for n, part in enumerate(parts, 1)
            ]
            done = await asyncio.gather(*tasks)
            assert [part.size for part in done] == [len(part) for part in parts]
            assert store.list() == []  # nothing is visible before the completion
            await uploads.complete("data/m", upload_id, done, len(data), crc64nvme(data) if with_crc else None)
            await uploads.complete("data/m", upload_id, done, len(data), None)  # repeated after success

    asyncio.run(upload())
    assert [(info.key, info.size) for info in store.list()] == [("data/m", len(data))]
    assert read(store, "data/m", 0, len(data)) == [data]


def test_a_part_sent_twice_counts_once(place: Place, store: Store) -> None:
    part = os.urandom(MIN_PART_BYTES)

    async def upload() -> None:
        async with place.uploads() as uploads:
            upload_id = await uploads.create("data/m")
            first = await uploads.part("data/m", upload_id, 1, pieces_of(part), None)
            await uploads.part("data/m", upload_id, 1, pieces_of(part), None)
            await uploads.complete("data/m", upload_id, [first], len(part), None)

    asyncio.run(upload())
    assert read(store, "data/m", 0, len(part)) == [part]


def test_a_part_left_out_is_noticed_before_completion(place: Place, store: Store) -> None:
    part = os.urandom(MIN_PART_BYTES)

    async def upload() -> None:
        async with place.uploads() as uploads:
            upload_id = await uploads.create("data/m")
            second = await uploads.part("data/m", upload_id, 2, pieces_of(part), None)
            with pytest.raises(StoreError, match="parts"):
                await uploads.complete("data/m", upload_id, [second], len(part), None)
            await uploads.abort("data/m", upload_id)

    asyncio.run(upload())
    assert store.list() == []


def test_aborted_uploads_are_gone(place: Place, store: Store) -> None:
    async def upload() -> list[str]:
        async with place.uploads() as uploads:
            ids = [await uploads.create("data/m"), await uploads.create("data/n")]
            await uploads.part("data/m", ids[0], 1, pieces_of(b"x" * 1000), None)
            return ids

    first, second = asyncio.run(upload())
    assert {(u.key, u.upload_id) for u in store.list_uploads("data/m")} <= {("data/m", first)}
    store.abort_upload("data/m", first)
    store.abort_upload("data/m", first)  # gone already: no error

    async def abort() -> None:
        async with place.uploads() as uploads:
            await uploads.abort("data/n", second)
            await uploads.abort("data/n", second)
            with pytest.raises(StoreError):
                await uploads.part("data/n", second, 1, pieces_of(b"x" * 1000), None)

    asyncio.run(abort())
    assert store.list_uploads() == []


def test_a_buffer_may_change_once_the_upload_has_ended(place: Place, store: Store) -> None:
    buffer = bytearray(b"a" * 3_000_000)

    async def upload() -> None:
        async with place.uploads() as uploads:
            for n, letter in enumerate((b"a", b"b", b"c")):
                buffer[:] = letter * len(buffer)
                await uploads.put(f"data/{n}", [memoryview(buffer)], None)
                buffer[:] = b"!" * len(buffer)

    asyncio.run(upload())
    for n, letter in enumerate((b"a", b"b", b"c")):
        assert read(store, f"data/{n}", 0, 3_000_000) == [letter * 3_000_000]


def test_closing_twice_and_using_again(store: Store) -> None:
    store.put("log/a", b"x")
    store.close()
    store.close()
    assert store.get("log/a", max_bytes=1) == b"x"


def test_a_store_is_thread_safe_at_its_first_use(place: Place) -> None:
    store = place.store()
    barrier = threading.Barrier(8)

    def first(n: int) -> list[object]:
        barrier.wait()
        return list(store.list())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(first, range(8))) == [[]] * 8
