"""keep_last and keep_every on real servers and in memory: what stays, what goes, and that a save suffers from neither."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.memory_engine import memory_engine
from support.memory_store import MemoryBucket, MemoryStore

from objckpt import Checkpointer, SaveOptions, collect, restore
from objckpt.agent import server
from objckpt.agent.client import open_door
from objckpt.agent.protocol import agent_address
from objckpt.cli.main import run
from objckpt.errors import AccessError, NotCommittedError, SaveError, StoreError
from objckpt.format import keys
from objckpt.log import read_log
from objckpt.store import Store, open_store, open_uploads

ROOT = Path(__file__).resolve().parents[2]
URL = "s3://bucket/run"


def thread(**options: int) -> SaveOptions:
    return SaveOptions(uploader="thread", **options)  # type: ignore[arg-type]


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def train(url: str, steps: list[int], options: SaveOptions) -> None:
    """A session: resume, save, end."""
    with Checkpointer(url, options=options) as ckpt:
        ckpt.restore(state(0))
        for step in steps:
            ckpt.save(step, state(step), overwrite=True).wait_committed(60)


def steps(store: Store) -> list[int]:
    return [c.step for c in read_log(store).checkpoints]


def assert_exactly_the_live_is_there(store: Store) -> None:
    needed = set()
    for commit in read_log(store).checkpoints:
        checkpoint = restore.open_checkpoint(store, commit)
        assert restore.verify(store, checkpoint) == []
        assert restore.load(store, checkpoint)["step"] == commit.step
        needed |= {commit.index_key(0), *(key for index in checkpoint.indexes for key, _ in index.packs)}
    assert {info.key for info in store.list("data/")} == needed


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- real servers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [thread(keep_last=2), SaveOptions(keep_last=2)], ids=["thread", "process"])
def test_e098_the_last_two_of_the_log_stay_with_their_data_and_nothing_else(s3_url: str, options: SaveOptions) -> None:
    train(s3_url, [900, 1000, 9000, 10000], options)
    store = open_store(s3_url)
    assert steps(store) == [9000, 10000]
    assert_exactly_the_live_is_there(store)
    with Checkpointer(s3_url) as ckpt:
        assert ckpt.latest() == 10000
        with pytest.raises(NotCommittedError):
            ckpt.load(900)


def test_tags_multiples_and_the_one_resumed_from_stay(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(s3_url, [1, 2, 3, 4, 5], thread())
    assert run(["tag", s3_url, "3", "best"]) == 0
    train(s3_url, [6, 7, 8, 9, 10], thread(keep_last=1, keep_every=4))
    store = open_store(s3_url)
    assert steps(store) == [3, 4, 5, 8, 10]  # best; 4 and 8 are multiples; 5 was resumed from; the newest
    train(s3_url, [11], thread(keep_last=1, keep_every=4))
    assert steps(store) == [3, 4, 8, 10, 11]
    assert_exactly_the_live_is_there(store)


def test_rm_tag_and_gc(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(s3_url, [1, 2, 3, 4], thread())
    store = open_store(s3_url)
    lost = keys.attempt(9, read_log(store).newest().session, 99)
    store.put(keys.pack(lost, 0, 0), b"lost")

    async def begin() -> None:
        async with open_uploads(s3_url) as uploads:
            await uploads.create(keys.pack(lost, 0, 1))

    asyncio.run(begin())
    assert run(["rm", s3_url, "1", "2", "--yes"]) == 0 and steps(store) == [3, 4]
    capsys.readouterr()
    assert run(["gc", s3_url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waiting"] == [lost]
    assert run(["gc", s3_url, "--grace", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["given_up"] == [lost] and found["objects"] == [keys.pack(lost, 0, 0)]
    assert store.list_uploads() == []
    assert_exactly_the_live_is_there(store)


def test_run1_is_not_run10(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = f"{s3_url}/run1", f"{s3_url}/run10"
    for url in (mine, other):
        train(url, [1, 2, 3], thread())
    everything = open_store(s3_url)
    before = [info for info in everything.list() if info.key.startswith("run10/")]
    train(mine, [4], thread(keep_last=1))
    assert run(["rm", mine, "4", "--yes", "--force"]) == 0
    assert run(["gc", mine, "--grace", "0"]) == 0
    assert [info for info in everything.list() if info.key.startswith("run10/")] == before
    assert_exactly_the_live_is_there(open_store(mine))


@pytest.mark.slow
def test_more_objects_than_one_request_deletes(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(s3_url)
    train(s3_url, [1], thread())
    lost = keys.attempt(9, read_log(store).newest().session, 99)
    threads = [
        threading.Thread(target=lambda n=n: [store.put(keys.pack(lost, n, i), b"x") for i in range(130)])  # type: ignore[misc]
        for n in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(store.list("data/")) > 1000
    assert run(["gc", s3_url, "--grace", "0"]) == 0
    assert_exactly_the_live_is_there(store)


@pytest.mark.slow
def test_e100_two_processes_prune_at_once(weed_url: str) -> None:
    """Whoever is later finds the work done; nobody fails, and there is always a newest."""
    train(weed_url, [1], thread())
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for round_ in range(2):
        step = 10 * (round_ + 1)
        train(weed_url, [step, step + 1], thread())
        gone = [str(s) for s in steps(open_store(weed_url))[:-1]]
        command = [sys.executable, "-m", "objckpt", "rm", weed_url, *gone, "--yes"]
        both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        store = open_store(weed_url)
        while any(process.poll() is None for process in both):
            assert read_log(store).newest().step == step + 1
            time.sleep(0.02)  # both have the machine
        for process in both:
            assert process.stderr is not None
            told = process.stderr.read()
            process.stderr.close()
            # One that began after the other had ended is told that there is nothing of that name.
            assert process.returncode == 0 or (process.returncode == 4 and "is not committed" in told), told
        assert steps(store) == [step + 1]
        assert_exactly_the_live_is_there(store)


KILLED = """
import os, signal, sys, torch
from objckpt import Checkpointer, SaveOptions
ckpt = Checkpointer(sys.argv[1], options=SaveOptions(keep_last=1))
ckpt.restore({"w": torch.zeros(1000), "step": 0})
ckpt.save(4, {"w": torch.full((1000,), 4.0), "step": 4})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_that_dies_leaves_an_uploader_that_still_does_it(weed_url: str) -> None:
    train(weed_url, [1, 2, 3], thread())
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", KILLED, weed_url], env=env, check=False).returncode == -9
    store = open_store(weed_url)
    wait_until(lambda: steps(store) == [3, 4])
    wait_until(lambda: len({collect.attempt_of(info.key) for info in store.list("data/")}) == 2)
    assert_exactly_the_live_is_there(store)


def test_successors_do_not_wait_for_deletions() -> None:
    agent = object.__new__(server._Agent)
    url = f"s3://b/{os.getpid()}"
    door = open_door(url, 0)
    assert door is not None
    agent.trainer_pid, agent.door = os.getpid(), door
    meeting = threading.Thread(target=agent._meet_successors, args=(door,), daemon=True)
    meeting.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
        guest.connect(agent_address(url, 0))
        guest.settimeout(20)
        assert guest.recv(1) == b"T"
        agent._part_with_successors()
        assert guest.recv(1) == b""
    meeting.join(20)
    assert not meeting.is_alive()


# ---- in memory, where a moment can be held ---------------------------------------------------------------------------


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


def test_e022_the_older_one_stays_whole_until_the_newer_is_committed(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket, URL)
    with memory_engine(bucket):
        train(URL, [1], thread(keep_last=1))
        held, release = threading.Event(), threading.Event()

        def hook(phase: str, operation: str, key: str) -> None:
            if operation == "put_pieces" and phase == "before" and key.endswith(".index"):
                held.set()
                assert release.wait(30)
                raise StoreError("the store is out of order", status=500)

        bucket.hook = hook
        ckpt = Checkpointer(URL, options=thread(keep_last=1))
        ckpt.save(2, state(2))
        assert held.wait(30)
        assert ckpt.latest() == 1
        (commit,) = ckpt.checkpoints()
        assert restore.verify(store, restore.open_checkpoint(store, commit)) == []
        release.set()
        with pytest.raises(SaveError):
            ckpt.close()
        bucket.hook = lambda phase, operation, key: None
        assert steps(store) == [1]
        assert_exactly_the_live_is_there(store)  # what the failed save left behind is gone, too


def test_e027_a_save_after_a_failed_one_does_not_trip_over_it(
    bucket: MemoryBucket, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(bucket, URL)

    def hook(phase: str, operation: str, key: str) -> None:
        if operation in ("put_pieces", "part") and "s000000000001" in key:
            raise AccessError("AccessDenied", code="AccessDenied", status=403)

    bucket.hook = hook
    with memory_engine(bucket), Checkpointer(URL, options=thread(keep_last=1)) as ckpt:
        with pytest.raises(SaveError):
            ckpt.save(1, state(1)).wait_committed(20)
        caplog.clear()
        ckpt.save(2, state(2)).wait_committed(20)
    assert not caplog.records
    assert steps(store) == [2]
    assert_exactly_the_live_is_there(store)


def test_e104_a_commit_that_fails_leaves_the_older_one(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket, URL)
    with memory_engine(bucket):
        train(URL, [1], thread(keep_last=1))
        log_puts = 0

        def hook(phase: str, operation: str, key: str) -> None:
            nonlocal log_puts
            if operation == "put_if_absent" and phase == "before":
                log_puts += 1
                if log_puts > 1:  # the first is the session's open record
                    raise StoreError("denied", status=403, code="AccessDenied")

        bucket.hook = hook
        with pytest.raises(SaveError):
            train(URL, [2], thread(keep_last=1))
        bucket.hook = lambda phase, operation, key: None
        with Checkpointer(URL) as ckpt:
            into = state(0)
            assert ckpt.restore(into) == 1 and bool((into["w"] == 1).all())  # type: ignore[attr-defined]
        assert steps(store) == [1]


def test_remains_are_kept_while_their_commit_may_yet_come(bucket: MemoryBucket) -> None:
    """The answer to the commit is lost for good: the record may appear later, so its data has to be there."""
    store = MemoryStore(bucket, URL)
    late: list[tuple[str, bytes]] = []
    with memory_engine(bucket):
        train(URL, [1], thread())

        original = MemoryStore.put_if_absent

        def put_if_absent(self: MemoryStore, key: str, data: bytes) -> None:
            if len(store.list("data/")) > 2:  # the commit of step 2
                late.append((key, data))
                raise StoreError("denied after a time-out", status=403, code="AccessDenied")
            original(self, key, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryStore, "put_if_absent", put_if_absent)
            with pytest.raises(SaveError):
                train(URL, [2], thread(keep_last=1))
    store.put(*late[0])
    assert steps(store) == [1, 2]
    assert_exactly_the_live_is_there(store)


def test_a_hanging_deletion_holds_up_no_save(bucket: MemoryBucket) -> None:
    release, hanging = threading.Event(), threading.Event()

    def hook(phase: str, operation: str, key: str) -> None:
        if operation == "delete" and "data/" in key and phase == "before" and not release.is_set():
            hanging.set()
            assert release.wait(60)

    with memory_engine(bucket):
        bucket.hook = hook
        with Checkpointer(URL, options=thread(keep_last=1)) as ckpt:
            for step in range(1, 6):
                ckpt.save(step, state(step)).wait_committed(20)
            assert hanging.wait(20)
            ckpt.save(6, state(6)).wait_committed(20)
            assert MemoryStore(bucket, URL).list("data/")
            release.set()
    assert steps(MemoryStore(bucket, URL)) == [6]
    assert_exactly_the_live_is_there(MemoryStore(bucket, URL))  # close() has waited for it


def test_a_failure_of_retention_is_a_warning_and_made_up_for(
    bucket: MemoryBucket, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def hook(phase: str, operation: str, key: str) -> None:
        if broken and operation == "delete" and "data/" in key:
            raise StoreError("internal error", status=500)

    bucket.hook = hook
    store = MemoryStore(bucket, URL)
    with memory_engine(bucket), Checkpointer(URL, options=thread(keep_last=1)) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state(step)).wait_committed(20)
        wait_until(lambda: steps(store) == [4])
        wait_until(lambda: bool(caplog.records))
        assert len({collect.attempt_of(i.key) for i in store.list("data/")}) == 4
        broken = False
        ckpt.save(5, state(5)).wait_committed(20)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "retention failed" in caplog.text and "internal error" in caplog.text
    assert steps(store) == [5]
    assert_exactly_the_live_is_there(store)


def test_refused_deletions_are_told_once(bucket: MemoryBucket, caplog: pytest.LogCaptureFixture) -> None:
    def hook(phase: str, operation: str, key: str) -> None:
        if operation == "delete" and "data/" in key:
            raise AccessError("object lock", status=403, code="AccessDenied")

    bucket.hook = hook
    store = MemoryStore(bucket, URL)
    with memory_engine(bucket), Checkpointer(URL, options=thread(keep_last=1)) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state(step)).wait_committed(20)
    assert len(caplog.records) == 1 and "refused to delete" in caplog.text and "objckpt gc" in caplog.text
    assert steps(store) == [4]


def test_the_first_retention_cleans_up_after_former_sessions(bucket: MemoryBucket) -> None:
    store = MemoryStore(bucket, URL)
    with memory_engine(bucket):
        train(URL, [1], thread())
        lost = keys.attempt(2, read_log(store).newest().session, 2)
        store.put(keys.pack(lost, 0, 0), b"lost")
        train(URL, [3], thread())
        assert any(lost in info.key for info in store.list("data/"))  # without the option nothing is ever deleted
        train(URL, [4], thread(keep_last=5))
    assert steps(store) == [1, 3, 4]
    assert_exactly_the_live_is_there(store)
