"""Measures restoring into CPU tensors, beside raw sockets and (with --peers) other libraries.

    python tools/bench_restore.py                2 GiB from a null server that keeps what it is given
    python tools/bench_restore.py --peers        … and DCP load through s3torchconnector, boto3 + torch.load
    python tools/bench_restore.py --endpoint http://host:9000 --bucket bench --gib 0.5      a real server

A contender saves a state, then loads it again and again into tensors that are there already, as a model's are. What
arrives is compared with what was saved, outside the measured time. Figures are medians of the repeats.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from dataclasses import asdict
from typing import Any

import bench_runner
import contenders
import measure
from bench_runner import Target
from measure import GB, MiB


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement of one contender, in this process."""
    state = contenders.make_state(job["nbytes"])
    expected = _digests(state)
    contender = contenders.contender(job["contender"], job["endpoint"], job["url"])
    result: dict[str, Any] = {"name": contender.name, "loads": []}
    me = os.getpid()
    try:
        contender.save(state)
        for _ in range(job["repeats"] + 1 if job["measure"] == "time" else 0):
            _zero(state)
            cpu, start = time.process_time(), time.perf_counter()
            contender.load(state)
            result["loads"].append({"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu})
            if _digests(state) != expected:
                raise SystemExit(f"{contender.name}: what was restored is not what was saved")
        if job["measure"] == "memory":
            with measure.watch_memory(lambda: [me]) as peak:
                contender.load(state)
            result["peak"] = peak.total
    finally:
        contender.close()
    return result


def _digests(state: contenders.State) -> list[int]:
    return [zlib.crc32(tensor.numpy()) for tensor in contenders.tensors(state)]


def _zero(state: contenders.State) -> None:
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
            memory = bench_runner.run(__file__, job, "memory", args)
            results[name] = {**bench_runner.run(__file__, job, "time", args), "peak": memory["peak"]}
            raws.append(bench_runner.raw_get(endpoint, args, nbytes))
    raw = sorted(raws, key=lambda moved: moved.gb_s)[len(raws) // 2]
    spread = f"{min(m.gb_s for m in raws):.2f}-{max(m.gb_s for m in raws):.2f}"
    rows = [row(result, nbytes, raw.gb_s) for result in results.values()]
    raw_row = (f"raw sockets ({spread})", "-", f"{raw.gb_s:.2f}", "1.00", f"{raw.cpu_s_per_gb:.2f}", "-")
    print(measure.table([("", "first s", "GB/s", "of raw", "CPU s/GB", "peak - state MiB"), *rows, raw_row]))
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
