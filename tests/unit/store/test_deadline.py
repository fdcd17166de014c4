"""Total time limits of synchronous requests, against a server that answers byte by byte."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from objckpt.config import StoreOptions
from objckpt.errors import AmbiguousWriteError, ConnectError, StoreError
from objckpt.store import Store, deadline, open_store

LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
HEAD = b'HTTP/1.1 200 OK\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: "x"\r\nContent-Length: %d\r\n\r\n'


class Dripping:
    """Sends `at_once` after each request, then `then` in pieces of `piece` bytes, each after `every_s`."""

    def __init__(self, at_once: bytes, then: bytes, *, piece: int = 1, every_s: float = 0.1) -> None:
        self.at_once, self.then, self.piece, self.every_s = at_once, then, piece, every_s
        self.requests: list[bytes] = []
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.requests.append(connection.recv(1 << 16))
                connection.sendall(self.at_once)
                for at in range(0, len(self.then), self.piece):
                    if self._closing.wait(self.every_s):
                        return
                    connection.sendall(self.then[at : at + self.piece])
            except OSError:
                pass  # the client has hung up

    def store(self, *, timeout_s: float = 0.4, deadline_s: float = 0.4) -> Store:
        endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        options = StoreOptions(endpoint_url=endpoint, request_timeout_s=timeout_s, retry_deadline_s=deadline_s)
        return open_store("s3://bucket/run", options)

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


Serve = Callable[..., Dripping]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    made: list[Dripping] = []

    def start(*args: object, **more: object) -> Dripping:
        made.append(Dripping(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for server in made:
        server.close()


CALLS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: store.list("log/"),
    "get": lambda store: store.get("log/x", max_bytes=1000),
    "head": lambda store: store.head("log/x"),
    "put": lambda store: store.put("log/x", b"x"),
    "delete": lambda store: store.delete(["log/x"]),
    "get_into": lambda store: store.get_into("data/x", 0, [memoryview(bytearray(100))]),
}


@pytest.mark.parametrize(
    ("call", "what"),
    [*((call, "headers") for call in CALLS), *((call, "body") for call in ("list", "get", "get_into"))],
)
def test_an_answer_that_drips_is_given_up(serve: Serve, call: str, what: str) -> None:
    """Each byte arrives well within the timeout; all of them together would take more than ten times as long."""
    body = LISTING if call == "list" else bytes(100)
    head = HEAD % len(body)
    server = serve(b"", head) if what == "headers" else serve(head, body)
    begin = time.monotonic()
    with pytest.raises(ConnectError, match=r"[Tt]imeout"):
        CALLS[call](server.store())
    assert time.monotonic() - begin < 4


def test_a_conditional_put_whose_answer_drips_is_ambiguous(serve: Serve) -> None:
    server = serve(b"", HEAD % 0)
    with pytest.raises(AmbiguousWriteError):
        server.store().put_if_absent("log/x", b"x")
    assert len(server.requests) == 1


def test_a_large_range_on_a_slow_link_takes_the_time_it_needs(serve: Serve) -> None:
    """Three times either limit, by one request: 10 KiB come each 50 ms, at least 6.4 KiB are needed in 0.4 s."""
    data = bytes(range(256)) * 960  # 240 KiB
    server = serve(HEAD % len(data), data, piece=10 * 1024, every_s=0.05)
    buffer = bytearray(len(data))
    server.store().get_into("data/x", 0, [memoryview(buffer)])
    assert buffer == data
    assert len(server.requests) == 1


def test_a_range_that_comes_too_slowly_is_given_up(serve: Serve) -> None:
    data = bytes(4096)
    server = serve(HEAD % len(data), data, piece=100)  # 1 KB/s
    with pytest.raises(ConnectError, match=r"of 4096 bytes of the range"):
        server.store().get_into("data/x", 0, [memoryview(bytearray(len(data)))])


def test_the_tries_of_a_range_go_on_while_they_bring_bytes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every try breaks after a quarter of the range and half of the retry deadline."""
    monkeypatch.setattr(deadline, "SLOWEST_BYTES_PER_S", 1000)
    piece = 4000
    server = serve(b"", b"")

    def serve_quarter(connection: socket.socket) -> None:
        with connection:
            request = connection.recv(1 << 16)
            server.requests.append(request)
            first, _, last = request.partition(b"bytes=")[2].partition(b"\r\n")[0].partition(b"-")
            head = b"HTTP/1.1 206 X\r\nContent-Range: bytes %s-%s/16000\r\nContent-Length: %d\r\n\r\n"
            time.sleep(0.5)
            connection.sendall(head % (first, last, int(last) + 1 - int(first)) + bytes(piece))

    server._serve = serve_quarter  # type: ignore[method-assign]
    server.store(timeout_s=5, deadline_s=1.0).get_into("data/x", 0, [memoryview(bytearray(4 * piece))])
    assert len(server.requests) == 4


def test_a_request_that_is_not_taken_in_time_is_a_timeout(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's window is closed: it reads nothing of a body larger than all buffers."""
    server = serve(b"", b"")
    monkeypatch.setattr(server, "_serve", lambda connection: server._closing.wait(10))
    with pytest.raises(ConnectError, match=r"TimeoutError"):
        server.store(timeout_s=1, deadline_s=1).put("log/x", bytes(64 << 20))


def test_what_the_store_answered_before_the_deadline_is_told(serve: Serve) -> None:
    """Every try is refused; the last one is cut off by the end of all tries."""
    server = serve(b"", b"")

    def refuse_then_hang(connection: socket.socket) -> None:
        with connection:
            server.requests.append(connection.recv(1 << 16))
            if len(server.requests) == 1:
                connection.sendall(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                server._closing.wait(10)

    server._serve = refuse_then_hang  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=r"failed, after 2 tries: 500 \(500\)"):
        server.store(timeout_s=5, deadline_s=1.5).list("log/")


def test_a_limit_ends_with_its_block() -> None:
    ours, theirs = socket.socketpair()
    with theirs, deadline._Socket(fileno=ours.detach()) as timed:
        with deadline.Limit(0.05), pytest.raises(TimeoutError):
            timed.recv_into(bytearray(1))
        timed.settimeout(5)
        theirs.sendall(b"x")
        assert timed.recv_into(bytearray(1)) == 1
