"""`objckpt local`: starts, serves, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from objckpt.cli import local_server
from objckpt.store import open_store

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "objckpt", "local"]


@pytest.fixture
def env(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("AWS_", "OBJCKPT_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return monkeypatch


@pytest.fixture
def directory(tmp_path):
    """A folder for a server that is stopped in any case."""
    yield tmp_path / "s3"
    server = local_server.load(tmp_path / "s3")
    if server is not None:
        local_server.kill(server)


def local(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60, check=False)


def exports(text: str) -> dict[str, str]:
    pairs = (shlex.split(line)[1].partition("=") for line in text.splitlines() if line.startswith("export "))
    return {name: value for name, _, value in pairs}


def use(env: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        env.setenv(name, value)


def no_sockets(server: local_server.LocalServer) -> bool:
    found = " ".join(os.listdir("/tmp"))
    return not any(f"-{port}.sock" in found or f"-{port + 10_000}.sock" in found for port in server.ports.values())


def test_detached(env, directory, here):
    done = local("--detach", "--dir", str(directory), "--bucket", "abc")
    assert done.returncode == 0, done.stderr
    variables = exports(done.stdout)
    assert list(variables)[:4] == ["AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"]
    server = local_server.load(directory)
    assert int(variables["OBJCKPT_LOCAL_PID"]) == server.pid and server.alive()
    use(env, variables)
    store = open_store("s3://abc/x")
    assert store.list() == []
    store.put("a", b"kept")

    again = here("local", "--detach", "--dir", str(directory), "--bucket", "abc")
    assert (again.returncode, again.stdout) == (0, done.stdout) and "runs already" in again.stderr
    again = here("local", "--detach", "--dir", str(directory))
    assert again.returncode == 2 and re.fullmatch(r"objckpt: error: a server already runs in [^\n]+\n", again.stderr)

    stopped = local("--stop", "--dir", str(directory))
    assert stopped.returncode == 0 and not server.alive() and no_sockets(server)
    assert here("local", "--stop", "--dir", str(directory)).returncode == 2

    done = local("--detach", "--json", "--dir", str(directory), "--bucket", "abc")
    document = json.loads(done.stdout)
    use(env, document["environment"])
    assert open_store("s3://abc/x").get("a", max_bytes=10) == b"kept"
    assert here("local", "--stop", "--json", "--dir", str(directory)).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground(env, directory, number):
    env.setenv("AWS_SESSION_TOKEN", "old")
    with subprocess.Popen(
        [*CLI, "--dir", str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        lines = [started.stdout.readline() for _ in range(5)]
        assert lines[0] == "unset AWS_SESSION_TOKEN\n"
        env.delenv("AWS_SESSION_TOKEN")
        use(env, exports("".join(lines)))
        assert open_store("s3://checkpoints/x").list() == []
        server = local_server.load(directory)
        started.send_signal(number)
        assert started.wait(timeout=30) == 0
        assert started.stderr.read() == ""
    assert not server.alive() and no_sockets(server)


def test_the_end_of_the_server_is_an_error(env, directory):
    with subprocess.Popen(
        [*CLI, "--dir", str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        for _ in range(4):
            started.stdout.readline()
        os.kill(local_server.load(directory).pid, signal.SIGKILL)
        assert started.wait(timeout=30) == 1
        assert "has ended by itself" in started.stderr.read()


def test_it_dies_with_a_killed_parent(env, directory):
    with subprocess.Popen([*CLI, "--dir", str(directory)], stdout=subprocess.PIPE) as started:
        for _ in range(4):
            started.stdout.readline()
        server = local_server.load(directory)
        started.kill()
        started.wait()
    local_server.stop(server, patience_s=0)  # waits for its end; nothing to stop
    assert not server.alive()
