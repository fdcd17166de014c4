from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from objckpt.cli import local_server
from objckpt.errors import UsageError


@pytest.mark.parametrize("name", ["ab", "A-bucket", "a_b_c", "a/b", "", "x" * 64, "é" * 3, "---"])
def test_bucket_names(name, tmp_path):
    with pytest.raises(UsageError, match="not a bucket name"):
        local_server.start(tmp_path / "d", name)
    assert not (tmp_path / "d").exists()


def test_without_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"objckpt\[local\]"):
        local_server.start(tmp_path)


def test_ports_and_their_companions_are_free_and_distinct():
    ports: list[int] = []
    for _ in range(20):
        ports.append(local_server.free_port(ports))
    assert len({p for port in ports for p in (port, port + 10_000)}) == 40
    assert max(ports) + 10_000 < 32_768


def a_server(pid: int, ticks: int, directory: str = "/nowhere") -> local_server.LocalServer:
    return local_server.LocalServer(directory=directory, bucket="abc", pid=pid, ticks=ticks, ports={"s3": 1})


def test_a_recycled_pid_is_not_ours():
    """Its start time differs: stop() must not touch it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        server = a_server(process.pid, ticks=1)
        assert not server.alive()
        local_server.stop(server)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_what_ignores_sigterm_is_killed():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        ticks = local_server._start_ticks(process.pid)
        local_server._children[process.pid] = process
        local_server.stop(a_server(process.pid, ticks), patience_s=0.1)
        assert process.wait() == -signal.SIGKILL


def test_a_foreign_state_file_is_not_trusted(tmp_path):
    assert local_server.load(tmp_path) is None
    for text in ("", "[]", '{"pid": 1}', "\x00"):
        (tmp_path / "server.json").write_text(text)
        with pytest.raises(UsageError):
            local_server.load(tmp_path)


def test_a_failed_start_shows_the_log(tmp_path, monkeypatch):
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho disk on fire\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(local_server, "find_weed", lambda: str(program))
    with pytest.raises(local_server.ObjckptError, match="status 3") as caught:
        local_server.start(tmp_path / "d")
    assert caught.value.context["log"] == "disk on fire"
    assert not os.path.exists(tmp_path / "d" / "server.json")
