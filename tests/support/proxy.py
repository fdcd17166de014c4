"""A TCP proxy between a client and a real S3 server, for faults that no server makes to order.

    with Proxy(server.endpoint_url) as proxy:
        proxy.rules = [Rule(method="PUT", match="partNumber=1", answer_after=0, then="reset")]
        ... AWS_ENDPOINT_URL = proxy.url

It reads HTTP/1.1 as far as it must: the head of each request and of each answer, and their lengths. One thread a connection.
A rule acts on the requests number `first` to `first + times - 1` of those that it matches, whatever their connection.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PIECE = 64 << 10
_LIMIT_S = 60.0  # nobody waits longer for anything here


@dataclass
class Rule:
    """What happens to certain requests. Byte counts are of bodies."""

    method: str = ""  # "" is any
    match: str = ""  # a regular expression, searched in the target (path and query)
    first: int = 1
    times: int = 1_000_000
    request_after: int | None = (
        None  # the connection breaks when so many bytes of the request's body went to the server
    )
    answer_after: int | None = None  # … of the answer's body went to the client; -1: before its head, after the effect
    then: str = "reset"  # how it breaks: "reset", "close" (an orderly end), "stall" (nothing any more)
    request_rate: float | None = None  # bytes a second
    answer_rate: float | None = None
    delay_s: float = 0.0  # before the request goes to the server
    canned: tuple[int, str, bytes] | None = None  # status, content type, body: in place of the server's answer
    effect: bool = False  # whether the server gets the request that has a canned answer
    seen: int = 0  # how many requests it has matched
    hit: int = 0  # on how many it acted

    def takes(self, method: str, target: str) -> bool:
        if (self.method and method != self.method) or not re.search(self.match, target):
            return False
        self.seen += 1
        acts = self.first <= self.seen < self.first + self.times
        self.hit += acts
        return acts


def s3_error(status: int, code: str) -> tuple[int, str, bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made by the proxy</Message></Error>"
    return status, "application/xml", body.encode()


class _Broken(Exception):
    """The connection has ended, by the plan or by one of the sides."""


@dataclass
class Proxy:
    upstream: str  # http://host:port
    rules: list[Rule] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(
        default_factory=list
    )  # method and target of each, in the order of their heads

    def __enter__(self) -> Proxy:
        parts = urlsplit(self.upstream)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                _shut(sock)
        for thread in self._threads:
            thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        self._keep(client)
        try:
            while True:
                head = _Head.read(client)
                if server is None:
                    server = self._keep(socket.create_connection(self._address, 10))
                self._exchange(client, server, head)
        except (_Broken, OSError):
            pass
        finally:
            for sock in (client, server):
                if sock is not None:
                    with self._lock:
                        self._open.discard(sock)
                    sock.close()

    def _keep(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(_LIMIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(sock)
        return sock

    def _exchange(self, client: socket.socket, server: socket.socket, head: _Head) -> None:
        method, target, _ = head.first.decode("latin-1").split(" ", 2)
        with self._lock:
            self.requests.append((method, target))
            rule = next((r for r in self.rules if r.takes(method, target)), Rule())
        self._ended.wait(rule.delay_s)
        if rule.canned is not None and not rule.effect:
            self._drain(client, head)
            self._can(client, method, rule.canned)
            return
        server.sendall(head.bytes)
        if head.expects:  # the client waits for leave to send its body
            first = _Head.read(server)
            client.sendall(first.bytes)
            if b" 100 " not in first.first:
                self._answer(client, server, first, method, Rule())
                return
        self._body(client, server, head, rule.request_after, rule.request_rate, rule.then, client)
        answer = _Head.read(server)
        if rule.canned is not None:
            self._drain(server, answer)
            self._can(client, method, rule.canned)
            return
        self._answer(client, server, answer, method, rule, head_is_out=False)

    def _answer(
        self,
        client: socket.socket,
        server: socket.socket,
        answer: _Head,
        method: str,
        rule: Rule,
        head_is_out: bool = True,
    ) -> None:
        if rule.answer_after == -1:
            self._break(client, rule.then)
        if not head_is_out:
            client.sendall(answer.bytes)
        if method == "HEAD" or answer.first.split(b" ")[1] in (b"204", b"304"):
            return
        self._body(server, client, answer, rule.answer_after, rule.answer_rate, rule.then, client)
        if answer.closes:
            raise _Broken

    def _body(
        self,
        source: socket.socket,
        sink: socket.socket,
        head: _Head,
        after: int | None,
        rate: float | None,
        then: str,
        client: socket.socket,
    ) -> None:
        sent = 0
        for piece in head.body(source):
            if after is not None and sent + len(piece) > after:
                sink.sendall(piece[: max(0, after - sent)])
                self._break(client, then)
            if rate is not None and self._ended.wait(len(piece) / rate):
                raise _Broken
            sink.sendall(piece)
            sent += len(piece)
        if after is not None and sent >= after:
            self._break(client, then)

    def _break(self, client: socket.socket, then: str) -> None:
        if then == "stall":
            self._ended.wait(_LIMIT_S)
        elif then == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            _shut(client, socket.SHUT_WR)
            time.sleep(0.02)  # else bytes of the client that were not read make a reset of it
        raise _Broken

    def _drain(self, source: socket.socket, head: _Head) -> None:
        if head.expects:
            source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        for _ in head.body(source):
            pass

    def _can(self, client: socket.socket, method: str, canned: tuple[int, str, bytes]) -> None:
        status, kind, body = canned
        head = f"HTTP/1.1 {status} Canned\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + (b"" if method == "HEAD" else body))


class _Head:
    """The head of a request or an answer, and how long its body is."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data
        self.first, *lines = data.rstrip(b"\r\n").split(b"\r\n")
        fields = {
            name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(b":") for line in lines)
        }
        self.length = int(fields.get(b"content-length", b"0"))
        self.chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        self.expects = b"expect" in fields
        self.closes = fields.get(b"connection") == b"close"

    @classmethod
    def read(cls, sock: socket.socket) -> _Head:
        """Byte by byte where it must be: what follows belongs to the body."""
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            seen = sock.recv(_PIECE, socket.MSG_PEEK)
            if not seen:
                raise _Broken
            end = (data[-3:] + seen).find(b"\r\n\r\n")
            take = len(seen) if end < 0 else end + 4 - len(data[-3:])
            data += sock.recv(take)
        return cls(data)

    def body(self, sock: socket.socket) -> Iterator[bytes]:
        """Pieces of the body as they are on the wire."""
        if not self.chunked:
            yield from _exactly(sock, self.length)
            return
        while True:
            line = b""
            while not line.endswith(b"\r\n"):
                byte = sock.recv(1)
                if not byte:
                    raise _Broken
                line += byte
            size = int(line.split(b";")[0], 16)
            yield line
            yield from _exactly(sock, size + 2)
            if size == 0:
                return


def _exactly(sock: socket.socket, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        piece = sock.recv(min(_PIECE, nbytes))
        if not piece:
            raise _Broken
        nbytes -= len(piece)
        yield piece


def _shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    try:
        sock.shutdown(how)
    except OSError:
        pass
