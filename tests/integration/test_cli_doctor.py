"""`objckpt doctor` as a process, against real servers."""

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
from support.servers import GIVEN, client_for

from objckpt.store import open_store

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "objckpt", "doctor", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def doctor(*arguments: str, **environment: str) -> tuple[int, str, str]:
    with start(*arguments, **environment) as process:
        out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def contents(server) -> tuple[set[str], list[dict[str, str]]]:
    """Keys of the whole bucket, without the empty folders that JuiceFS keeps and lists; and unfinished uploads."""
    client = client_for(server)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket)
    keys = {entry["Key"] for page in pages for entry in page.get("Contents", []) if not entry["Key"].endswith("/")}
    return keys, client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])


def test_before_anything_is_there(s3_server, s3_url):
    before = contents(s3_server)
    began = time.monotonic()
    code, out, err = doctor(s3_url, "--json")
    assert (code, err) == (0, "")
    assert time.monotonic() - began < 60  # 10 to 15 s on an idle machine
    document = json.loads(out)
    assert document["ok"] and all(check["status"] != "FAIL" for check in document["checks"])
    assert abs(document["clock_skew_s"]) < 5 and document["latency_s"]["get"] > 0
    assert any(rate["bytes_per_s"] for rate in document["throughput"] if rate["direction"] == "write")
    if not GIVEN:
        assert document["log"]["mode"] == {"weed": "plain", "juicefs": "keyed"}[s3_server.name]
    assert contents(s3_server) == before


def test_beside_checkpoints(s3_server, s3_url):
    store = open_store(s3_url)
    put_checkpoint(store, 5, {"epoch": 3})
    store.close()
    before = contents(s3_server)
    code, out, err = doctor(s3_url, "--quick")
    assert (code, err) == (0, "")
    assert "1 checkpoints" in out and "verdict: states can be saved here and restored" in out
    assert contents(s3_server) == before


@pytest.mark.parametrize(
    ("url", "environment", "code", "check"),
    [
        (None, {"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, 8, "credentials"),
        (None, {"AWS_PROFILE": "no-such-profile"}, 8, "credentials"),
        ("s3://no-such-bucket-here/x", {}, 9, "bucket"),
        (None, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, 10, "endpoint"),
        (None, {"AWS_ENDPOINT_URL": "http://no-such-host.invalid"}, 10, "endpoint"),
    ],
)
def test_what_is_wrong_is_named(s3_server, s3_url, url, environment, code, check):
    before = contents(s3_server)
    began = time.monotonic()
    found, out, err = doctor(url or s3_url, **environment)
    assert found == code, out
    assert err == "" and f"FAIL  {check} " in out and f"verdict: this store cannot be used yet: {check} failed" in out
    assert out.count("FAIL") == 1 and "wrong-secret" not in out
    assert time.monotonic() - began < 40
    assert contents(s3_server) == before


def test_interrupted_it_leaves_nothing(s3_server, s3_url):
    number = signal.SIGTERM if s3_server.name == "weed" else signal.SIGINT
    prefix = s3_url.removeprefix(f"s3://{s3_server.bucket}/")
    client = client_for(s3_server)

    def is_uploading() -> bool:
        listed = client.list_multipart_uploads(Bucket=s3_server.bucket).get("Uploads", [])
        return any(upload["Key"].startswith(prefix) and "write-" in upload["Key"] for upload in listed)

    with start(s3_url) as process:
        end = time.monotonic() + 60
        while not is_uploading():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and err == "objckpt: interrupted\n"
    keys, uploads = contents(s3_server)
    assert not [key for key in keys if key.startswith(prefix)]
    assert not [upload for upload in uploads if upload["Key"].startswith(prefix)]
