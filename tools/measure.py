"""What the benchmarks read from the machine: versions, CPU seconds, proportional memory; and how they print it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

GB = 1e9
MiB = 1 << 20
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """CPU, cores, memory and kernel in one line."""
    models = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "name" in line
    ]
    cpu = models[0] if models else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def versions(*packages: str) -> str:
    """`name version` of Python and of the packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def cpu_s(pid: int) -> float:
    """User and system CPU seconds of a process, its threads included; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def pss_bytes(pid: int) -> int:
    """Proportional set size: pages shared with another process (the arena) count once in the sum over processes."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def children(pid: int) -> list[int]:
    """All living descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


@dataclass
class Peak:
    """The highest sum of PSS seen, and each process's share of it at that moment."""

    total: int = 0
    shares: dict[int, int] = field(default_factory=dict)


@contextlib.contextmanager
def watch_memory(pids: Callable[[], list[int]], every_s: float = 0.1) -> Iterator[Peak]:
    """Sample PSS of `pids()` while the block runs. A sample of a 4 GiB process takes about 10 ms of CPU."""
    peak, stop = Peak(), threading.Event()

    def sample() -> None:
        found = pids()
        first = {pid: pss_bytes(pid) for pid in found}
        # Twice, there and back: while one process maps what another has, a single round would count it one and a half times.
        shares = {pid: (first[pid] + pss_bytes(pid)) // 2 for pid in reversed(found)}
        if sum(shares.values()) > peak.total:
            peak.total, peak.shares = sum(shares.values()), shares

    def run() -> None:
        while not stop.wait(every_s):
            sample()

    sample()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        sample()


def timed(action: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    return statistics.median(values)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns aligned; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
