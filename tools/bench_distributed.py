"""Measures a job of several ranks on this machine: every tensor is a DTensor cut by rows, as FSDP2 makes them.

    python tools/bench_distributed.py                      1 GiB in all, 4 ranks, to the null server
    python tools/bench_distributed.py --peers              … and DCP's save and async_save through s3torchconnector
    python tools/bench_distributed.py --gib 0.5 --ranks 2

Ranks are processes with a gloo group. "blocked" is what the slowest rank was kept by the save, "all" the time from the
first rank's call to the last rank's commit. "read" is what the null server sent for a restore into tensors that are cut
by columns instead, and for one into the same layout, as multiples of the checkpoint. Figures are medians of the repeats.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import bench_runner
import contenders
import measure
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_runner import Target
from measure import GB, MiB
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, dict[str, DTensor]]
PEERS = ("dcp", "dcp-async")


class Contender(Protocol):
    name: str

    def save(self, state: State) -> tuple[float, float]:
        """Seconds blocked, and the clock when this rank knows that all is stored."""

    def load(self, into: State) -> None: ...
    def close(self) -> None: ...


class Objckpt:
    name = "objckpt"

    def __init__(self, endpoint: str, url: str) -> None:
        from objckpt import Checkpointer, StoreOptions

        self.ckpt = Checkpointer(url, store=StoreOptions(endpoint_url=endpoint, region="us-east-1"))
        self.step = 0

    def save(self, state: State) -> tuple[float, float]:
        self.step += 1
        start = time.perf_counter()
        handle = self.ckpt.save(self.step, state)
        blocked_s = time.perf_counter() - start
        handle.wait_committed(600)
        return blocked_s, time.perf_counter()

    def load(self, into: State) -> None:
        self.ckpt.restore(into)

    def close(self) -> None:
        self.ckpt.close()


class Dcp:
    """torch.distributed.checkpoint on all ranks, through s3torchconnector."""

    def __init__(self, endpoint: str, url: str, asynchronous: bool) -> None:
        self.storage = contenders.ConnectorDcp(endpoint, url)
        self.url, self.asynchronous, self.saves = url, asynchronous, 0
        self.name = "DCP async_save + s3torchconnector" if asynchronous else "DCP + s3torchconnector"

    def save(self, state: State) -> tuple[float, float]:
        from torch.distributed import checkpoint as dcp

        self.saves += 1
        start = time.perf_counter()
        writer = self.storage.writer(f"{self.url}/{self.saves}/")
        if self.asynchronous:
            future = dcp.async_save(state, storage_writer=writer)
            blocked_s = time.perf_counter() - start
            future.result()
        else:
            dcp.save(state, storage_writer=writer)
            blocked_s = time.perf_counter() - start
        return blocked_s, time.perf_counter()

    def load(self, into: State) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.load(into, storage_reader=self.storage.reader(f"{self.url}/{self.saves}/"))

    def close(self) -> None:
        pass


def contender(name: str, endpoint: str, url: str) -> Contender:
    if name == "objckpt":
        return Objckpt(endpoint, url)
    if name in PEERS:
        return Dcp(endpoint, url, asynchronous=name == "dcp-async")
    raise SystemExit(f"unknown contender {name!r}")


# ---- one rank --------------------------------------------------------------------------------------------------------


def local_parts(nbytes: int, rank: int) -> contenders.State:
    """The rows of one rank: those of rank 0, plus its number."""
    state = contenders.make_state(nbytes)
    for tensor in contenders.tensors(state):
        tensor.add_(rank)
    return state


def by_rows(parts: contenders.State, mesh: Any) -> State:
    return {
        part: {n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in tensors.items()}
        for part, tensors in parts.items()
    }


def empty(parts: contenders.State, mesh: Any, *, columns: bool) -> State:
    """Tensors of the same global shapes, cut by columns where they have some."""
    size, out = mesh.size(), {}
    for part, tensors in parts.items():
        out[part] = {}
        for name, t in tensors.items():
            cut = columns and t.dim() == 2
            shape = (t.shape[0] * size, t.shape[1] // size) if cut else t.shape
            out[part][name] = DTensor.from_local(torch.zeros(shape), mesh, [Shard(int(cut))], run_check=False)
    return out


def check(found: State, parts: contenders.State, rank: int, size: int) -> None:
    """What was restored must be what was saved, on whatever ranks."""
    for part, tensors in found.items():
        for name, value in tensors.items():
            local, mine = value.to_local(), parts[part][name]
            if value.placements[0] == Shard(0):
                same = torch.equal(local, mine)
            else:  # all ranks' rows follow from this rank's, but for rounding
                width = local.shape[1]
                columns = mine[:, rank * width : (rank + 1) * width]
                rows = local.view(size, *columns.shape)
                same = torch.equal(rows[rank], columns) and all(
                    torch.allclose(rows[r], columns + (r - rank), rtol=0, atol=1e-4) for r in range(size)
                )
            if not same:
                raise SystemExit(f"rank {rank}: {part}/{name} is not what was saved")


def sent_bytes(endpoint: str) -> int:
    """What the null server has sent so far."""
    with urllib.request.urlopen(endpoint, timeout=10) as answer:
        found = re.search(rb"<SentBytes>(\d+)", answer.read())
    if found is None:
        raise SystemExit("bytes read are counted by the null server only")
    return int(found[1])


def rank_main(rank: int, size: int, rendezvous: str, job: dict[str, Any], answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    parts = local_parts(job["nbytes"] // size, rank)
    state = by_rows(parts, mesh)
    made = contender(job["contender"], job["endpoint"], job["url"])
    result: dict[str, Any] = {"name": made.name, "saves": [], "read": {}}
    for _ in range(job["repeats"] + 1 if job["measure"] == "time" else 1):
        dist.barrier()
        start = time.perf_counter()
        blocked_s, end = made.save(state)
        result["saves"].append({"blocked_s": blocked_s, "start": start, "end": end})
    if job["measure"] == "read":
        for layout in ("rows", "columns", "rows"):  # the first one makes connections; the later one of a name counts
            target = empty(parts, mesh, columns=layout == "columns")
            dist.barrier()
            before = sent_bytes(job["endpoint"])
            dist.barrier()
            start = time.perf_counter()
            made.load(target)
            dist.barrier()
            result["read"][layout] = {"s": time.perf_counter() - start, "bytes": sent_bytes(job["endpoint"]) - before}
            check(target, parts, rank, size)
    made.close()
    answers.put((rank, result))
    dist.barrier()
    dist.destroy_process_group()


# ---- the job ---------------------------------------------------------------------------------------------------------


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement of one contender, on all ranks. They are forked, as imports take longer than all else."""
    torch.set_num_threads(1)  # a pool of OpenMP does not survive a fork
    for module in ("torch._dynamo", "torch.distributed.checkpoint", "objckpt"):
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        answers = mp.get_context("fork").SimpleQueue()
        running = mp.start_processes(
            rank_main,
            (job["ranks"], str(Path(folder) / "group"), job, answers),
            nprocs=job["ranks"],
            join=False,
            start_method="fork",
        )
        found: dict[int, dict[str, Any]] = {}
        while len(found) < job["ranks"]:
            while not answers.empty():
                rank, result = answers.get()
                found[rank] = result
            running.join(0.2)  # raises when a rank has failed
        while not running.join(60):
            pass
    saves = [
        {
            "blocked_s": max(found[rank]["saves"][n]["blocked_s"] for rank in found),
            "total_s": max(found[r]["saves"][n]["end"] for r in found)
            - min(found[r]["saves"][n]["start"] for r in found),
        }
        for n in range(len(found[0]["saves"]))
    ]
    return {"name": found[0]["name"], "saves": saves, "read": found[0]["read"]}


def main() -> int:
    parser = bench_runner.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--receive", choices=("copy", "drop"), default="copy", help="the null server's way of reading")
    parser.set_defaults(gib=1.0)
    args = parser.parse_args()
    if args.worker:
        return bench_runner.answer(work, args.worker)
    names = args.contenders.split(",") + (list(PEERS) if args.peers else [])
    nbytes = int(args.gib * (1 << 30)) // (4 * args.ranks) * 4 * args.ranks
    print(bench_runner.headline(f"{args.ranks} ranks save and restore", nbytes, args))
    results: dict[str, dict[str, Any]] = {}
    job = {"nbytes": nbytes, "repeats": args.repeats, "ranks": args.ranks}
    with bench_runner.server(args, keep_bytes=0) as endpoint:
        for name in names:
            results[name] = bench_runner.run(__file__, {**job, "contender": name, "endpoint": endpoint}, "time", args)
    for name in names if not args.endpoint else ():
        with bench_runner.server(args, keep_bytes=int(nbytes * 1.1) + 64 * MiB) as endpoint:
            read = bench_runner.run(__file__, {**job, "contender": name, "endpoint": endpoint}, "read", args)
            results[name]["read"] = read["read"]
    head = ("", "blocked first", "warm", "all s", "GB/s", "read by columns", "GB/s", "read by rows", "GB/s")
    print(measure.table([head, *(row(result, nbytes) for result in results.values())]))
    bench_runner.write_json(args, {"nbytes": nbytes, "ranks": args.ranks, "results": results})
    return bench_runner.verdict(targets(results, nbytes), args)


def _warm(result: dict[str, Any], key: str) -> float:
    return measure.median([save[key] for save in result["saves"][1:]])


def row(result: dict[str, Any], nbytes: int) -> tuple[str, ...]:
    gb, total_s = nbytes / GB, _warm(result, "total_s")
    read = []
    for layout in ("columns", "rows"):
        found = result["read"].get(layout)
        read += ["-", "-"] if found is None else [f"{found['bytes'] / nbytes:.2f} ×", f"{gb / found['s']:.2f}"]
    return (
        result["name"],
        f"{result['saves'][0]['blocked_s']:.2f} s",
        f"{_warm(result, 'blocked_s'):.2f} s",
        f"{total_s:.2f}",
        f"{gb / total_s:.2f}",
        *read,
    )


def targets(results: dict[str, dict[str, Any]], nbytes: int) -> list[Target]:
    """What this package promises of itself, as far as this run has measured it."""
    ours, found = results.get("objckpt"), []
    if ours is None:
        return []
    for layout, entry in ours["read"].items():
        found.append(Target(f"bytes read by {layout}, by checkpoint", entry["bytes"] / nbytes, "<=", 1.1))
    if "dcp-async" in results:
        theirs = _warm(results["dcp-async"], "blocked_s")
        found.append(Target("blocked, by DCP async_save", _warm(ours, "blocked_s") / theirs, "<=", 0.25))
    if "dcp" in results:
        found.append(Target("throughput, by DCP", _warm(results["dcp"], "total_s") / _warm(ours, "total_s"), ">=", 2))
    return found


if __name__ == "__main__":
    sys.exit(main())
