"""Jobs of several ranks: real processes, one process group (gloo) a job.

    with Ranks() as ranks:
        results = ranks.run(4, JOBS / "jobs.py", "save", url, deadline_s=60)    # one value a rank

A nursery that has imported everything forks the ranks, so that a job starts in a moment. `save(rank, size, url)` runs on
each with its process group made. Values and arguments are pickled; the environment is that of the caller at `run`. A rank
that raises ends the job: the others get a moment, then everything is killed, and `run` raises with all tracebacks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

GRACE_S = 3.0  # for the other ranks, once one has failed
GROUP_TIMEOUT_S = 100.0
KILLED = "killed"  # the result of a rank that ended without one, where `run` is told to expect that


class RanksFailed(AssertionError):
    """Ranks raised, died, or were late."""


class Ranks:
    """The nursery. Not for several threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the nursery ends, and what it has forked dies with it
        self._process.wait(30)

    def run(
        self,
        size: int,
        script: Path,
        job: str,
        *args: Any,
        deadline_s: float = 110.0,
        may_die: tuple[int, ...] = (),
        group_timeout_s: float = GROUP_TIMEOUT_S,
    ) -> list[Any]:
        """Run `job(rank, size, *args)` of the file `script` on `size` ranks; the value of each. RanksFailed otherwise.

        Ranks in `may_die` may end without a result: theirs is KILLED then. Collectives fail after `group_timeout_s`.
        """
        with tempfile.TemporaryDirectory(prefix="ranks-") as name:
            folder = Path(name)
            request = {"script": str(script), "job": job, "args": args, "size": size, "environment": dict(os.environ)}
            request["group_timeout_s"] = group_timeout_s
            (folder / "request").write_bytes(pickle.dumps(request))
            assert self._process.stdin is not None and self._process.stdout is not None
            print(name, file=self._process.stdin)
            pids = json.loads(self._process.stdout.readline() or "null")
            if pids is None:
                raise RanksFailed(f"the nursery has ended with status {self._process.wait(10)}")
            late = _wait(pids, folder, deadline_s)
            results, problems = [], []
            for rank in range(size):
                found = _read(folder / str(rank))
                if found is None and rank in may_die:
                    found = (True, KILLED)
                if found is None:
                    found = (False, f"no result after {deadline_s:.0f} s" if late else "died or was ended early")
                results.append(found[1])
                if not found[0]:
                    problems.append(f"---- rank {rank} of {size}, {job}:\n{found[1]}")
            if problems:
                raise RanksFailed("\n".join(problems))
            return results


def _read(path: Path) -> tuple[bool, Any] | None:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _wait(pids: list[int], folder: Path, deadline_s: float) -> bool:
    """Until all have ended, or one has failed and the others had their moment; kills what is left. Whether time ran out."""
    end = time.monotonic() + deadline_s
    fds: dict[int, int] = {}
    for rank, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError):
            fds[os.pidfd_open(pid)] = rank
    failed = late = False
    try:
        while fds:
            left = end - time.monotonic()
            if left <= 0:
                late = not failed
                break
            for fd in select.select(list(fds), [], [], left)[0]:
                found = _read(folder / str(fds.pop(fd)))
                os.close(fd)
                if found is not None and not found[0] and not failed:
                    failed, end = True, min(end, time.monotonic() + GRACE_S)
    finally:
        for fd in fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for fd in fds:
            select.select([fd], [], [], 10)
            os.close(fd)
    return late


# ---- in the nursery and in the ranks -----------------------------------------------------------------------------------


def _nursery() -> None:
    import gc

    import torch
    import torch._dynamo  # what fully_shard and DTensor import late
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import objckpt.agent.server
    import objckpt.checkpointer
    import objckpt.cli.main
    import objckpt.store.s3
    import objckpt.store.uploads  # noqa: F401
    from objckpt.cli.local_server import end_with_parent

    torch.set_num_threads(1)  # a pool of OpenMP does not survive a fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        folder = Path(line.strip())
        request = pickle.loads((folder / "request").read_bytes())
        with contextlib.suppress(Exception):  # a rank tells why
            _load(Path(request["script"]))
        gc.collect()
        gc.freeze()  # a collection in a rank would copy every page of what is here
        pids = []
        for rank in range(request["size"]):
            tie = end_with_parent()
            pid = os.fork()
            if pid == 0:
                tie()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(0)
                os.dup2(2, 1)
                _rank(folder, rank, request)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


_loaded: dict[Path, ModuleType] = {}


def _load(script: Path) -> ModuleType:
    """Once: in the nursery, for all ranks to come."""
    if script not in _loaded:
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _loaded[script] = module
    return _loaded[script]


def _rank(folder: Path, rank: int, request: dict[str, Any]) -> None:
    """Does not return."""
    import datetime

    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(request["environment"] | {"GLOO_SOCKET_IFNAME": "lo"})
    try:
        module = _load(Path(request["script"]))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/group",
            rank=rank,
            world_size=request["size"],
            timeout=datetime.timedelta(seconds=request["group_timeout_s"]),
        )
        found = (True, getattr(module, request["job"])(rank, request["size"], *request["args"]))
        data = pickle.dumps(found)
    except BaseException:
        data = pickle.dumps((False, traceback.format_exc()))
    try:
        (folder / f"{rank}.new").write_bytes(data)
        (folder / f"{rank}.new").rename(folder / str(rank))
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    _nursery()
