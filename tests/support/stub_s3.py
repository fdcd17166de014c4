"""A small scriptable S3 server on 127.0.0.1, for faults on the wire that no real server makes to order.

    with StubServer(lambda request: Reset() if request.part == 2 else bucket(request)) as server:
        options = StoreOptions(endpoint_url=server.url)

The script is called in the connection's own thread, so it may block, and before the body is read (by `request.body`).
`StubBucket` is a script that keeps objects and multipart uploads in memory; it checks no signature.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape


@dataclass
class Request:
    """One request. `key` is without the bucket; `query` has the first of each name; header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    reader: object
    at_s: float
    _body: bytes | None = None
    key: str = ""
    bucket: str = ""
    query: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.target)
        self.bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}

    @property
    def part(self) -> int | None:
        """The part number of an UploadPart, else None."""
        return int(self.query["partNumber"]) if self.method == "PUT" and "partNumber" in self.query else None

    @property
    def operation(self) -> str:
        """S3's name of the operation."""
        q = self.query
        if self.method == "PUT":
            return "UploadPart" if "partNumber" in q else "PutObject"
        if self.method == "POST":
            return (
                "CreateMultipartUpload"
                if "uploads" in q
                else "DeleteObjects"
                if "delete" in q
                else "CompleteMultipartUpload"
            )
        if self.method == "DELETE":
            return "AbortMultipartUpload" if "uploadId" in q else "DeleteObject"
        if self.method == "HEAD":
            return "HeadObject" if self.key else "HeadBucket"
        if not self.key:
            return "ListMultipartUploads" if "uploads" in q else "ListObjectsV2"
        return "ListParts" if "uploadId" in q else "GetObject"

    @property
    def body(self) -> bytes:
        """The whole body, read from the socket at the first use."""
        if self._body is None:
            length = int(self.headers.get("content-length", 0))
            self._body = self.reader.read(length)
            if len(self._body) != length:
                raise ConnectionError("the client hung up in the middle of its body")
        return self._body

    @property
    def body_was_read(self) -> bool:
        return self._body is not None or not int(self.headers.get("content-length", 0))


@dataclass
class Reply:
    """An answer. `length` overrides Content-Length: a body that is shorter is followed by the end of the connection."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass
class Reset:
    """Read `after_bytes` of the body, then send a TCP reset."""

    after_bytes: int = 10


class Hang:
    """Read nothing more and answer nothing, until the server is closed."""


def error(status: int, code: str, message: str = "", **headers: str) -> Reply:
    """S3's XML error."""
    xml = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>'
    return Reply(
        status,
        xml.encode(),
        {"Content-Type": "application/xml", **{k.replace("_", "-"): v for k, v in headers.items()}},
    )


Script = Callable[[Request], "Reply | Reset | Hang"]


class StubServer:
    """Serves `script` until `close()`; `requests` lists what was asked, in order."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.connections_made = 0
        self.requests: list[Request] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        # What it accepts inherits this: else each answer with a body waits 40 ms.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count(self, operation: str) -> int:
        """Requests of one operation so far."""
        return sum(request.operation == operation for request in self.requests)

    def close(self) -> None:
        """Stop; open connections are reset."""
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        for thread in self._threads:
            thread.join(5)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
                self.connections_made += 1
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        reader = connection.makefile("rb")
        try:
            while self._one(connection, reader):
                pass
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            reader.close()
            connection.close()

    def _one(self, connection: socket.socket, reader: object) -> bool:
        line = reader.readline()
        if not line:
            return False
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = {}
        while (raw := reader.readline().strip()) != b"":
            name, _, value = raw.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        request = Request(method, target, headers, reader, time.monotonic())
        with self._lock:
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.script(request)
            if isinstance(answer, Hang):
                self._closing.wait(60)
                return False
            if isinstance(answer, Reset):
                reader.read(answer.after_bytes)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                reader.close()
                return False
        finally:
            with self._lock:
                self.in_flight -= 1
        if not request.body_was_read:
            _ = request.body
        return self._send(connection, request, answer)

    def _send(self, connection: socket.socket, request: Request, reply: Reply) -> bool:
        length = len(reply.body) if reply.length is None else reply.length
        head = {"Content-Length": str(length), "Date": formatdate(usegmt=True), **reply.headers}
        text = f"HTTP/1.1 {reply.status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in head.items()) + "\r\n"
        connection.sendall(text.encode("latin-1"))
        if request.method != "HEAD":
            connection.sendall(reply.body)
        return request.method == "HEAD" or length == len(reply.body)


class StubBucket:
    """S3's semantics over a dict, as far as objckpt uses them. Thread-safe. Answers for every bucket name alike."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, tuple[str, bytes]]]] = {}
        self._lock = threading.Lock()
        self._next = 0

    def __call__(self, request: Request) -> Reply:
        body = request.body
        with self._lock:
            return getattr(self, "_" + request.operation)(request, body)

    def _PutObject(self, request: Request, body: bytes) -> Reply:
        if request.headers.get("if-none-match") == "*" and request.key in self.objects:
            return error(412, "PreconditionFailed")
        self.objects[request.key] = body
        return Reply(headers={"ETag": _etag(body)})

    def _GetObject(self, request: Request, body: bytes) -> Reply:
        data = self.objects.get(request.key)
        if data is None:
            return error(404, "NoSuchKey", "The specified key does not exist.")
        wanted = request.headers.get("range")
        if wanted is None:
            return Reply(200, data, {"ETag": _etag(data)})
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            return error(416, "InvalidRange")
        return Reply(206, data[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def _HeadObject(self, request: Request, body: bytes) -> Reply:
        data = self.objects.get(request.key)
        if data is None:
            return Reply(404)
        return Reply(200, b"", {"Last-Modified": formatdate(usegmt=True), "ETag": _etag(data)}, length=len(data))

    def _HeadBucket(self, request: Request, body: bytes) -> Reply:
        return Reply()

    def _DeleteObject(self, request: Request, body: bytes) -> Reply:
        self.objects.pop(request.key, None)
        return Reply(204)

    def _DeleteObjects(self, request: Request, body: bytes) -> Reply:
        for element in ElementTree.fromstring(body).iter():
            if element.tag.endswith("Key"):
                self.objects.pop(element.text or "", None)
        return Reply(200, b"<DeleteResult></DeleteResult>")

    def _ListObjectsV2(self, request: Request, body: bytes) -> Reply:
        after = request.query.get("continuation-token") or request.query.get("start-after", "")
        most = int(request.query.get("max-keys", 1000))
        keys = sorted(k for k in self.objects if k.startswith(request.query.get("prefix", "")) and k > after)
        page, more = keys[:most], len(keys) > most
        xml = "".join(
            f"<Contents><Key>{escape(k)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(self.objects[k])}</Size></Contents>"
            for k in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return Reply(
            200,
            f"<ListBucketResult><Name>b</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{xml}</ListBucketResult>".encode(),
        )

    def _CreateMultipartUpload(self, request: Request, body: bytes) -> Reply:
        self._next += 1
        name = f"upload-{self._next}"
        self.uploads[name] = (request.key, {})
        xml = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        return Reply(200, xml.encode())

    def _UploadPart(self, request: Request, body: bytes) -> Reply:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        upload[1][request.part or 0] = (_etag(body), body)
        return Reply(headers={"ETag": _etag(body)})

    def _ListParts(self, request: Request, body: bytes) -> Reply:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        xml = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(etag)}</ETag><Size>{len(data)}</Size></Part>"
            for n, (etag, data) in sorted(upload[1].items())
        )
        return Reply(200, f"<ListPartsResult><IsTruncated>false</IsTruncated>{xml}</ListPartsResult>".encode())

    def _CompleteMultipartUpload(self, request: Request, body: bytes) -> Reply:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        data = []
        tag = "{http://s3.amazonaws.com/doc/2006-03-01/}"
        for part in ElementTree.fromstring(body).iter(tag + "Part"):
            etag, piece = upload[1].get(int(part.findtext(tag + "PartNumber") or 0), ("", b""))
            if etag != part.findtext(tag + "ETag"):
                return error(400, "InvalidPart")
            data.append(piece)
        self.objects[upload[0]] = b"".join(data)
        del self.uploads[request.query["uploadId"]]
        return Reply(200, b'<CompleteMultipartUploadResult><ETag>"x-1"</ETag></CompleteMultipartUploadResult>')

    def _AbortMultipartUpload(self, request: Request, body: bytes) -> Reply:
        return Reply(204) if self.uploads.pop(request.query["uploadId"], None) else error(404, "NoSuchUpload")

    def _ListMultipartUploads(self, request: Request, body: bytes) -> Reply:
        prefix = request.query.get("prefix", "")
        xml = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{name}</UploadId></Upload>"
            for name, (key, _) in self.uploads.items()
            if key.startswith(prefix)
        )
        return Reply(
            200,
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{xml}</ListMultipartUploadsResult>".encode(),
        )


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
