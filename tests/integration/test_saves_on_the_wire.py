"""What a save sends, in which order, and what it leaves behind: through the public API, seen by a stub server."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stub_s3 import Reply, Request, StubBucket, StubServer, error

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.errors import SaveError, UsageError
from objckpt.limits import MIN_PART_BYTES, MiB

ROOT = Path(__file__).resolve().parents[2]
URL = "s3://bucket/run"


class Seen:
    """A stub server: `fault(request)` goes first; `puts` has key and digest of every PUT, `spans` their times."""

    def __init__(self) -> None:
        self.bucket = StubBucket()
        self.fault: Callable[[Request], Any] = lambda request: None
        self.puts: list[tuple[str, str]] = []
        self.spans: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()
        self.server = StubServer(self._script)

    def _script(self, request: Request) -> Reply:
        start = time.monotonic()
        reply = self.fault(request) or self.bucket(request)
        with self._lock:
            if request.method in ("PUT", "POST"):
                self.spans.append((request.key, start, time.monotonic()))
            if request.operation == "PutObject" and "/probe/" not in request.key:
                self.puts.append((request.key, hashlib.sha256(request.body).hexdigest()))
        return reply

    def open(self, **options: Any) -> Checkpointer:
        store = StoreOptions(endpoint_url=self.server.url, retry_deadline_s=60, request_timeout_s=60)
        return Checkpointer(URL, store=store, options=SaveOptions(**{"uploader": "thread"} | options))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, probed_once: Callable[[str], None]) -> Iterator[Seen]:
    probed_once("stub")
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    found = Seen()
    yield found
    found.server.close()


def uploads_of(seen: Seen) -> list[str]:
    """The keys of the multipart uploads of saves; the store is probed by others."""
    begun = [r.key for r in seen.server.requests if r.operation == "CreateMultipartUpload"]
    return [key for key in begun if "/data/" in key]


def test_e023_the_record_goes_out_after_the_last_answer(seen):
    chance = random.Random(23)

    def late(request: Request) -> None:
        if "/data/" in request.key and request.method in ("PUT", "POST"):
            _ = request.body
            time.sleep(chance.uniform(0, 0.05))

    seen.fault = late
    state = {"w": torch.ones(6 * MiB)}
    with seen.open(part_bytes=8 * MiB) as ckpt:
        for step in range(6):
            seen.spans.clear()
            ckpt.save(step, state).wait_committed()
            data = [end for key, _, end in seen.spans if "/data/" in key]
            record = max(
                start for key, start, _ in seen.spans if "/log/" in key
            )  # of the first save: not its open record
            assert len(data) == 6  # create, three parts, complete, the index
            assert record > max(data)


def test_e025_a_second_try_writes_no_key_of_the_first(seen):
    with seen.open(part_bytes=8 * MiB) as ckpt:
        ckpt.save(5, {"w": torch.ones(4 * MiB)}).wait_committed()
        seen.fault = lambda request: error(403, "AccessDenied", "no") if (request.part or 0) > 1 else None
        with pytest.raises(SaveError, match="step 5"):
            ckpt.save(5, {"w": torch.full((4 * MiB,), 2.0)}, overwrite=True).wait_committed()
        seen.fault = lambda request: None
        assert bool((ckpt.load(5)["w"] == 1).all())
        ckpt.save(5, {"w": torch.full((4 * MiB,), 3.0)}, overwrite=True).wait_committed()
        assert bool((ckpt.load(5)["w"] == 3).all())
    keys = [key for key, _ in set(seen.puts)]
    assert len(keys) == len(set(keys)), "a key was written with other bytes"
    uploaded = uploads_of(seen)
    assert len(uploaded) == 3 == len(set(uploaded))


def test_e033_a_failed_save_leaves_no_multipart_upload(seen, caplog):
    caplog.set_level(logging.WARNING, "objckpt")

    def denied(request: Request) -> Any:
        return error(403, "AccessDenied", "no") if request.part == 3 else None

    seen.fault = denied
    with seen.open(part_bytes=8 * MiB) as ckpt:
        with pytest.raises(SaveError, match="AccessDenied"):
            ckpt.save(1, {"w": torch.ones(6 * MiB)}).wait_committed()
        assert len(uploads_of(seen)) == 1 and seen.bucket.uploads == {}

        def abort_denied(request: Request) -> Any:
            refused = request.operation == "AbortMultipartUpload"
            return error(403, "AccessDenied", "no") if refused else denied(request)

        seen.fault = abort_denied
        with pytest.raises(SaveError, match="AccessDenied"):
            ckpt.save(2, {"w": torch.ones(6 * MiB)}).wait_committed()
        ((upload_id, (key, _)),) = seen.bucket.uploads.items()
        assert upload_id in caplog.text and key.removeprefix("run/") in caplog.text


@pytest.mark.parametrize("uploader", ["thread", "process"])
def test_e045_workers_forked_during_a_save_end_and_disturb_nothing(seen, uploader):
    held, reached = threading.Event(), threading.Event()

    def hold(request: Request) -> None:
        if request.operation == "PutObject" and request.key.endswith(".pack"):
            reached.set()
            held.wait(60)

    seen.fault = hold
    with seen.open(uploader=uploader) as ckpt:
        handle = ckpt.save(1, {"w": torch.ones(1000)})
        assert reached.wait(30)
        loader = torch.utils.data.DataLoader(range(20), num_workers=2, collate_fn=list, multiprocessing_context="fork")
        for _ in range(2):
            assert sorted(n for batch in loader for n in batch) == list(range(20))
        assert not handle.done()
        held.set()
        handle.wait_committed(30)
    assert [key.rpartition("/")[0] for key, _ in seen.puts].count("run/log") == 2  # open and commit


def test_e078_no_part_but_the_last_is_too_small(seen):
    """Compression makes chunks of any size; S3 takes no small part in the middle."""
    noise = torch.randint(-(2**31), 2**31 - 1, (3 * MiB,), dtype=torch.int32)
    state = {"zeros": torch.zeros(4 * MiB), "noise": noise, "more": torch.zeros(2 * MiB)}
    with seen.open(part_bytes=8 * MiB, compression="zstd") as ckpt:
        handle = ckpt.save(1, state)
        handle.wait_committed()
        assert handle.stats.stored_bytes < 16 * MiB
        loaded = ckpt.load()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    parts = {r.part: int(r.headers["content-length"]) for r in seen.server.requests if r.part is not None}
    assert len(parts) >= 2
    assert all(size >= MIN_PART_BYTES for number, size in parts.items() if number < max(parts))


@pytest.mark.parametrize("nbytes", [0, -1, MIN_PART_BYTES - 1, 5_000_000, 3 * 2**30, 6 * 2**30])
def test_e078_e090_sizes_that_a_store_or_a_socket_would_refuse(nbytes):
    with pytest.raises(UsageError, match="part_bytes"):
        SaveOptions(part_bytes=nbytes)
    with pytest.raises(UsageError, match="chunk_bytes"):
        SaveOptions(chunk_bytes=nbytes)


def test_e134_the_library_prints_nothing_and_leaves_logging_alone(seen):
    code = (
        "import logging, torch\n"
        "from objckpt import Checkpointer, StoreOptions\n"
        f"with Checkpointer({URL!r}, store=StoreOptions(endpoint_url={seen.server.url!r})) as ckpt:\n"
        "    for step in range(3): ckpt.save(step, {'w': torch.ones(3)})\n"
        "    ckpt.wait()\n"
        "    ckpt.restore({'w': torch.zeros(3)})\n"
        "assert not logging.root.handlers and not logging.getLogger('objckpt').handlers\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert all("waited" in line for line in done.stderr.splitlines()), (
        done.stderr
    )  # Python's last resort: warnings only
