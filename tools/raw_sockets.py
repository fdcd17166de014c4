"""The limit: the same bytes over plain sockets to the same server, without any S3 library in the way.

    python tools/raw_sockets.py --endpoint http://127.0.0.1:9000 --bucket bench     2 GiB up, then down

Each piece is one PUT of, or one ranged GET from, an object of its own; `connections` threads with blocking calls share
the work. Requests are signed in advance by presigned URLs, so that the figures hold for any server. http only.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MiB = 1 << 20
RECEIVE_BYTES = 64 << 10


@dataclass(frozen=True)
class Moved:
    """What moving `nbytes` took; CPU is this process's, user and system."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        return self.nbytes / 1e9 / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


def client(endpoint: str) -> Any:
    """A boto3 client that only signs here."""
    import boto3
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1},
    )
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


def put(endpoint: str, bucket: str, pieces: Sequence[memoryview], connections: int = 8) -> Moved:
    """PUT every piece as `raw/<n>`."""
    urls = _presign(endpoint, bucket, "put_object", len(pieces))

    def one(sock: socket.socket, n: int) -> None:
        sock.sendall(_head("PUT", urls[n], f"Content-Length: {len(pieces[n])}\r\n"))
        sock.sendall(pieces[n])
        _answer(sock, None)

    return _timed(endpoint, one, sum(map(len, pieces)), len(pieces), connections)


def get(endpoint: str, bucket: str, pieces: Sequence[memoryview], connections: int = 8) -> Moved:
    """GET `raw/<n>` into every piece, as a range."""
    urls = _presign(endpoint, bucket, "get_object", len(pieces))

    def one(sock: socket.socket, n: int) -> None:
        sock.sendall(_head("GET", urls[n], f"Range: bytes=0-{len(pieces[n]) - 1}\r\n"))
        _answer(sock, pieces[n])

    return _timed(endpoint, one, sum(map(len, pieces)), len(pieces), connections)


def touched(nbytes: int) -> memoryview:
    """A buffer of its own pages. Fresh zeros would all be one page of the kernel's, and a cache would send them."""
    buffer = bytearray(nbytes)
    view = memoryview(buffer)
    block = os.urandom(MiB)
    for at in range(0, nbytes, MiB):
        view[at : at + MiB] = block[: nbytes - at]
    return view


def cut(buffer: memoryview, piece_bytes: int = 16 * MiB) -> list[memoryview]:
    """The buffer in pieces of `piece_bytes`, the last one shorter."""
    return [buffer[at : at + piece_bytes] for at in range(0, len(buffer), piece_bytes)]


def _presign(endpoint: str, bucket: str, operation: str, count: int) -> list[str]:
    s3 = client(endpoint)
    return [s3.generate_presigned_url(operation, {"Bucket": bucket, "Key": f"raw/{n}"}) for n in range(count)]


def _head(method: str, url: str, extra: str) -> bytes:
    parts = urlsplit(url)
    return f"{method} {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n{extra}\r\n".encode()


def _answer(sock: socket.socket, into: memoryview | None) -> None:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        more = sock.recv(RECEIVE_BYTES)
        if not more:
            raise ConnectionError(f"the server closed the connection after {data[:200]!r}")
        data += more
    head, data = data[:end].decode("latin-1"), data[end + 4 :]
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
    length = int(fields.get("content-length", "0"))
    if not head.split(" ")[1].startswith("20"):
        raise ConnectionError(f"{head.splitlines()[0]}: {data[:500]!r}")
    if into is not None and length != len(into):
        raise ConnectionError(f"{length} bytes in place of {len(into)}")
    target = into if into is not None else memoryview(bytearray(length))
    target[: len(data)] = data
    done = len(data)
    while done < length:
        got = sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("body cut")
        done += got


def _timed(
    endpoint: str, one: Callable[[socket.socket, int], None], nbytes: int, count: int, connections: int
) -> Moved:
    address = urlsplit(endpoint)
    todo = iter(range(count))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(sock: socket.socket) -> None:
        try:
            while True:
                with lock:
                    n = next(todo, None)
                if n is None:
                    return
                one(sock, n)
        except BaseException as error:
            errors.append(error)

    socks = [socket.create_connection((address.hostname, address.port or 80)) for _ in range(connections)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threads = [threading.Thread(target=work, args=(sock,)) for sock in socks]
    start, cpu = time.perf_counter(), _cpu_s()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = Moved(nbytes, time.perf_counter() - start, _cpu_s() - cpu)
    for sock in socks:
        sock.close()
    if errors:
        raise errors[0]
    return moved


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--bucket", default="bench")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--piece-mib", type=int, default=16)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    pieces = cut(touched(int(args.gib * (1 << 30))), args.piece_mib * MiB)
    for _ in range(args.repeats):
        for verb, move in (("PUT", put), ("GET", get)):
            moved = move(args.endpoint, args.bucket, pieces, args.connections)
            print(f"{verb} {moved.gb_s:.2f} GB/s, {moved.cpu_s_per_gb:.2f} CPU s/GB")


if __name__ == "__main__":
    main()
