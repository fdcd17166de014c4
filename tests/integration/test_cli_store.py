"""The command against real servers: as a process of its own where that shows more than a call of `run` in this one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.handmade import put_checkpoint
from support.servers import GIVEN, lead_to
from support.stub_s3 import Reply, Request, StubBucket, StubServer

from objckpt.cli.main import run
from objckpt.format import keys
from objckpt.format.records import Commit
from objckpt.store import calls, open_store

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "objckpt"]
STATE = {"model": {"w": np.arange(300_000, dtype=np.float32)}, "epoch": 3}


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([*CLI, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False)


def put_many(url: str, count: int) -> None:
    """Records of `count` checkpoints, which is what a listing reads."""
    store = open_store(url)
    first = put_checkpoint(store, 0, {"epoch": 0})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda commit: store.put(keys.record(commit.seq), commit.encode()), _copies(first, count)))
    store.close()


def _copies(first: Commit, count: int) -> Iterator[Commit]:
    for i in range(1, count):
        attempt = keys.attempt(i, first.session, i)
        yield dataclasses.replace(first, seq=i, step=i, attempt=attempt, write_id=os.urandom(16))


def test_verbs(s3_server, s3_url, tmp_path, here):
    call = here if s3_server.name == "juicefs" else cli  # processes on one server
    store = open_store(s3_url)
    put_checkpoint(store, 5, STATE)
    for arguments in (["ls"], ["show"], ["verify"], ["restore", "--out", str(tmp_path / "x.pt")]):
        done = call(*arguments, s3_url)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout
    pack = next(info.key for info in store.list("data/") if info.key.endswith(".pack"))
    store.put(pack, b"x" * 1_200_000)
    done = call("verify", s3_url)
    assert done.returncode == 5 and "model/w" in done.stdout and done.stderr == ""


def test_empty_torn_and_missing(s3_server, s3_url, tmp_path, here):
    out = str(tmp_path / "x.pt")
    torn = open_store(f"{s3_url}/torn")
    torn.put("data/s000000000001-00000000000000000000000000-0000/rank-00000-0000.pack", b"x")
    for url in (s3_url + "/empty", s3_url + "/torn"):
        assert here("ls", url).returncode == 0
    assert f"beside it are {s3_url}/torn" in here("ls", s3_url + "/empty").stderr
    assert f"below it are {s3_url}/torn" in here("ls", s3_url).stderr
    for url in (s3_url + "/empty", s3_url + "/torn"):
        done = here("ls", url, "--json")
        assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
        done = here("restore", url, "--out", out)
        assert done.returncode == 4 and f"no committed checkpoint under {url}" in done.stderr
    for arguments in (["ls"], ["ls", "--json"], ["restore", "--out", out]):
        # One verb as a process: its exit status, and what it has from its environment alone.
        call = cli if arguments == ["ls"] and s3_server.name != "juicefs" else here
        done = call(*arguments, "s3://no-such-bucket-here/x")
        assert done.returncode == 9 and done.stdout == ""
        assert re.fullmatch(r"objckpt: error: .*no-such-bucket-here.*NoSuchBucket.*\n", done.stderr)
        done = call(*arguments, s3_url, AWS_SECRET_ACCESS_KEY="wrong-secret")
        assert done.returncode == 8 and done.stdout == ""
        assert re.fullmatch(r"objckpt: error: .*SignatureDoesNotMatch.*\n", done.stderr)
        assert "wrong-secret" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_listing_asks_for_each_record_once(monkeypatch, here):
    """Pages of 40 keys: one LIST a page, one GET a record, and at most one look for something else. Timed by bench_cli."""
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        if request.operation == "ListObjectsV2":
            request.query["max-keys"] = "40"
        return bucket(request)

    with StubServer(script) as server:
        for name, value in (("ENDPOINT_URL", server.url), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
            monkeypatch.setenv(f"AWS_{name}", value)
        put_many("s3://bucket/run", 100)
        server.requests.clear()
        done = here("ls", "s3://bucket/run")
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 101, done.stderr
        pages = [r for r in server.requests if r.query.get("prefix") == "run/log/"]
        records = [r.key for r in server.requests if r.operation == "GetObject"]
        assert len(pages) == 3
        assert len(records) == len(set(records)) == 100
        assert len(server.requests) <= 104


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_head(many_url, form, unbuffered):
    script = f'"$PYTHON" -m objckpt ls {many_url} {form} | head -1; echo "${{PIPESTATUS[0]}}"'
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
    first, status = done.stdout.splitlines()
    assert status == "0" and done.stderr == ""
    assert first.startswith('[{"step": 0,' if form else "STEP")


@pytest.fixture(scope="module")
def many_url(request):
    """500 checkpoints, made once."""
    with pytest.MonkeyPatch.context() as patch:
        url = lead_to(request.getfixturevalue("given_server" if GIVEN else "weed_server"), patch)
        put_many(url, 500)
        yield url


@pytest.mark.parametrize("arguments", ["--help", "restore --help", "--version"])
def test_nobody_reads_the_help(arguments):
    script = f'exec 3> >(exec true); sleep 0.3; "$PYTHON" -m objckpt {arguments} >&3'
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_installed_command_is_a_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["scripts"]["objckpt"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


HOSTILE = ["../../x", "/etc/y", "a/../../b", "C:\\z", "nul\0byte", "n" * 5000]


@pytest.mark.parametrize("key", HOSTILE, ids=lambda key: ascii(key)[:12])
def test_hostile_names_lead_nowhere(s3_url, tmp_path, key, capsys):
    put_checkpoint(open_store(s3_url), 1, {"good": np.ones(3), key: {"w": np.ones(3)}})
    target = tmp_path / "a" / "b" / "out"
    target.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert run(["restore", s3_url, "--out", f"{target}/"]) == 5
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"objckpt: error: [^\n]+\n", err)
    assert sorted(tmp_path.rglob("*")) == before
    assert not os.path.exists("/etc/y") and not os.path.exists("/etc/y.pt")


@pytest.mark.parametrize("close", ["stdout", "stderr"])
def test_closed_streams(weed_url, close):
    script = f'"$PYTHON" -m objckpt ls {weed_url} {">&-" if close == "stdout" else "2>&-"}'
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_full_disk_is_an_error(weed_url):
    put_checkpoint(open_store(weed_url), 1, {"epoch": 1})
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CLI, "ls", weed_url], env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert re.fullmatch(r"objckpt: error: No space left on device.*\n", done.stderr)


def test_reading_commands_do_not_import_torch(weed_url):
    put_checkpoint(open_store(weed_url), 1, STATE)
    code = (
        "import sys; from objckpt.cli.main import run; codes = [run(a.split()) for a in sys.argv[1:]]; "
        "print(codes, [m for m in ('torch', 'aiobotocore', 'rich') if m in sys.modules])"
    )
    verbs = [f"{verb} {weed_url}" for verb in ("ls", "show --values", "verify")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *verbs], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []", done.stdout + done.stderr


def test_secrets_stay_out_of_sight(weed_url, here, monkeypatch):
    secret, token, password = "marker-SECRET-0001", "marker-TOKEN-0002", "marker-PASSWORD-0003"
    endpoint = os.environ["AWS_ENDPOINT_URL"].replace("://", f"://user:{password}@")
    done = cli(
        "ls", weed_url, "--debug", AWS_SECRET_ACCESS_KEY=secret, AWS_SESSION_TOKEN=token, AWS_ENDPOINT_URL=endpoint
    )
    assert done.returncode not in (0, 2) and "Traceback" in done.stderr
    for marker in (secret, token, password):
        assert marker not in done.stdout + done.stderr
    monkeypatch.setattr(calls, "FIRST_CONTACT_S", 0.5)
    done = here("ls", weed_url, "--endpoint-url", f"http://user:{password}@127.0.0.1:1", "--debug")
    assert done.returncode != 0 and password not in done.stdout + done.stderr


def test_progress_only_on_a_terminal(weed_url, here):
    put_checkpoint(open_store(weed_url), 1, STATE)
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen([*CLI, "verify", weed_url], env=env, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        drawn = b""
        try:
            while piece := os.read(ours, 65536):
                drawn += piece
        except OSError:  # EIO: the other side has closed
            pass
        assert process.stdout.read().startswith(b"step 1: 1 tensors")
        assert process.wait() == 0
    os.close(ours)
    assert b"verify" in drawn and b"\x1b[" in drawn and b"\x1b[?25h" in drawn
    assert here("verify", weed_url).stderr == ""


LISTING = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><Prefix>x/log/</Prefix>
<KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents>
<Key>x/log/00000000000000000000.msgpack</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>
<ETag>"0"</ETag><Size>9</Size></Contents></ListBucketResult>"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_does_not_wait_for_the_store(number):
    """The listing is answered, the GET of the record in it never is: its thread cannot be interrupted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        env = os.environ | {"PYTHONPATH": str(ROOT), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        with (
            subprocess.Popen(
                [*CLI, "ls", "s3://bucket/x"],
                env=env,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509 – a background job ignores SIGINT
            ) as process,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(process.kill)  # whatever fails: leaving the block waits for its end
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(LISTING)}\r\nConnection: close\r\n\r\n"
            for _ in ("bundles, of which it has none", "records"):
                listing, _ = server.accept()
                listing.recv(65536)
                listing.sendall((head + LISTING).encode())
            record, _ = server.accept()
            assert record.recv(65536).startswith(b"GET /bucket/x/log/00000000000000000000.msgpack")
            start = time.monotonic()
            process.send_signal(number)
            assert process.wait(timeout=10) == 128 + number
            assert time.monotonic() - start < 3
            assert process.stderr.read() == "objckpt: interrupted\n"
            listing.close()
            record.close()


def test_json_of_all_verbs(weed_url, tmp_path, here):
    put_checkpoint(open_store(weed_url), 1, STATE)
    for arguments in (["ls"], ["show"], ["verify"], ["restore", "--out", str(tmp_path / "x.safetensors")]):
        done = here(*arguments, weed_url, "--json")
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
