"""Measures what a user waits for at the command line: starting Python, importing the command, listing checkpoints.

    python tools/bench_cli.py                     `objckpt ls` of 100 checkpoints on a local S3 server
    python tools/bench_cli.py --checkpoints 1000
    python tools/bench_cli.py --endpoint http://host:9000 --bucket bench      a real server, with the usual AWS variables

Wall seconds of whole processes, medians of the repeats after a first one that warms the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import bench_runner
import measure
from bench_runner import Target

ROOT = Path(__file__).resolve().parents[1]
LS_S = 1.5  # of 100 checkpoints
IMPORTS = "objckpt.cli.main, objckpt.cli.ls, objckpt.store.s3"


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[None]:
    """Lead the AWS variables to the server of the options, or to a local one for the time of the block."""
    from objckpt.cli import local_server

    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    if args.endpoint:
        os.environ["AWS_ENDPOINT_URL"] = args.endpoint
        yield
        return
    with tempfile.TemporaryDirectory(prefix="objckpt-bench-") as directory:
        running = local_server.start(directory, args.bucket, die_with_parent=True)
        os.environ.update(running.environment())
        os.environ.pop("AWS_PROFILE", None)
        try:
            yield
        finally:
            local_server.kill(running)


def save(url: str, count: int) -> None:
    """`count` small checkpoints."""
    from objckpt import Checkpointer, SaveOptions

    with Checkpointer(url, options=SaveOptions(uploader="thread")) as ckpt:
        for step in range(count):
            ckpt.save(step, {"epoch": step}, meta={"loss": 1 / (step + 1)})


def wall_s(arguments: list[str], repeats: int) -> list[float]:
    """Seconds of each run of `python arguments` after the first."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, *arguments]

    def run() -> None:
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)

    return [measure.timed(run) for _ in range(repeats + 1)][1:]


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--checkpoints", type=int, default=100)
    made.add_argument("--endpoint", help="an S3 server; default: `objckpt local` on this machine")
    made.add_argument("--bucket", default="bench")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    made.add_argument("--json", type=Path, help="write all figures to this file")
    args = made.parse_args()
    print(f"command line, {args.checkpoints} checkpoints at {args.endpoint or 'a local server'}")
    print(f"medians of {args.repeats}\n{measure.machine()}\n{measure.versions('boto3', 'typer', 'rich', 'objckpt')}\n")
    prefix = f"bench-cli-{uuid.uuid4().hex}"
    url = f"s3://{args.bucket}/{prefix}"
    with server(args):
        save(url, args.checkpoints)
        found = {
            "python": wall_s(["-c", "pass"], args.repeats),
            "import": wall_s(["-c", f"import {IMPORTS}"], args.repeats),
            "ls": wall_s(["-m", "objckpt", "ls", url], args.repeats),
        }
        if args.endpoint:
            bench_runner.delete(args.endpoint, args.bucket, prefix + "/")
    names = {"python": "python -c pass", "import": "import of what ls needs", "ls": "objckpt ls"}
    rows = [(names[k], f"{measure.median(v):.2f}", f"{min(v):.2f}", f"{max(v):.2f}") for k, v in found.items()]
    print(measure.table([("", "median s", "min", "max"), *rows]))
    bench_runner.write_json(args, {"checkpoints": args.checkpoints, "results": found})
    listing = measure.median(found["ls"])
    targets = [Target("objckpt ls of 100 checkpoints, s", listing, "<=", LS_S)] if args.checkpoints == 100 else []
    return bench_runner.verdict(targets, args)


if __name__ == "__main__":
    sys.exit(main())
