"""The uploader's event loop: parts are made beside it, failures abort what was begun."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.memory_store import MemoryBucket, MemoryUploads

from objckpt.errors import StoreError
from objckpt.format import checksums, keys
from objckpt.save.encode import Part
from objckpt.save.upload import upload_packs

URL = "s3://bucket/run"
ATTEMPT = keys.attempt(1, "0" * 26, 0)


def parts(count: int, work_s: float = 0.0, threads: set[int] | None = None) -> Iterator[Part]:
    """Parts of one pack; each takes `work_s` seconds of blocking work, as checksums and codecs do."""
    for number in range(1, count + 1):
        time.sleep(work_s)
        if threads is not None:
            threads.add(threading.get_ident())
        data = bytes([number]) * 100
        yield Part(0, number, [memoryview(data)], 100, checksums.crc64(data), number == count)


async def send(bucket: MemoryBucket, made: Iterator[Part], connections: int = 3) -> None:
    with ThreadPoolExecutor(1) as reader:
        await upload_packs(
            MemoryUploads(bucket, URL), made, attempt=ATTEMPT, rank=0, connections=connections, reader=reader,
            progress=lambda nbytes: None,
        )  # fmt: skip


def test_e070_work_on_parts_never_holds_the_loop():
    async def probed() -> float:
        worst = 0.0
        sending = asyncio.create_task(send(bucket, parts(5, work_s=0.3, threads=threads)))
        while not sending.done():
            start = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - start)
        await sending
        return worst

    bucket, threads = MemoryBucket(), set()
    assert asyncio.run(probed()) < 0.25
    assert threading.get_ident() not in threads
    (data, _) = bucket.objects["run/" + keys.pack(ATTEMPT, 0, 0)]
    assert data == b"".join(bytes([n]) * 100 for n in range(1, 6))


@pytest.mark.parametrize("failing", ["part", "complete"])
def test_e033_a_failure_aborts_the_upload_and_is_raised_as_itself(failing):
    def hook(phase: str, operation: str, key: str) -> None:
        if phase == "before" and operation == failing:
            raise StoreError("refused", key=key)

    bucket = MemoryBucket(hook)
    with pytest.raises(StoreError, match="refused"):
        asyncio.run(send(bucket, parts(4)))
    assert bucket.uploads == {} and bucket.objects == {}


def test_e033_cancelling_aborts_too():
    async def cancelled() -> None:
        sent = asyncio.Event()
        bucket.hook = lambda phase, operation, key: sent.set() if (phase, operation) == ("after", "part") else None
        sending = asyncio.create_task(send(bucket, parts(50, work_s=0.01)))
        await sent.wait()
        assert bucket.uploads
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    bucket = MemoryBucket()
    asyncio.run(cancelled())
    assert bucket.uploads == {} and bucket.objects == {}


def test_a_part_is_drawn_only_for_a_free_connection():
    """That bounds the memory, however many parts there are."""
    drawn, most = 0, 0

    def counted() -> Iterator[Part]:
        nonlocal drawn
        for part in parts(40):
            drawn += 1
            yield part

    def hook(phase: str, operation: str, key: str) -> None:
        nonlocal drawn, most
        if phase == "before" and operation == "part":
            most = max(most, drawn)
        elif phase == "after" and operation == "part":
            drawn -= 1

    asyncio.run(send(MemoryBucket(hook), counted(), connections=3))
    assert most <= 4
