"""Runs a benchmark: options, server, raw sockets, worker processes, and the verdict on the targets."""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import measure
import null_s3
import raw_sockets

OPERATORS = {"<=": operator.le, ">=": operator.ge}
WORKER_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Target:
    """A figure, and what it should at least (or at most) be."""

    what: str
    value: float
    relation: str
    bound: float

    @property
    def met(self) -> bool:
        return bool(OPERATORS[self.relation](self.value, self.bound))


def parser(text: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--gib", type=float, default=2.0, help="size of the state")
    made.add_argument("--endpoint", help="an S3 server (http); default: a null server on this machine")
    made.add_argument("--bucket", default="bench")
    made.add_argument("--connections", type=int, default=8, help="of raw sockets; objckpt uses its default, 8")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument(
        "--contenders", default="objckpt", help="objckpt, objckpt-thread, objckpt-zstd, dcp, …; by commas"
    )
    made.add_argument("--peers", action="store_true", help="also the other libraries (bash tools/env.sh bench)")
    made.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    made.add_argument("--json", type=Path, help="write all figures to this file")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def headline(what: str, nbytes: int, args: argparse.Namespace) -> str:
    packages = ("torch", "numpy", "boto3", "aiobotocore", "aiohttp", "awscrt", "s3torchconnector", "objckpt")
    where = args.endpoint or f"null server ({getattr(args, 'receive', 'keep')})"
    return (
        f"{what} {nbytes / measure.GB:.2f} GB of fp32 to {where}; medians of {args.repeats} after the first\n"
        f"{measure.machine()}\n{measure.versions(*packages)}\n"
    )


@contextlib.contextmanager
def server(args: argparse.Namespace, *, keep_bytes: int) -> Iterator[str]:
    """The endpoint of the options, or a null server for the time of the block."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    if args.endpoint:
        yield args.endpoint
        return
    os.environ.update(AWS_ACCESS_KEY_ID="null", AWS_SECRET_ACCESS_KEY="null")
    os.environ.pop("AWS_PROFILE", None)
    with null_s3.null_server(keep_bytes, getattr(args, "receive", "copy")) as running:
        yield running.url


def run(script: str, job: dict[str, Any], measurement: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run `job` in a process of its own; its objects are deleted afterwards."""
    prefix = f"bench-{os.getpid()}-{job['contender']}-{measurement}"
    full = {**job, "measure": measurement, "url": f"s3://{args.bucket}/{prefix}"}
    print(f"… {job['contender']}: {measurement}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, "--worker", json.dumps(full)],
        stdout=subprocess.PIPE, text=True, timeout=WORKER_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{job['contender']} ({measurement}) ended with status {done.returncode}")
    delete(job["endpoint"], args.bucket, prefix + "/")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(work: Callable[[dict[str, Any]], dict[str, Any]], job: str) -> NoReturn:
    """The worker's side of `run`. Ends at once, as the tear-down of torch's modules takes a second."""
    print(json.dumps(work(json.loads(job))), flush=True)
    os._exit(0)


def delete(endpoint: str, bucket: str, prefix: str) -> None:
    s3 = raw_sockets.client(endpoint)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Contents", []):
            s3.delete_object(Bucket=bucket, Key=found["Key"])


def raw_put(endpoint: str, args: argparse.Namespace, nbytes: int) -> raw_sockets.Moved:
    print("… raw sockets", file=sys.stderr, flush=True)
    pieces = raw_sockets.cut(raw_sockets.touched(nbytes))
    moved = raw_sockets.put(endpoint, args.bucket, pieces, args.connections)
    delete(endpoint, args.bucket, "raw/")
    return moved


def raw_get(endpoint: str, args: argparse.Namespace, nbytes: int) -> raw_sockets.Moved:
    print("… raw sockets", file=sys.stderr, flush=True)
    pieces = raw_sockets.cut(raw_sockets.touched(nbytes))
    raw_sockets.put(endpoint, args.bucket, pieces, args.connections)
    moved = raw_sockets.get(endpoint, args.bucket, pieces, args.connections)
    delete(endpoint, args.bucket, "raw/")
    return moved


def write_json(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    if args.json:
        head = {"machine": measure.machine(), "command": " ".join(sys.argv)}
        args.json.write_text(json.dumps({**head, **figures}, indent=1))


def verdict(targets: list[Target], args: argparse.Namespace) -> int:
    """Print every target with its figure; the exit code."""
    if targets:
        head = ("target", "measured", "bound", "")
        rows = [
            (t.what, f"{t.value:.2f}", f"{t.relation} {t.bound:.2f}", "met" if t.met else "MISSED") for t in targets
        ]
        print("\n" + measure.table([head, *rows]))
    return 1 if args.strict and not all(t.met for t in targets) else 0
