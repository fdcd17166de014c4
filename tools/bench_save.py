"""Measures saving: throughput, CPU, blocked time and memory, beside raw sockets and (with --peers) other libraries.

    python tools/bench_save.py                   2 GiB to the null server
    python tools/bench_save.py --peers           … and s3torchconnector's DCP writer, DCP async_save, torch.save + boto3
    python tools/bench_save.py --endpoint http://host:9000 --bucket bench --gib 0.5      a real server

Every contender runs in processes of its own: one for times (a first save, then repeats), one with `prepare`, one for
memory. Raw sockets move as many bytes over as many connections to the same server before, between and after them.
Figures are medians of the repeats; CPU is user and system; memory is PSS, in which pages shared by trainer and agent
count once.
"""

from __future__ import annotations

import os
import sys
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
    memcpy_s = contenders.memcpy_s(state) if job["measure"] == "time" else 0.0
    contender = contenders.contender(job["contender"], job["endpoint"], job["url"])
    result: dict[str, Any] = {"name": contender.name, "memcpy_s": memcpy_s}
    try:
        if job["measure"] == "prepared":
            contender.prepare(state)
            result["prepared"] = asdict(contender.save(state))
        elif job["measure"] == "time":
            result["first"] = asdict(contender.save(state))
            result["warm"] = [asdict(contender.save(state)) for _ in range(job["repeats"])]
        else:
            result.update(_memory(contender, state, job["saves"]))
    finally:
        contender.close()
    return result


def _memory(contender: contenders.Contender, state: contenders.State, saves: int) -> dict[str, Any]:
    """Peak over `saves` saves, and what lies there after each."""
    me, after = os.getpid(), []

    def pids() -> list[int]:
        return [me, *measure.children(me)]

    with measure.watch_memory(pids) as peak:
        for _ in range(saves):
            contender.save(state)
            after.append(sum(measure.pss_bytes(pid) for pid in pids()))
    others = sum(size for pid, size in peak.shares.items() if pid != me)
    return {"peak": peak.total, "peak_trainer": peak.total - others, "peak_agent": others, "after": after}


def main() -> int:
    parser = bench_runner.parser(__doc__)
    parser.add_argument("--receive", choices=("copy", "drop"), default="copy", help="the null server's way of reading")
    parser.add_argument("--flat", type=int, default=20, help="saves of the memory run; 0: none")
    args = parser.parse_args()
    if args.worker:
        return bench_runner.answer(work, args.worker)
    names = args.contenders.split(",") + (list(contenders.PEERS) if args.peers else [])
    nbytes = int(args.gib * (1 << 30)) // 4 * 4
    print(bench_runner.headline("save", nbytes, args))
    results: dict[str, dict[str, Any]] = {}
    with bench_runner.server(args, keep_bytes=0) as endpoint:
        raws = [bench_runner.raw_put(endpoint, args, nbytes) for _ in range(2)]
        for name in names:
            job = {"contender": name, "endpoint": endpoint, "nbytes": nbytes, "repeats": args.repeats}
            result = bench_runner.run(__file__, job, "time", args)
            if name.startswith("objckpt"):
                result |= bench_runner.run(__file__, job, "prepared", args) | {"memcpy_s": result["memcpy_s"]}
            if args.flat:
                saves = args.flat if name.startswith("objckpt") else min(args.flat, 3)
                memory = bench_runner.run(__file__, {**job, "saves": saves}, "memory", args)
                result |= {key: value for key, value in memory.items() if key.startswith(("peak", "after"))}
            results[name] = result
            raws.append(bench_runner.raw_put(endpoint, args, nbytes))
    raw = sorted(raws, key=lambda moved: moved.gb_s)[len(raws) // 2]
    rows = [row(result, nbytes, raw.gb_s) for result in results.values()]
    head = ("", "blocked first", "prepared", "warm", "× memcpy", "upload GB/s", "all GB/s", "of raw", "trainer s/GB",
            "agent s/GB", "peak MiB", "growth MiB")  # fmt: skip
    spread = f"{min(m.gb_s for m in raws):.2f}-{max(m.gb_s for m in raws):.2f}"
    raw_row = (f"raw sockets ({spread})", *["-"] * 4, f"{raw.gb_s:.2f}", f"{raw.gb_s:.2f}", "1.00",
               f"{raw.cpu_s_per_gb:.2f}", "-", "-", "-")  # fmt: skip
    print(measure.table([head, *rows, raw_row]))
    bench_runner.write_json(args, {"nbytes": nbytes, "raw": [asdict(m) for m in raws], "results": results})
    return bench_runner.verdict(targets(results, nbytes, raw.gb_s), args)


def _warm(result: dict[str, Any], key: str) -> float:
    return measure.median([save[key] for save in result["warm"]])


def _upload_s(result: dict[str, Any]) -> float:
    return measure.median([save["upload_s"] or save["total_s"] for save in result["warm"]])


def row(result: dict[str, Any], nbytes: int, raw_gb_s: float) -> tuple[str, ...]:
    gb = nbytes / GB
    upload = gb / _upload_s(result)
    after = result.get("after", [])
    return (
        result["name"],
        f"{result['first']['blocked_s']:.2f} s",
        f"{result['prepared']['blocked_s']:.2f} s" if "prepared" in result else "-",
        f"{_warm(result, 'blocked_s'):.2f} s",
        f"{_warm(result, 'blocked_s') / result['memcpy_s']:.1f}",
        f"{upload:.2f}",
        f"{gb / _warm(result, 'total_s'):.2f}",
        f"{upload / raw_gb_s:.2f}",
        f"{_warm(result, 'trainer_cpu_s') / gb:.2f}",
        f"{_warm(result, 'agent_cpu_s') / gb:.2f}",
        f"{result['peak'] / MiB:.0f}" if "peak" in result else "-",
        f"{growth(after) / MiB:+.0f}" if len(after) > 3 else "-",
    )


def growth(after: list[int]) -> int:
    """From the second save (the first one makes the arena) to the highest of the last three."""
    return max(after[-3:]) - after[1]


def targets(results: dict[str, dict[str, Any]], nbytes: int, raw_gb_s: float) -> list[Target]:
    """What this package promises of itself, as far as this run has measured it."""
    ours, gb, found = results.get("objckpt"), nbytes / GB, []
    if ours is None:
        return []
    memcpy_s, throughput = ours["memcpy_s"], gb / _upload_s(ours)
    found.append(Target("blocked, warm, by memcpy", _warm(ours, "blocked_s") / memcpy_s, "<=", 1.5))
    found.append(Target("blocked, first after prepare, by memcpy", ours["prepared"]["blocked_s"] / memcpy_s, "<=", 1.5))
    found.append(Target("upload by raw sockets", throughput / raw_gb_s, ">=", 0.7))
    found.append(Target("agent CPU s/GB", _warm(ours, "agent_cpu_s") / gb, "<=", 0.5))
    if "peak" in ours:
        found.append(Target("peak memory - 2 x state, MiB", (ours["peak"] - 2 * nbytes) / MiB, "<=", 400))
        if len(ours["after"]) > 3:
            found.append(Target("growth over the saves, MiB", growth(ours["after"]) / MiB, "<=", 32))
    if "dcp" in results:
        dcp = results["dcp"]
        cpu = (_warm(ours, "agent_cpu_s") + _warm(ours, "trainer_cpu_s")) / _warm(dcp, "trainer_cpu_s")
        found.append(
            Target("throughput by DCP + s3torchconnector", _warm(dcp, "total_s") / _warm(ours, "total_s"), ">=", 3)
        )
        found.append(Target("CPU (both processes) by DCP + s3torchconnector", cpu, "<=", 1 / 3))
    if "dcp-async" in results:
        blocked = _warm(ours, "blocked_s") / _warm(results["dcp-async"], "blocked_s")
        found.append(Target("blocked by DCP async_save", blocked, "<=", 0.25))
    return found


if __name__ == "__main__":
    sys.exit(main())
