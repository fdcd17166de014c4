"""Measures a log of long life: 10,000 records, 1,000 live checkpoints. How long until it is read, listed, opened?

    python tools/bench_log.py                     on a local S3 server, started for it
    python tools/bench_log.py --records 2000 --live 200
    python tools/bench_log.py --endpoint http://host:9000 --bucket bench      a real server, with the usual AWS variables

The records are put there directly; then one save lets the writer bundle them. Wall seconds, medians of the repeats.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench_cli
import bench_runner
import measure
from bench_runner import Target

LS_S = 3.0  # `objckpt ls` of 10,000 records, the whole process
OPEN_S = 1.0  # a session that takes its epoch
RECORDS, LIVE = 10_000, 1_000


def history(count: int, live: int) -> Iterator[tuple[int, bytes]]:
    """Seq and bytes of `count` records of a training with retention: one open, then commits, each with its retirement."""
    from objckpt.format import keys
    from objckpt.format.records import Commit, Open, Retire

    session = "0" * 26
    waiting: list[int] = []
    for seq in range(count):
        head = {"seq": seq, "write_id": os.urandom(16), "epoch": 1, "session": session, "time_s": time.time()}
        if seq == 0:
            capabilities = {"conditional_put": True, "conditional_put_evidence": "made up by bench_log"}
            yield seq, Open(**head, host="bench", world_size=1, capabilities=capabilities).encode()
        elif len(waiting) > live:
            yield seq, Retire(**head, host="bench", seqs=[waiting.pop(0)], reason="retention").encode()
        else:
            made = Commit(
                **head,
                host="bench",
                step=seq,
                attempt=keys.attempt(seq, session, seq),
                parent=waiting[-1] if waiting else None,
                world_size=1,
                raw_bytes=1 << 30,
                stored_bytes=1 << 30,
                tensors=100,
                ranks=[(os.urandom(16).hex(), 10_000)],
                signature="0" * 16,
                meta={"loss": 1 / seq},
            )
            waiting.append(seq)
            yield seq, made.encode()


def put(url: str, count: int, live: int) -> None:
    """Write the history, and let a writer go on from it."""
    from objckpt.config import StoreOptions
    from objckpt.format import keys
    from objckpt.store import open_store

    store = open_store(url, StoreOptions(connections=16))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda pair: store.put(keys.record(pair[0]), pair[1]), history(count, live)))
    store.close()
    commit_one(url, 1, count)


def commit_one(url: str, who: int, step: int) -> float:
    """A session that opens the log and commits a checkpoint without data. Seconds until it had its epoch."""
    from objckpt.config import StoreOptions
    from objckpt.format import keys
    from objckpt.format.index import Index
    from objckpt.format.tables import ChunkTable
    from objckpt.save.commit import LogWriter, Sizes
    from objckpt.store import open_store

    store = open_store(url, StoreOptions())
    by = LogWriter(store, f"{who:026d}", 1, 60.0)
    began_s = time.perf_counter()
    by.open({"conditional_put": True})
    took_s = time.perf_counter() - began_s
    attempt = keys.attempt(step, by.session, 1)
    index = Index(step, attempt, 0, 1, [], [], ChunkTable.from_rows([]), ["raw"], b"\x80")
    by.commit(index, [("0" * 32, 1)], None, None, Sizes(0, 0, 0))
    store.close()
    return took_s


def read(url: str) -> Callable[[], None]:
    """Reads the log as a new process would, but with its imports made."""
    from objckpt.log import read_log
    from objckpt.store import open_store

    def run() -> None:
        store = open_store(url)
        log = read_log(store)
        assert log.checkpoints and not log.damaged
        store.close()

    return run


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--records", type=int, default=RECORDS)
    made.add_argument("--live", type=int, default=LIVE)
    made.add_argument("--endpoint", help="an S3 server; default: `objckpt local` on this machine")
    made.add_argument("--bucket", default="bench")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    made.add_argument("--json", type=Path, help="write all figures to this file")
    args = made.parse_args()
    print(f"log of {args.records} records, {args.live} live, at {args.endpoint or 'a local server'}")
    print(f"medians of {args.repeats}\n{measure.machine()}\n{measure.versions('boto3', 'msgpack', 'objckpt')}\n")
    prefix = f"bench-log-{uuid.uuid4().hex}"
    url = f"s3://{args.bucket}/{prefix}"
    with bench_cli.server(args):
        put(url, args.records, args.live)
        found = {
            "read_log": [measure.timed(read(url)) for _ in range(args.repeats)],
            "open": [commit_one(url, 10 + n, args.records + 1 + n) for n in range(args.repeats)],
            "ls": bench_cli.wall_s(["-m", "objckpt", "ls", url], args.repeats),
        }
        if args.endpoint:
            bench_runner.delete(args.endpoint, args.bucket, prefix + "/")
    names = {"read_log": "read_log", "open": "a session opens the log", "ls": "objckpt ls, the whole process"}
    rows = [(names[k], f"{measure.median(v):.2f}", f"{min(v):.2f}", f"{max(v):.2f}") for k, v in found.items()]
    print(measure.table([("", "median s", "min", "max"), *rows]))
    bench_runner.write_json(args, {"records": args.records, "live": args.live, "results": found})
    whole = (args.records, args.live) == (RECORDS, LIVE)
    targets = [
        Target("objckpt ls of 10,000 records, s", measure.median(found["ls"]), "<=", LS_S),
        Target("a session opens a log of 10,000 records, s", measure.median(found["open"]), "<=", OPEN_S),
    ]
    return bench_runner.verdict(targets if whole else [], args)


if __name__ == "__main__":
    sys.exit(main())
