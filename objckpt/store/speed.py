"""Latency and throughput of a store, measured in bounded time with the clients that save and restore."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from objckpt import limits
from objckpt.format import checksums
from objckpt.store import open_uploads
from objckpt.store.interface import Store, Uploads

PART_BYTES = (limits.MIN_PART_BYTES, 16 * limits.MiB, 64 * limits.MiB)
CONCURRENCY = (1, 4, 8)
_SLICE_S = 0.5  # of one figure
_LONGEST_S = 3.0  # no figure is begun that would take longer
_MOST_BYTES = 192 * limits.MiB  # of one figure, but at least a part for each connection
_LATENCIES = 9


@dataclass(frozen=True, slots=True)
class Rate:
    """One figure. `bytes_per_s` is None when it was not measured, and `note` says why."""

    direction: Literal["write", "read"]
    part_bytes: int
    concurrency: int
    bytes_per_s: float | None
    note: str = ""


def latency_s(store: Store, root: str) -> tuple[float, float]:
    """Medians of a small PUT and of a small GET, in seconds. Raises StoreError."""
    key = f"{root}latency"
    try:
        puts = [_timed(lambda: store.put(key, bytes(4 * limits.KiB))) for _ in range(_LATENCIES)]
        gets = [_timed(lambda: store.get(key, max_bytes=limits.MiB)) for _ in range(_LATENCIES)]
    finally:
        store.delete([key])
    return statistics.median(puts), statistics.median(gets)


def _timed(send: Callable[[], object]) -> float:
    began = time.perf_counter()
    send()
    return time.perf_counter() - began


def rates(store: Store, root: str, *, budget_s: float) -> list[Rate]:
    """Throughput of writing by part size and concurrency, and of reading by concurrency. Blocks about `budget_s` at most.

    What it makes, under `root`, is aborted or deleted, also after an error or an interrupt. A slow store gets fewer
    figures. Raises StoreError.
    """
    end = time.monotonic() + budget_s
    data = memoryview(os.urandom(max(PART_BYTES)))
    found = asyncio.run(_writes(store, root, data, end - budget_s / 4))
    fastest = max((rate.bytes_per_s or 0.0 for rate in found), default=0.0)
    return found + _reads(store, root, data, fastest, end)


async def _writes(store: Store, root: str, data: memoryview, end: float) -> list[Rate]:
    found: list[Rate] = []
    fastest = 0.0
    async with open_uploads(store.url, store.options) as uploads:
        for part_bytes in PART_BYTES:
            crc = checksums.crc64(data[:part_bytes])
            for concurrency in CONCURRENCY:
                left_s = end - time.monotonic()
                expected_s = part_bytes * concurrency / fastest if fastest else 0.0
                if concurrency > store.options.connections:
                    note = f"more than the {store.options.connections} connections of the options"
                elif expected_s > min(_LONGEST_S, left_s) or left_s <= 0:
                    note = "would take too long"
                else:
                    key = f"{root}write-{part_bytes}-{concurrency}"
                    piece = data[:part_bytes]
                    speed = await _write(uploads, key, piece, crc, concurrency, max(left_s, 0.1))
                    fastest = max(fastest, speed or 0.0)
                    found.append(Rate("write", part_bytes, concurrency, speed, "" if speed else "no part in time"))
                    continue
                found.append(Rate("write", part_bytes, concurrency, None, note))
    return found


async def _write(
    uploads: Uploads, key: str, piece: memoryview, crc: int, concurrency: int, left_s: float
) -> float | None:
    """Bytes per second; None when not even one part got through in `left_s` seconds."""
    upload_id = await uploads.create(key)
    sent, began = 0, time.monotonic()
    last = began

    async def connection(number: int) -> None:
        nonlocal sent, last
        while True:  # the same part again and again: the store has to keep no more than one for each connection
            await uploads.part(key, upload_id, number, [piece], crc)
            sent, last = sent + len(piece), time.monotonic()
            if last - began > _SLICE_S or sent + concurrency * len(piece) > _MOST_BYTES:
                return

    try:
        async with asyncio.timeout(left_s):
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, concurrency + 1):
                    tasks.create_task(connection(number))
    except TimeoutError:
        pass
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await uploads.abort(key, upload_id)
    return sent / (last - began) if sent else None


def _reads(store: Store, root: str, data: memoryview, fastest: float, end: float) -> list[Rate]:
    # An object that can be written in a second.
    size = int(min(len(data), fastest)) // limits.MiB * limits.MiB
    if size < 2 * limits.MiB:
        return [Rate("read", size, n, None, "would take too long") for n in CONCURRENCY]
    key = f"{root}read"
    store.put(key, bytes(data[:size]))
    try:
        found = []
        for concurrency in CONCURRENCY:
            if concurrency > store.options.connections or end <= time.monotonic():
                found.append(Rate("read", size // 8, concurrency, None, "not tried"))
            else:
                found.append(_read(store, key, size // 8, concurrency, min(end, time.monotonic() + _SLICE_S)))
        return found
    finally:
        store.delete([key])


def _read(store: Store, key: str, part_bytes: int, concurrency: int, end: float) -> Rate:
    def connection(number: int) -> tuple[int, float]:
        target = memoryview(bytearray(part_bytes))
        got = 0
        while True:
            store.get_into(key, (number + got // part_bytes) % 8 * part_bytes, [target])
            got += part_bytes
            if time.monotonic() > end:
                return got, time.monotonic()

    began = time.monotonic()
    with ThreadPoolExecutor(concurrency, "objckpt-read") as pool:
        done = list(pool.map(connection, range(concurrency)))
    took_s = max(at for _, at in done) - began
    return Rate("read", part_bytes, concurrency, sum(got for got, _ in done) / took_s)
