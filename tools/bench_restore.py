"""Measures restoring into CPU tensors, beside raw sockets and (with --peers) other libraries.

    python tools/bench_restore.py                2 GiB from a null server that keeps what it is given
    python tools/bench_restore.py --peers        … and DCP load through s3torchconnector, boto3 + torch.load
    python tools/bench_restore.py --endpoint http://host:9000 --bucket bench --gib 0.5      a real server

A contender saves a state in one process. In another it is loaded, again and again, into tensors that are there already, as
a model's are; in a third once, its memory watched: what that process has beyond the state is the restore's own. What
arrives is compared with what was saved, outside the measured time. Figures are medians of the repeats.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import bench_runner
import measure
from bench_runner import Target
from measure import GB, MiB

if TYPE_CHECKING:
    import contenders  # imports torch, which only the processes that save and load need


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One contender: a process that saves, and one for each measurement of loading."""
    if job["measure"] != "restore":
        return {"save": _save, "time": _time, "memory": _memory}[job["measure"]](job)
    saved = _child(job, "save")
    job = {**job, "digests": saved["digests"]}
    return {**saved, **_child(job, "memory"), **_child(job, "time")}


def _child(job: dict[str, Any], measurement: str) -> dict[str, Any]:
    print(f"… {job['contender']}: {measurement}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--worker", json.dumps({**job, "measure": measurement})],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{job['contender']} ({measurement}) ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _save(job: dict[str, Any]) -> dict[str, Any]:
    import contenders

    state = contenders.make_state(job["nbytes"])
    contender = contenders.contender(job["contender"], job["endpoint"], job["url"])
    contender.save(state)
    contender.close()
    return {"name": contender.name, "digests": _digests(state)}


def _time(job: dict[str, Any]) -> dict[str, Any]:
    target, contender = _target(job)
    loads = []
    for _ in range(job["repeats"] + 1):
        _zero(target)
        cpu, start = time.process_time(), time.perf_counter()
        contender.load(target)
        loads.append({"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu})
        _check(target, job)
    contender.close()
    return {"loads": loads}


def _memory(job: dict[str, Any]) -> dict[str, Any]:
    target, contender = _target(job)
    me = os.getpid()
    before = measure.pss_bytes(me)
    with measure.watch_memory(lambda: [me]) as peak:
        contender.load(target)
    _check(target, job)
    contender.close()
    return {"before": before, "peak": peak.total}


def _target(job: dict[str, Any]) -> tuple[contenders.State, contenders.Contender]:
    """Touched tensors that hold something else, and who loads into them."""
    import contenders

    state = contenders.make_state(job["nbytes"])
    _zero(state)
    return state, contenders.contender(job["contender"], job["endpoint"], job["url"])


def _check(state: contenders.State, job: dict[str, Any]) -> None:
    if _digests(state) != job["digests"]:
        raise SystemExit(f"{job['contender']}: what was restored is not what was saved")


def _digests(state: contenders.State) -> list[int]:
    import contenders

    return [zlib.crc32(tensor.numpy()) for tensor in contenders.tensors(state)]


def _zero(state: contenders.State) -> None:
    import contenders

    for tensor in contenders.tensors(state):
        tensor.zero_()


def main() -> int:
    args = bench_runner.parser(__doc__).parse_args()
    if args.worker:
        return bench_runner.answer(work, args.worker)
    names = args.contenders.split(",") + (["dcp", "torch-boto3"] if args.peers else [])
    nbytes = int(args.gib * (1 << 30)) // 4 * 4
    print(bench_runner.headline("restore", nbytes, args))
    results: dict[str, dict[str, Any]] = {}
    with bench_runner.server(args, keep_bytes=int(nbytes * 1.1) + 64 * MiB) as endpoint:
        raws = [bench_runner.raw_get(endpoint, args, nbytes) for _ in range(2)]
        for name in names:
            job = {"contender": name, "endpoint": endpoint, "nbytes": nbytes, "repeats": args.repeats}
            results[name] = bench_runner.run(__file__, job, "restore", args)
            raws.append(bench_runner.raw_get(endpoint, args, nbytes))
    raw = sorted(raws, key=lambda moved: moved.gb_s)[len(raws) // 2]
    spread = f"{min(m.gb_s for m in raws):.2f}-{max(m.gb_s for m in raws):.2f}"
    rows = [row(result, nbytes, raw.gb_s) for result in results.values()]
    raw_row = (f"raw sockets ({spread})", "-", f"{raw.gb_s:.2f}", "1.00", f"{raw.cpu_s_per_gb:.2f}", "-", "-")
    print(
        measure.table([("", "first s", "GB/s", "of raw", "CPU s/GB", "peak - state MiB", "grown MiB"), *rows, raw_row])
    )
    bench_runner.write_json(args, {"nbytes": nbytes, "raw": [asdict(m) for m in raws], "results": results})
    return bench_runner.verdict(targets(results, nbytes, raw.gb_s), args)


def _warm(result: dict[str, Any], key: str) -> float:
    return measure.median([load[key] for load in result["loads"][1:]])


def row(result: dict[str, Any], nbytes: int, raw_gb_s: float) -> tuple[str, ...]:
    gb = nbytes / GB
    return (
        result["name"],
        f"{result['loads'][0]['s']:.2f}",
        f"{gb / _warm(result, 's'):.2f}",
        f"{gb / _warm(result, 's') / raw_gb_s:.2f}",
        f"{_warm(result, 'cpu_s') / gb:.2f}",
        f"{(result['peak'] - nbytes) / MiB:.0f}",
        f"{(result['peak'] - result['before']) / MiB:.0f}",
    )


def targets(results: dict[str, dict[str, Any]], nbytes: int, raw_gb_s: float) -> list[Target]:
    """What this package promises of itself, as far as this run has measured it."""
    ours = results.get("objckpt")
    if ours is None:
        return []
    found = [Target("restore by raw sockets", nbytes / GB / _warm(ours, "s") / raw_gb_s, ">=", 0.6)]
    if "dcp" in results:
        found.append(Target("by DCP + s3torchconnector", _warm(results["dcp"], "s") / _warm(ours, "s"), ">=", 2))
    return found


if __name__ == "__main__":
    sys.exit(main())
