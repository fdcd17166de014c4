"""The benchmarks run end to end, on a small state, and their yardsticks measure what they say."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import bench_runner
import contenders
import measure
import pytest
import torch

TOOLS = Path(measure.__file__).parent
MiB = 1 << 20


@pytest.mark.parametrize("nbytes", [4, 10 * MiB + 4, 90 * MiB])
def test_state_has_the_size_asked_for(nbytes):
    state = contenders.make_state(nbytes)
    found = list(contenders.tensors(state))
    assert sum(t.nbytes for t in found) == nbytes
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in found)
    assert contenders.memcpy_s(state) > 0


def test_memory_counts_shared_pages_once():
    before = measure.pss_bytes(os.getpid())
    block = mmap.mmap(-1, 64 * MiB)  # fresh pages, whatever this process has freed before
    block.write(bytes(64 * MiB))
    assert 60 * MiB < measure.pss_bytes(os.getpid()) - before < 80 * MiB
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with measure.watch_memory(lambda: [os.getpid(), *measure.children(os.getpid())], every_s=0.01) as peak:
            assert child.pid in measure.children(os.getpid())
        assert peak.total >= len(block)
    finally:
        child.communicate(b"\n")


def test_cpu_seconds_of_a_process():
    before, end = measure.cpu_s(os.getpid()), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert measure.cpu_s(os.getpid()) - before >= 0.15


@pytest.mark.parametrize(("relation", "value", "met"), [("<=", 1.0, True), ("<=", 1.1, False), (">=", 0.9, False)])
def test_targets(relation, value, met):
    assert bench_runner.Target("x", value, relation, 1.0).met is met


@pytest.fixture
def benchmark(monkeypatch, capsys, tmp_path):
    """Runs a benchmark's `main` here, its measurements in processes of their own as ever: its figures, and what it printed."""

    def call(tool: str, *options: str) -> tuple[dict, str]:
        found = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", [str(TOOLS / f"{tool}.py"), *options, "--json", str(found)])
        with mock.patch.dict(os.environ):
            assert importlib.import_module(tool).main() == 0
        return json.loads(found.read_text())["results"], capsys.readouterr().out

    return call


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["bench_save", "bench_restore"])
def test_benchmark_of_a_small_state(tool, benchmark):
    flat = ["--flat", "4"] if tool == "bench_save" else []
    results, told = benchmark(tool, "--gib", str(16 / 1024), "--repeats", "1", *flat)
    assert results["objckpt"]["peak"] > 16 * MiB
    for word in ("raw sockets", "objckpt", "cores", "torch", "target"):
        assert word in told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tool", "options", "figure"),
    [
        ("bench_cli", ["--checkpoints", "3", "--repeats", "1"], "ls"),
        ("bench_log", ["--records", "300", "--live", "20", "--repeats", "1"], "read_log"),
        ("bench_distributed", ["--gib", str(16 / 1024), "--ranks", "2", "--repeats", "1"], "objckpt"),
    ],
)
def test_benchmark_in_small(tool, options, figure, benchmark):
    results, told = benchmark(tool, *options)
    assert results[figure]
    assert "cores" in told and figure in told


def test_a_benchmark_is_a_script():
    command = [sys.executable, str(TOOLS / "bench_log.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "--records" in done.stdout, done.stderr


@pytest.mark.timeout(120)
def test_simulated_ranks_read_the_indexes_that_they_need():
    command = [sys.executable, str(TOOLS / "simulate_scale.py"), "--ranks", "64", "--tensors", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("indexes_read ")[1].split()[0] for line in lines if "plan" in line] == ["2", "4", "5", "1", "1"]
    assert "manifest_bytes 2," in lines[0]
