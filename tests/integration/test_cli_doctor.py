"""`objckpt doctor` against real servers, as a process or in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.handmade import put_checkpoint
from support.proxy import Proxy, Rule
from support.servers import GIVEN, client_for

from objckpt.store import open_store, speed

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "objckpt", "doctor", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def process(verb: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    with start(*arguments, **environment) as started:
        out, err = started.communicate(timeout=90)
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def contents(server) -> tuple[set[str], list[dict[str, str]]]:
    """Keys of the whole bucket, without the empty folders that JuiceFS keeps and lists; and unfinished uploads."""
    client = client_for(server)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket)
    keys = {entry["Key"] for page in pages for entry in page.get("Contents", []) if not entry["Key"].endswith("/")}
    return keys, client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])


def test_before_anything_is_there(s3_server, s3_url, here, monkeypatch):
    """All of it once as a process; on the second server with parts of one size, as their measuring is the same."""
    call = process
    if s3_server.name == "juicefs":
        call = here
        monkeypatch.setattr(speed, "PART_BYTES", speed.PART_BYTES[:1])
    before = contents(s3_server)
    began = time.monotonic()
    done = call("doctor", s3_url, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 60  # 10 to 15 s on an idle machine
    document = json.loads(done.stdout)
    assert document["ok"] and all(check["status"] != "FAIL" for check in document["checks"])
    assert abs(document["clock_skew_s"]) < 5 and document["latency_s"]["get"] > 0
    assert any(rate["bytes_per_s"] for rate in document["throughput"] if rate["direction"] == "write")
    if not GIVEN:
        assert document["log"]["mode"] == {"weed": "plain", "juicefs": "keyed"}[s3_server.name]
    assert contents(s3_server) == before


def test_beside_checkpoints(s3_server, s3_url, here):
    store = open_store(s3_url)
    put_checkpoint(store, 5, {"epoch": 3})
    store.close()
    before = contents(s3_server)
    done = here("doctor", s3_url, "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 checkpoints" in done.stdout and "verdict: states can be saved here and restored" in done.stdout
    assert contents(s3_server) == before


@pytest.mark.parametrize(
    ("url", "environment", "code", "check"),
    [
        (None, {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, 8, "credentials"),
        (None, {"AWS_PROFILE": "no-such-profile"}, 8, "credentials"),
        ("s3://no-such-bucket-here/x", {}, 9, "bucket"),
    ],
)
def test_what_is_wrong_is_named(s3_server, s3_url, here, url, environment, code, check):
    before = contents(s3_server)
    call = process if check == "bucket" and s3_server.name != "juicefs" else here  # one exit status of a process
    assert_named(call, url or s3_url, environment, code, check)
    assert contents(s3_server) == before


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_an_endpoint_where_nobody_is_is_named(weed_url, here, endpoint):
    assert_named(here, weed_url, {"AWS_ENDPOINT_URL": endpoint}, 10, "endpoint")


def assert_named(call, url, environment, code, check):
    began = time.monotonic()
    done = call("doctor", url, **environment)
    out = done.stdout
    assert done.returncode == code, out
    assert (
        done.stderr == ""
        and f"FAIL  {check} " in out
        and f"verdict: this store cannot be used yet: {check} failed" in out
    )
    assert out.count("FAIL") == 1 and "wrong-secret" not in out
    assert time.monotonic() - began < 40


def test_interrupted_it_leaves_nothing(s3_server, s3_url):
    """The signal comes while a part of a measuring upload has arrived, and its answer is kept back."""
    number = signal.SIGTERM if s3_server.name == "weed" else signal.SIGINT
    prefix = s3_url.removeprefix(f"s3://{s3_server.bucket}/")
    held = Rule(method="PUT", match="-write-.*partNumber=", answer_after=-1, then="stall")
    with Proxy(s3_server.endpoint_url, [held]) as proxy, start(s3_url, AWS_ENDPOINT_URL=proxy.url) as started:
        end = time.monotonic() + 60
        while not held.hit:
            assert started.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        listed = client_for(s3_server).list_multipart_uploads(Bucket=s3_server.bucket).get("Uploads", [])
        assert any(upload["Key"].startswith(prefix) and "write-" in upload["Key"] for upload in listed)
        started.send_signal(number)
        _, err = started.communicate(timeout=60)
    assert started.returncode == 128 + number and err == "objckpt: interrupted\n"
    keys, uploads = contents(s3_server)
    assert not [key for key in keys if key.startswith(prefix)]
    assert not [upload for upload in uploads if upload["Key"].startswith(prefix)]
