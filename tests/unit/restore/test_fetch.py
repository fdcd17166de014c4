"""The threads: one more GET for wrong bytes, the first error stops the rest, the scratch budget holds."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.memory_store import MemoryStore
from support.written import damage, only_pack, write_shards

from objckpt.errors import IntegrityError, StoreError
from objckpt.geometry import Box, whole
from objckpt.restore.fetch import fetch
from objckpt.restore.open import Checkpoint
from objckpt.restore.plan import Region, Request, box_runs, chunks_for, coalesce


class Scratch(Region):
    """Counts the scratch memory in use."""

    used = highest = 0
    lock = threading.Lock()

    def __init__(self, nbytes: int) -> None:
        super().__init__("w", None)
        self.scratch_bytes = nbytes

    def open(self) -> memoryview:
        if self.memory is None:
            self.memory = np.zeros(self.scratch_bytes, np.uint8).data
            with Scratch.lock:
                Scratch.used += self.scratch_bytes
                Scratch.highest = max(Scratch.highest, Scratch.used)
        return self.memory

    def close(self) -> None:
        assert self.pending == 0
        self.memory = None
        with Scratch.lock:
            Scratch.used -= self.scratch_bytes


@pytest.fixture
def written() -> tuple[MemoryStore, Checkpoint]:
    array = np.arange(64 * 1024, dtype="uint32").reshape(64, 1024)
    return write_shards({"w": (array, [whole(array.shape)])}, chunk_bytes=4096)


def plan(checkpoint: Checkpoint, out: np.ndarray[Any, Any], **limits: int) -> list[Request]:
    (shard,) = checkpoint.tensors["w"].shards
    return coalesce(chunks_for(shard, None, Region("w", out.reshape(-1).view(np.uint8).data)), **limits)


def test_bytes_damaged_on_the_way_are_fetched_once_more(
    written: tuple[MemoryStore, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, checkpoint = written
    get_into, calls = store.get_into, []

    def flaky(key: str, start: int, buffers: Any, **more: Any) -> None:
        calls.append((start, sum(len(b) for b in buffers)))

        def filled(number: int) -> None:
            if len(calls) == 1 and number == 2:
                buffers[2][7] ^= 1
            more["filled"](number)

        get_into(key, start, buffers, filled=filled)

    monkeypatch.setattr(store, "get_into", flaky)
    out = np.zeros((64, 1024), "uint32")
    fetch(store, plan(checkpoint, out), what="step 7")
    assert np.array_equal(out.reshape(-1), np.arange(out.size))
    assert calls == [(0, 64 * 4096), (2 * 4096, 4096)]


def test_the_first_error_stops_the_rest(written: tuple[MemoryStore, Checkpoint]) -> None:
    store, checkpoint = written
    damage(store, only_pack(store), 0)
    with pytest.raises(IntegrityError, match="CRC-64"):
        fetch(store, plan(checkpoint, np.zeros((64, 1024), "uint32"), max_request_bytes=4096), what="step 7")
    assert len(store.bucket.operations) < 30
    assert not [t for t in threading.enumerate() if t.name.startswith("objckpt-get")]


def test_an_object_that_vanished(written: tuple[MemoryStore, Checkpoint]) -> None:
    store, checkpoint = written
    key = only_pack(store)
    store.delete([key])
    with pytest.raises(IntegrityError, match=r"is missing.*holds w.*removed while") as caught:
        fetch(store, plan(checkpoint, np.zeros((64, 1024), "uint32")), what="step 7")
    assert caught.value.context == {"key": key, "fqn": "w"}


def test_a_short_object_names_the_leaf(written: tuple[MemoryStore, Checkpoint]) -> None:
    store, checkpoint = written
    full = f"run/{only_pack(store)}"
    store.bucket.objects[full] = (store.bucket.objects[full][0][:-1], 0.0)
    with pytest.raises(IntegrityError, match="step 7: w: ") as caught:
        fetch(store, plan(checkpoint, np.zeros((64, 1024), "uint32")), what="step 7")
    assert caught.value.context["fqn"] == "w"


def test_other_store_errors_come_as_they_are(written: tuple[MemoryStore, Checkpoint]) -> None:
    store, checkpoint = written
    error = StoreError("SlowDown for ever")

    def refuse(phase: str, operation: str, key: str) -> None:
        raise error

    store.bucket.hook = refuse
    with pytest.raises(StoreError) as caught:
        fetch(store, plan(checkpoint, np.zeros((64, 1024), "uint32"), max_request_bytes=8192), what="step 7")
    assert caught.value is error


@pytest.mark.parametrize("budget", [1, 8192, 20_000, 1 << 30])
def test_scratch_memory_is_bounded(written: tuple[MemoryStore, Checkpoint], budget: int) -> None:
    store, checkpoint = written
    (shard,) = checkpoint.tensors["w"].shards
    Scratch.used = Scratch.highest = 0
    chunks = []
    for row in range(64):  # regions that end inside requests and begin before others are done
        box = Box((row, 100), (1, 900))
        chunks += chunks_for(shard, box_runs(shard, box), Scratch(3600))
    chunks += chunks_for(shard, None, Scratch(64 * 4096))
    fetch(store, coalesce(chunks, max_request_bytes=12_288), what="step 7", budget_bytes=budget)
    assert Scratch.used == 0
    assert Scratch.highest <= max(budget, 64 * 4096 + 6 * 3600)


def test_progress_reaches_the_total_and_its_error_is_raised(written: tuple[MemoryStore, Checkpoint]) -> None:
    store, checkpoint = written
    seen: list[tuple[str, int, int]] = []
    out = np.zeros((64, 1024), "uint32")
    fetch(store, plan(checkpoint, out), what="step 7", progress=lambda *told: seen.append(told))
    assert seen[-1] == ("restore", out.nbytes, out.nbytes) and len(seen) == 64
    assert seen == sorted(seen)

    def broken(*told: Any) -> None:
        raise RuntimeError("a listener's fault")

    with pytest.raises(RuntimeError, match="listener"):
        fetch(store, plan(checkpoint, out), what="step 7", progress=broken)
