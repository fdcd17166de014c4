"""Cases of the list of known failures of the field, through the public API. The server is a stub that faults to order."""

from __future__ import annotations

import collections
import gc
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import numpy as np
import pytest
import torch
from aiobotocore.session import AioSession
from support.servers import client_for
from support.stub_s3 import Reply, Request, Reset, StubBucket, StubServer, error

from objckpt import Checkpointer, SaveOptions, StoreOptions, limits
from objckpt.errors import (
    ArenaFullError,
    BusyError,
    MismatchError,
    NotCommittedError,
    ObjckptError,
    SaveError,
    StepOrderError,
    StoreError,
    UnsupportedTypeError,
    UsageError,
    WaitTimeout,
)
from objckpt.limits import MiB
from objckpt.store import retry

ROOT = Path(__file__).resolve().parents[2]
URL = "s3://bucket/run"


class Stub:
    """A stub server whose `fault(request)` goes first; `held` stalls the uploads of the packs of that step."""

    def __init__(self) -> None:
        self.bucket = StubBucket()
        self.fault: Callable[[Request], Any] = lambda request: None
        self.held: int | None = None
        self.reached, self.release = threading.Event(), threading.Event()
        self.server = StubServer(self._script)

    def _script(self, request: Request) -> Any:
        if self.held is not None and request.method == "PUT" and f"/s{self.held:012}-" in request.key:
            self.reached.set()
            self.release.wait(30)
        return self.fault(request) or self.bucket(request)

    def open(self, url: str = URL, *, deadline_s: float = 60.0, **options: Any) -> Checkpointer:
        store = StoreOptions(endpoint_url=self.server.url, retry_deadline_s=deadline_s, request_timeout_s=30)
        return Checkpointer(url, store=store, options=SaveOptions(**{"uploader": "thread"} | options))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, probed_once: Callable[[str], None]) -> Iterator[Stub]:
    probed_once("stub")
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    found = Stub()
    yield found
    found.release.set()
    found.server.close()


def deny_puts(request: Request) -> Any:
    return error(403, "AccessDenied", "no") if request.method in ("PUT", "POST") else None


def script(stub: Stub, text: str) -> subprocess.Popen[str]:
    """A trainer of its own, with `ckpt` open in thread mode."""
    head = (
        "from objckpt import *\n"
        f"ckpt = Checkpointer({URL!r}, store=StoreOptions(endpoint_url={stub.server.url!r}, retry_deadline_s=60),"
        " options=SaveOptions(uploader='thread'))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", head + text], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# ---- dtype and state ------------------------------------------------------------------------------------------------


def test_e002_tied_tensors_are_stored_once(stub):
    w = torch.randn(256, 256)
    with stub.open() as ckpt:
        handle = ckpt.save(1, {"emb.weight": w, "lm_head.weight": w})
        handle.wait_committed()
        assert handle.stats.stored_bytes == w.nbytes
        loaded = ckpt.load()
        assert torch.equal(loaded["emb.weight"], w) and torch.equal(loaded["lm_head.weight"], w)
        model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(256, 256), "lm_head": torch.nn.Linear(256, 256, False)})
        model["lm_head"].weight = model["emb"].weight
        ckpt.restore(model.state_dict())
        assert model["lm_head"].weight is model["emb"].weight and torch.equal(model["emb"].weight, w)


def test_e012_meta_tensors_are_refused_and_meta_models_filled(stub):
    model = torch.nn.Linear(3, 3)
    with stub.open() as ckpt:
        with pytest.raises(UnsupportedTypeError, match=r"^m: .*meta"):
            ckpt.save(1, {"m": torch.empty(3, device="meta")})
        ckpt.save(1, {"model": model})
        ckpt.wait()
        with torch.device("meta"):
            lazy = torch.nn.Linear(3, 3)
        ckpt.restore({"model": lazy})
    assert not any(p.is_meta for p in lazy.parameters())
    assert torch.equal(lazy.weight, model.weight) and torch.equal(lazy.bias, model.bias)


def test_e013_subclasses_are_refused_and_parameters_stored(stub):
    class Scaled(torch.Tensor):
        pass

    p = torch.nn.Parameter(torch.ones(3))
    with stub.open() as ckpt:
        with pytest.raises(UnsupportedTypeError, match=r"^w: .*Scaled"):
            ckpt.save(1, {"w": torch.ones(2).as_subclass(Scaled)})
        ckpt.save(1, {"p": p})
        ckpt.wait()
        loaded = ckpt.load()["p"]
    assert torch.equal(loaded, p.detach()) and not loaded.requires_grad and p.requires_grad


def test_e016_containers_come_back_as_they_were(stub):
    ordered = collections.OrderedDict([("z", 1), ("a", 2)])
    state = {"log": [{"k": 1}, {"k": 2}], "e": [], "d": {}, "n": None, "nested": [[torch.ones(1)], []], "o": ordered}
    with stub.open() as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        into = {"log": [], "e": [1], "d": {"x": 1}, "n": 3, "nested": [], "o": {}}
        ckpt.restore(into)
        for found in (into, ckpt.load()):
            assert torch.equal(found["nested"][0][0], torch.ones(1)) and found["nested"][1] == []
            assert {k: v for k, v in found.items() if k != "nested"} == {
                k: v for k, v in state.items() if k != "nested"
            }
            assert type(found["o"]) is collections.OrderedDict and list(found["o"]) == ["z", "a"]


def test_e021_rng_state_is_never_cast(stub):
    rng = torch.get_rng_state()
    with stub.open() as ckpt:
        ckpt.save(1, {"w": torch.rand(4), "rng": rng})
        ckpt.wait()
        into = {"w": torch.zeros(4, dtype=torch.bfloat16), "rng": torch.zeros_like(rng)}
        ckpt.restore(into, cast=True)
        for found in (into["rng"], ckpt.load(device="cpu")["rng"]):
            assert found.dtype == torch.uint8 and found.device.type == "cpu"
            torch.set_rng_state(found)
        assert into["w"].dtype == torch.bfloat16


# ---- commit ---------------------------------------------------------------------------------------------------------


def test_e022_newest_moves_only_with_the_commit(stub):
    with stub.open() as ckpt:
        ckpt.save(1, {"n": 1})
    before = dict(stub.bucket.objects)
    stub.held = 2
    trainer = script(stub, "ckpt.save(2, {'n': 2})\nckpt.wait()")
    try:
        assert stub.reached.wait(30)
        with stub.open() as ckpt:
            assert ckpt.latest() == 1
            assert before.items() <= stub.bucket.objects.items()
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
    with stub.open() as ckpt:
        state = {"n": 0}
        assert ckpt.restore(state) == 1 and state == {"n": 1}


def test_e027_a_failed_save_does_not_trip_the_next(stub):
    stub.fault = deny_puts
    with stub.open() as ckpt:
        with pytest.raises(SaveError, match="step 1"):
            ckpt.save(1, {"n": 1}).wait_committed()
        stub.fault = lambda request: None
        ckpt.save(2, {"n": 2}).wait_committed()
        assert [c.step for c in ckpt.checkpoints()] == [2]


def test_e034_a_failed_save_is_not_remembered(stub):
    with stub.open() as ckpt:
        ckpt.save(10, {"n": 10}).wait_committed()
    with stub.open() as ckpt:
        assert ckpt.restore({"n": 0}) == 10
        stub.fault = deny_puts
        with pytest.raises(SaveError):
            ckpt.save(20, {"n": 20}).wait_committed()
        stub.fault = lambda request: None
        assert ckpt.latest() == 10
        ckpt.save(20, {"n": 20}).wait_committed()
        first, second = ckpt.checkpoints()
        assert second.parent == first.seq  # the failed save in between keeps the line
        with pytest.raises(StepOrderError, match=r"15 .*20"):
            ckpt.save(15, {"n": 15})
        ckpt.restore({"n": 0}, step=10)
        ckpt.save(15, {"n": 15}).wait_committed()
        assert ckpt.latest() == 15


# ---- concurrency ----------------------------------------------------------------------------------------------------


def test_e036_changes_after_save_are_not_stored(stub):
    """Fifty times, the upload held back until the tensors have changed; restored into other tensors and compared whole."""
    w, s = torch.ones(1 << 15), torch.tensor(1.0)
    into = {"w": torch.zeros(1 << 15), "slice": torch.zeros(94), "zero": torch.tensor(0.0)}
    into["tied"] = into["w"]
    with stub.open() as ckpt:
        for step in range(1, 51):
            w.fill_(step), s.fill_(step)
            stub.held = step
            stub.release.clear()
            ckpt.save(step, {"w": w, "tied": w, "slice": w[5:99], "zero": s})
            w.fill_(-step), s.fill_(-step)
            stub.release.set()
            ckpt.wait()
            assert ckpt.restore(into) == step
            assert all(bool((t == step).all()) for t in into.values())
            for key in [k for k in stub.bucket.objects if k.endswith(".pack")]:
                del stub.bucket.objects[key]  # the stub is memory of this process
            stub.server.requests.clear()


def test_e038_replaced_storage_is_seen(stub):
    model = torch.nn.Linear(4, 4)
    with stub.open() as ckpt:
        ckpt.save(1, {"m": model})
        first = model.weight.detach().clone()
        for p in model.parameters():
            p.data = p.data.clone() + 1
        ckpt.save(2, {"m": model})
        model.weight = torch.nn.Parameter(torch.full((4, 4), 7.0))
        ckpt.save(3, {"m": model})
        ckpt.wait()
        one, two, three = (ckpt.load(step)["m"]["weight"] for step in (1, 2, 3))
    assert torch.equal(one, first) and torch.equal(two, first + 1) and torch.equal(three, torch.full((4, 4), 7.0))


def test_e039_the_structure_may_change(stub):
    states = [{"m": torch.ones(10)}, {"m": torch.ones(10), "o": torch.zeros(5)}, {"m": torch.ones(7).double()}]
    states.append({"m": torch.ones(10)})
    with stub.open() as ckpt:
        for step, state in enumerate(states):
            ckpt.save(step, state)
        ckpt.wait()
        for step, state in enumerate(states):
            loaded = ckpt.load(step)
            assert list(loaded) == list(state)
            assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in state.items())


def test_e042_reading_during_a_save_sees_the_one_before(stub):
    with stub.open() as ckpt:
        ckpt.save(1, {"n": 1}).wait_committed()
        stub.held = 2
        handle = ckpt.save(2, {"n": 2})
        assert stub.reached.wait(30)
        state = {"n": 0}
        with pytest.raises(NotCommittedError, match="step 2 is not committed"):
            ckpt.restore(state, step=2)
        assert ckpt.restore(state) == 1 and state == {"n": 1}
        stub.release.set()
        handle.wait_committed()
        assert ckpt.restore(state) == 2 and state == {"n": 2}


def test_e044_callbacks_get_the_step_of_the_save(stub):
    step, told = 1000, []
    with stub.open() as ckpt:
        handle = ckpt.save(step, {"n": 1}, on_commit=told.append)
        step = 1001
    assert (told, handle.step) == ([1000], 1000)
    with stub.open() as ckpt:
        assert [c.step for c in ckpt.checkpoints()] == [1000]


def test_e048_failures_reach_the_caller(stub):
    stub.fault = deny_puts
    ckpt = stub.open()
    handle = ckpt.save(1, {"n": 1})
    assert handle._settled.wait(30)
    with pytest.raises(SaveError, match=r"step 1 .*AccessDenied"):
        ckpt.save(2, {"n": 2})
    ckpt.save(2, {"n": 2})
    with pytest.raises(SaveError, match=r"step 2 .*AccessDenied"):
        ckpt.close()
    trainer = script(stub, "ckpt.save(1, {'n': 1})")
    _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 1 and "step 1" in err and "AccessDenied" in err
    stub.fault, stub.held = lambda request: None, 3
    ckpt = stub.open()
    ckpt.save(3, {"n": 3})
    with pytest.raises(WaitTimeout, match="not finished"):
        ckpt.close(timeout=0.1)
    stub.release.set()
    ckpt.close()


def test_e054_waiting_for_an_earlier_save_is_told(stub, caplog):
    caplog.set_level(logging.WARNING, "objckpt")
    state = {"w": torch.ones(4)}
    with stub.open() as ckpt, stub.open("s3://bucket/other", on_busy="raise") as strict:
        stub.held = 1
        ckpt.save(1, state)
        strict.save(1, state)
        with pytest.raises(BusyError, match="step 1 "):
            strict.save(2, state)
        assert stub.reached.wait(30)
        timer = threading.Timer(0.5, stub.release.set)
        timer.start()
        handle = ckpt.save(2, state)
        timer.join()
    assert handle.stats.blocked_s >= handle.stats.wait_s > 0.3
    assert "for the save of step 1" in caplog.text


# ---- memory ---------------------------------------------------------------------------------------------------------


def rss_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS"))


def test_e055_memory_does_not_grow_with_saves(stub):
    state = {"w": torch.ones(8 * MiB)}
    sizes = []
    with stub.open() as ckpt:
        for step in range(8):
            ckpt.save(step, state).wait_committed()
            for held in (stub.bucket.objects, stub.server.requests):
                held.clear() if isinstance(held, list) else [held.pop(k) for k in list(held) if k.endswith(".pack")]
            sizes.append(rss_bytes())
    assert sizes[-1] - sizes[2] < 64 * MiB


def test_e058_too_large_a_state_is_refused_before_anything_is_allocated(stub):
    with stub.open(arena_bytes=64 * MiB) as ckpt:
        with pytest.raises(ArenaFullError, match=r"134,217,728 bytes.*67,108,864"):
            ckpt.save(1, {"w": torch.empty(128 * MiB, dtype=torch.uint8)})
        assert ckpt._arena.nbytes == 0
        ckpt.save(1, {"w": torch.ones(3)}).wait_committed()


def test_e060_sources_are_not_kept(stub):
    stub.held = 1
    ckpt = stub.open()
    w = torch.ones(1000)
    ref = weakref.ref(w)
    ckpt.save(1, {"w": w})
    del w
    gc.collect()
    assert ref() is None
    stub.release.set()
    ckpt.close()
    assert (ckpt._arena.fd, ckpt._arena.slabs) == (-1, 0)


def test_a_save_that_waits_for_one_that_fails_says_so_and_does_not_start(stub):
    """The snapshot has room for one save: the second one waits for the first one's end, which is a failure."""
    stub.held = 1
    stub.fault = lambda request: deny_puts(request) if stub.reached.is_set() else None
    with stub.open() as ckpt:
        first = ckpt.save(1, {"w": torch.ones(1000)})
        assert stub.reached.wait(30)
        threading.Timer(0.3, stub.release.set).start()
        with pytest.raises(SaveError, match="step 1 was not committed"):
            ckpt.save(2, {"w": torch.ones(1000)})
        assert first.exception() is not None
        stub.fault = lambda request: None
        ckpt.save(2, {"w": torch.ones(1000)})
        ckpt.wait()
        assert [c.step for c in ckpt.checkpoints()] == [2]


def test_e061_clients_are_not_made_for_each_save(stub, monkeypatch, caplog):
    """300 saves: one client of each kind, sockets of one pool, no growth of descriptors, threads or memory."""
    made = []
    for cls in (botocore.session.Session, AioSession):
        create = cls.create_client
        monkeypatch.setattr(
            cls, "create_client", lambda *args, create=create, **more: (made.append(args), create(*args, **more))[1]
        )

    def resources() -> tuple[int, int]:
        """Beside the connections, of which each has a socket on both sides and a thread of the stub."""
        open_now = len(stub.server._connections)
        return len(os.listdir("/proc/self/fd")) - 2 * open_now, threading.active_count() - open_now

    state, most = {"w": torch.ones(256)}, 0
    with stub.open() as ckpt:
        for step in range(300):
            ckpt.save(step, state).wait_committed()
            most = max(most, len(stub.server._connections))
            if step == 49:
                before, before_bytes = resources(), rss_bytes()
            stub.server.requests.clear()
        after, after_bytes = resources(), rss_bytes()
        assert len(made) <= 2
        assert most <= ckpt._store.options.connections + limits.READERS + 4
        assert stub.server.connections_made <= 100  # idle ones end after 12 s and are made again
    assert after[0] - before[0] <= 4 and after[1] - before[1] <= 4, (before, after)
    assert after_bytes - before_bytes < 30 * MiB
    assert "pool is full" not in caplog.text  # urllib3 has a place for each reader of records


# ---- network --------------------------------------------------------------------------------------------------------


def test_e064_slow_down_is_answered_by_fewer_requests_and_longer_pauses(stub, monkeypatch):
    """The first 8 PUTs of every part and key are refused, through a whole save. Pauses are a tenth of the real ones,
    which would make this two minutes; their growth, and what they do to each other, is the same."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", retry.FIRST_PAUSE_S / 10)
    times: dict[tuple[str, int | None], list[float]] = collections.defaultdict(list)
    in_flight: dict[int, list[int]] = collections.defaultdict(list)  # by the number of the try
    lock = threading.Lock()

    def slow(request: Request) -> Any:
        if request.method != "PUT" or "/data/" not in request.key:
            return None
        _ = request.body
        with lock:
            seen = times[request.key, request.part]
            seen.append(request.at_s)
            if len(seen) > 8:
                return None
            in_flight[len(seen)].append(stub.server.in_flight)
        time.sleep(0.1)  # long against the first pauses: requests that are not held back meet here
        return error(503, "SlowDown", "Please reduce your request rate.")

    stub.fault = slow
    state = {"w": torch.arange(6 * MiB, dtype=torch.int64)}
    with stub.open(part_bytes=8 * MiB) as ckpt:
        ckpt.save(1, state).wait_committed(100)
        stub.fault = lambda request: None
        assert torch.equal(ckpt.load()["w"], state["w"])
    assert len(times) == 7 and all(len(seen) == 9 for seen in times.values())  # six parts and the index
    gaps = [[b - a for a, b in itertools.pairwise(seen)] for seen in times.values()]
    for row in gaps:
        # From below only: a gap has the wait for a place and for this machine in it, too.
        assert all(gap > 0.0124 * 2**n for n, gap in enumerate(row)), row
    assert len({round(row[-1], 2) for row in gaps}) > 3  # jitter
    assert max(in_flight[1]) > 2 and max(in_flight[4]) <= 2


# ---- resume ---------------------------------------------------------------------------------------------------------


def test_e098_order_is_that_of_the_log_not_of_the_text(stub):
    with stub.open() as ckpt:
        for step in (900, 1000, 9000, 10000):
            ckpt.save(step, {"n": step})
        ckpt.wait()
        assert ckpt.latest() == 10000
        assert [c.step for c in ckpt.checkpoints()] == [900, 1000, 9000, 10000]
    env = os.environ | {"PYTHONPATH": str(ROOT), "AWS_ENDPOINT_URL": stub.server.url}
    command = [sys.executable, "-m", "objckpt", "ls", "--json", URL]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert [c["step"] for c in json.loads(done.stdout)] == [900, 1000, 9000, 10000]


def test_e106_forms_of_one_url(stub):
    with stub.open() as ckpt:
        ckpt.save(1, {"n": 1})
    for url in (URL, URL + "/"):
        with stub.open(url) as ckpt:
            assert ckpt.restore({"n": 0}) == 1
    with pytest.raises(UsageError, match="lower case"):
        stub.open("S3" + URL[2:])
    with stub.open("s3://bucket/empty") as ckpt:
        assert ckpt.restore({"n": 0}) is None


FAULTS = {
    "denied": lambda r: error(403, "AccessDenied") if r.operation == "ListObjectsV2" else None,
    "busy": lambda r: error(503, "SlowDown") if r.operation == "ListObjectsV2" else None,
    "bucket": lambda r: error(404, "NoSuchBucket") if r.operation == "ListObjectsV2" else None,
    "reset": lambda r: Reset(0),
    "record-404": lambda r: Reply(404) if r.operation == "GetObject" else None,
    "record-500": lambda r: error(500, "InternalError") if r.operation == "GetObject" else None,
}


@pytest.mark.parametrize("name", FAULTS)
def test_e107_a_store_that_fails_is_not_an_empty_one(stub, name):
    with stub.open() as ckpt:
        ckpt.save(1, {"n": 1})
    stub.fault = FAULTS[name]
    with stub.open(deadline_s=0.3) as ckpt:
        state = {"n": 0}
        for ask in (ckpt.latest, lambda: ckpt.restore(state)):
            with pytest.raises(StoreError):
                ask()
        assert state == {"n": 0}


def test_e109_copies_are_checkpoints(s3_server, s3_url):
    with Checkpointer(s3_url, options=SaveOptions(uploader="thread")) as ckpt:
        ckpt.save(1, {"w": torch.arange(5)})
    client, (bucket, prefix) = client_for(s3_server), s3_url.removeprefix("s3://").split("/")
    for item in reversed(client.list_objects_v2(Bucket=bucket, Prefix=prefix + "/")["Contents"]):
        if "/probe/" in item["Key"]:
            continue  # JuiceFS lists the folder of deleted objects
        body = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        client.put_object(Bucket=bucket, Key="copy-" + item["Key"], Body=body)
    with Checkpointer(f"s3://{bucket}/copy-{prefix}") as ckpt:
        assert ckpt.latest() == 1 and torch.equal(ckpt.load()["w"], torch.arange(5))


def test_e110_older_steps_are_refused_before_any_upload(stub):
    with stub.open() as ckpt:
        ckpt.save(5, {"n": 5}).wait_committed()
        asked = len(stub.server.requests)
        for step in (5, 3):
            with pytest.raises(StepOrderError, match=f"step {step} "):
                ckpt.save(step, {"n": 0})
        assert len(stub.server.requests) == asked
        for step in (5, 3):
            ckpt.save(step, {"n": -step}, overwrite=True).wait_committed()
            assert ckpt.latest() == step and ckpt.load() == {"n": -step}


def test_e112_loader_positions_move_on(stub):
    with stub.open() as ckpt:
        ckpt.save(1, {"loader": {"epoch": 1, "pos": 75}}).wait_committed()
        state = {"loader": {"epoch": 0, "pos": 0}}
        ckpt.restore(state)
        state["loader"]["pos"] += 5
        ckpt.save(2, state)
        state["loader"]["pos"] = 99
        ckpt.wait()
        assert ckpt.load() == {"loader": {"epoch": 1, "pos": 80}}


def test_e113_plain_values_are_replaced(stub):
    saved = {"model": {"w": torch.ones(2)}, "epoch": 7, "lr": 0.01, "args": {"a": 1}}
    into = {"model": {"w": torch.zeros(2)}, "epoch": 0, "lr": 0.1, "args": {}}
    with stub.open() as ckpt:
        ckpt.save(1, saved).wait_committed()
        ckpt.restore(into)
    assert (into["epoch"], into["lr"], into["args"]) == (7, 0.01, {"a": 1})


# ---- load -----------------------------------------------------------------------------------------------------------


def test_e120_dtypes_are_not_cast_in_silence(stub):
    f, i = torch.rand(9) * 100, torch.tensor([16777217], dtype=torch.int32)
    with stub.open() as ckpt:
        ckpt.save(1, {"f": f, "i": i}).wait_committed()
        half, single = torch.zeros(9, dtype=torch.bfloat16), torch.zeros(1)
        with pytest.raises(MismatchError, match=r"f: dtype float32 .*bfloat16"):
            ckpt.restore({"f": half, "i": i.clone()})
        ckpt.restore({"f": half, "i": i.clone()}, cast=True)
        assert torch.equal(half, f.to(torch.bfloat16))
        for cast in (False, True):
            with pytest.raises(MismatchError, match=r"i: dtype int32 .*float32"):
                ckpt.restore({"f": f, "i": single}, cast=cast)
        assert single.item() == 0


def test_e122_missing_and_unexpected_leaves_are_listed(stub):
    w = torch.zeros(1)
    saved = {"opt": {"state": {0: {"exp_avg": w}}}, "extra": w, "a": torch.ones(1)}
    with stub.open() as ckpt:
        ckpt.save(1, saved).wait_committed()
        into = {"opt": {"state": {0: {"exp_avg": w}}}, "a": torch.zeros(1), "b": w, "c": w}
        with pytest.raises(MismatchError) as caught:
            ckpt.restore(into)
        assert (caught.value.context["missing"], caught.value.context["unexpected"]) == (["b", "c"], ["extra"])
        assert ckpt.restore(into, strict=False) == 1 and into["a"].item() == 1
        half = {"opt": {"state": {0: {"exp_avg": w, "step": w}}}, "a": w, "extra": w}
        for strict in (True, False):
            with pytest.raises(MismatchError, match=r"in part only.*step"):
                ckpt.restore(half, strict=strict)


def test_e123_no_gpu_is_needed(stub):
    with stub.open() as ckpt:
        ckpt.save(1, {"w": torch.ones(2), "device": torch.device("cuda:3")}).wait_committed()
        assert ckpt.load()["w"].device.type == "cpu" and not torch.cuda.is_initialized()
        assert ckpt.load()["device"] == torch.device("cuda:3")
        assert ckpt.load(device="meta")["w"].is_meta
        with pytest.raises(ObjckptError):
            ckpt.load(device={"cuda:3": "cpu"})


def test_e128_global_state_is_left_alone(stub):
    def look() -> tuple[Any, ...]:
        return (
            torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
            torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    before = look()
    state = {"m": torch.nn.ParameterDict({"w": torch.ones(3)}), "rng": torch.get_rng_state()}
    with stub.open() as ckpt:
        ckpt.save(1, state).wait_committed()
        ckpt.restore(state)
        ckpt.load()
    assert look() == before
