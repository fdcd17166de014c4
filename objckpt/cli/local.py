"""`objckpt local`: an S3 server on this machine, for trials."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from objckpt.cli import local_server, output
from objckpt.cli.options import Debug, Json
from objckpt.errors import ObjckptError, UsageError

# They take precedence over, or are sent along with, what we print.
_IN_THE_WAY = ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_PROFILE")

Dir = Annotated[
    str | None,
    typer.Option("--dir", metavar="DIR", help="Where its data lies.", show_default="~/.local/share/objckpt/local"),
]
Bucket = Annotated[str, typer.Option("--bucket", metavar="NAME", help="The bucket to create.")]
Detach = Annotated[bool, typer.Option("--detach", help="Leave it running; print its pid as OBJCKPT_LOCAL_PID.")]
Stop = Annotated[bool, typer.Option("--stop", help="Stop the server of this folder.")]


class _StopRequest(BaseException):
    """SIGINT or SIGTERM came."""


def command(
    dir: Dir = None,
    bucket: Bucket = local_server.BUCKET,
    detach: Detach = False,
    stop: Stop = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a local S3 server, to try things.

    It is SeaweedFS, from the extra objckpt[local]. Prints what a client has to export; with --detach also when it runs
    already. It runs until Ctrl-C, or with --detach until `objckpt local --stop`. It listens on 127.0.0.1 only; its data
    stays.

    \b
        eval "$(objckpt local --detach)"; objckpt ls s3://checkpoints/run1; objckpt local --stop
    """
    directory = os.path.abspath(dir or _default_directory())
    if stop:
        return _stop(directory, json)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _request_stop)
    running = local_server.load(directory)
    if running is not None and running.alive() and detach and running.bucket == bucket:
        output.message(f"it runs already (pid {running.pid})")
        _print(running, detach, json)
        return 0
    server: local_server.LocalServer | None = None
    try:
        server = local_server.start(directory, bucket, die_with_parent=not detach)
        _print(server, detach, json)
        if detach:
            return 0
        while server.alive():
            local_server.reap(server)
            time.sleep(0.2)
        raise ObjckptError("the local S3 server has ended by itself", log=local_server.log_tail(directory))
    except _StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if server is not None:
            local_server.stop(server)
        return 0


def _stop(directory: str, json: bool) -> int:
    server = local_server.load(directory)
    if server is None or not server.alive():
        raise UsageError(f"no server runs in {directory}")
    local_server.stop(server)
    if json:
        output.document({"directory": directory, "pid": server.pid, "stopped": True})
    else:
        output.line(f"stopped pid {server.pid}")
    return 0


def _print(server: local_server.LocalServer, detach: bool, json: bool) -> None:
    environment = server.environment()
    in_the_way = [name for name in _IN_THE_WAY if name in os.environ]
    if json:
        document: dict[str, Any] = {
            "environment": environment,
            "unset": in_the_way,
            "bucket": server.bucket,
            "url": f"s3://{server.bucket}",
            "pid": server.pid,
            "directory": server.directory,
        }
        output.document(document)
    else:
        if detach:
            environment |= {"OBJCKPT_LOCAL_PID": str(server.pid)}
        if in_the_way:
            output.line("unset " + " ".join(in_the_way))
        for name, value in environment.items():
            output.line(f"export {name}={shlex.quote(value)}")
    output.flush()


def _default_directory() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(data) / "objckpt" / "local"


def _request_stop(number: int, frame: FrameType | None) -> None:
    raise _StopRequest
