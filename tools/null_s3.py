"""An S3 server that is never the limit of a benchmark: bodies are received without being looked at.

    python tools/null_s3.py                    large bodies go into a scratch buffer, and are forgotten (GET: zeros)
    python tools/null_s3.py --receive drop     … are dropped inside the kernel, as if the server were another machine
    python tools/null_s3.py --keep-bytes 3e9   … are kept in memory that is touched before the first request

The first line on standard output is the endpoint's URL. Path style, any bucket, no credentials, no TLS. Bodies below
1 MiB (records, indexes) are always kept. Knows what a checkpoint engine asks for: PUT (also `If-None-Match: *`), ranged
GET, HEAD, DELETE, copies, DeleteObjects, ListObjectsV2, multipart and its listings. It checks nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape, unescape

from null_s3_objects import Objects, S3Error, Segment, Stored, Upload, unframe

SMALL_BYTES = 1 << 20
MAX_HEAD_BYTES = 64 << 10
SCRATCH_BYTES = 1 << 20
ZEROS = memoryview(bytes(16 << 20))
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.recv.restype = ctypes.c_ssize_t


class Connection:
    """One client connection, served by one thread with blocking calls."""

    def __init__(self, sock: socket.socket, objects: Objects, scratch: memoryview | None) -> None:
        self.sock, self.objects, self.scratch = sock, objects, scratch
        self.ahead = b""  # received beyond the current request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        with self.sock, contextlib.suppress(ConnectionError, TimeoutError):
            while self.request():
                pass

    # ---- receiving -------------------------------------------------------------------------------------------------

    def head(self) -> tuple[str, str, dict[str, str]] | None:
        data = self.ahead
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise ConnectionAbortedError("head too long")
            more = self.sock.recv(8192)
            if not more:
                return None
            data += more
        self.ahead = data[end + 4 :]
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        return method, target, {name.strip().lower(): value.strip() for name, _, value in pairs}

    def receive_into(self, view: memoryview) -> None:
        done = min(len(self.ahead), len(view))
        view[:done] = self.ahead[:done]
        self.ahead = self.ahead[done:]
        while done < len(view):
            got = self.sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("body cut")
            done += got

    def discard(self, size: int) -> None:
        done = min(len(self.ahead), size)
        self.ahead = self.ahead[done:]
        fd = self.sock.fileno()
        while done < size:
            if self.scratch is not None:
                got = self.sock.recv_into(self.scratch, min(size - done, len(self.scratch)), socket.MSG_WAITALL)
            else:  # MSG_TRUNC on TCP drops the bytes inside the kernel, without a copy (tcp(7))
                got = _LIBC.recv(fd, None, size - done, socket.MSG_TRUNC | socket.MSG_WAITALL)
            if got <= 0:
                raise ConnectionResetError("body cut")
            done += got

    def body(self, headers: dict[str, str], *, keep: bool | None = None) -> Segment:
        """Receive the request's body: kept as bytes when small, in the memory when the server keeps, else dropped."""
        length = int(headers.get("content-length", "0"))
        if "chunked" in headers.get("transfer-encoding", ""):
            raise S3Error(411, "MissingContentLength")
        if headers.get("expect", "").lower() == "100-continue":
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        keep = self.objects.keep if keep is None else keep
        if length >= SMALL_BYTES and not keep:
            self.discard(length)
            return Segment(int(headers.get("x-amz-decoded-content-length", length)))
        framed = "aws-chunked" in headers.get("content-encoding", "")
        if length < SMALL_BYTES or framed:
            data = bytearray(length)
            self.receive_into(memoryview(data))
            plain = unframe(data) if framed else bytes(data)
            if len(plain) < SMALL_BYTES:
                return Segment(len(plain), data=plain)
            at = self.objects.memory.take(len(plain))
            self.objects.memory.view[at : at + len(plain)] = plain
            return Segment(len(plain), at=at)
        try:
            at = self.objects.memory.take(length)
        except S3Error:
            self.discard(length)
            raise
        try:
            self.receive_into(self.objects.memory.view[at : at + length])
        except BaseException:
            self.objects.memory.give(at, length)
            raise
        return Segment(length, at=at)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def reply(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", length: int | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} {'OK' if status < 300 else 'Error'}"]
        lines += [f"Content-Length: {len(body) if length is None else length}", "Server: null"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def xml(self, root: str, inner: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}>{inner}</{root}>'
        self.reply(200, {"Content-Type": "application/xml"}, text.encode())

    def send(self, segments: list[Segment], start: int, end: int) -> None:
        # sendall from user memory, not sendfile: the receiver's copy out of single pages costs it twice as much.
        at = 0
        for segment in segments:
            lo, hi = max(start - at, 0), min(end - at, segment.size)
            at += segment.size
            if lo >= hi:
                continue
            if segment.data is not None:
                self.sock.sendall(memoryview(segment.data)[lo:hi])
            elif segment.at is not None:
                self.sock.sendall(self.objects.memory.view[segment.at + lo : segment.at + hi])
            else:
                for done in range(lo, hi, len(ZEROS)):
                    self.sock.sendall(ZEROS[: min(hi - done, len(ZEROS))])

    # ---- requests --------------------------------------------------------------------------------------------------

    def request(self) -> bool:
        """Serve one request; False when the client has closed the connection."""
        head = self.head()
        if head is None:
            return False
        method, target, headers = head
        path, _, query_text = target.partition("?")
        name = unquote(path).lstrip("/")
        query = {key: values[0] for key, values in parse_qs(query_text, keep_blank_values=True).items()}
        bucket, _, key = name.partition("/")
        try:
            if key:
                self.on_object(method, name, query, headers)
            else:
                self.on_bucket(method, bucket, query, headers)
        except S3Error as error:
            text = f"<Error><Code>{error.code}</Code><Message>{error.code}</Message><Key>{escape(key)}</Key></Error>"
            body = b"" if method == "HEAD" else text.encode()
            self.reply(error.status, {"Content-Type": "application/xml"}, body)
            return error.status != 411
        return True

    def on_bucket(self, method: str, bucket: str, query: dict[str, str], headers: dict[str, str]) -> None:
        if method == "GET" and "uploads" in query:
            self.list_uploads(bucket, query)
        elif method == "GET" and "location" in query:
            self.xml("LocationConstraint", "")
        elif method == "GET" and bucket:
            self.list_objects(bucket, query)
        elif method == "GET":
            self.xml("ListAllMyBucketsResult", f"<Buckets></Buckets><SentBytes>{self.objects.sent_bytes}</SentBytes>")
        elif method == "POST" and "delete" in query:
            text = self.text(headers)
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", text, re.DOTALL)]
            for key in keys:
                self.objects.delete(f"{bucket}/{key}")
            self.xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))
        elif method in ("PUT", "HEAD"):
            self.body(headers)
            self.reply(200)
        else:
            raise S3Error(501, "NotImplemented")

    def text(self, headers: dict[str, str]) -> str:
        data = self.body(headers, keep=True).data
        if data is None:
            raise S3Error(400, "MalformedXML")
        return data.decode()

    def on_object(self, method: str, name: str, query: dict[str, str], headers: dict[str, str]) -> None:
        if method == "PUT" and "uploadId" in query:
            self.put_part(name, query, headers)
        elif method == "PUT" and "x-amz-copy-source" in headers:
            source = self.objects.get(unquote(headers["x-amz-copy-source"]).lstrip("/"))
            stored = Stored([self.objects.copy(segment) for segment in source.segments], self.objects.etag())
            self.objects.put(name, stored, only_new=False)
            inner = f"<ETag>{escape(stored.etag)}</ETag><LastModified>{_xml_time(stored.time_s)}</LastModified>"
            self.xml("CopyObjectResult", inner)
        elif method == "PUT":
            stored = Stored([self.body(headers)], self.objects.etag())
            self.objects.put(name, stored, only_new=headers.get("if-none-match") == "*")
            self.reply(200, {"ETag": stored.etag, **_checksums(headers)})
        elif method == "POST" and "uploads" in query:
            self.body(headers)
            upload_id = f"u{next(self.objects.serial):031x}"
            self.objects.uploads[upload_id] = Upload(name)
            self.xml("InitiateMultipartUploadResult", f"{_names(name)}<UploadId>{upload_id}</UploadId>")
        elif method == "POST" and "uploadId" in query:
            self.complete(name, query["uploadId"], headers)
        elif method == "GET" and "uploadId" in query:
            self.list_parts(name, query["uploadId"])
        elif method == "DELETE" and "uploadId" in query:
            self.objects.upload(query["uploadId"], name)
            for part in self.objects.uploads.pop(query["uploadId"]).parts.values():
                self.objects.drop(part)
            self.reply(204)
        elif method == "DELETE":
            self.objects.delete(name)
            self.reply(204)
        elif method in ("GET", "HEAD"):
            self.get(method, name, headers)
        else:
            raise S3Error(501, "NotImplemented")

    def get(self, method: str, name: str, headers: dict[str, str]) -> None:
        stored = self.objects.get(name)
        size = stored.size
        start, end, status = 0, size, 200
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
        if match and match.group(0) != "bytes=-":
            first, last = match.groups()
            start = int(first) if first else max(size - int(last), 0)
            end = min(int(last) + 1, size) if first and last else size
            status = 206
            if start >= size or start >= end:
                raise S3Error(416, "InvalidRange")
        answer = {"ETag": stored.etag, "Last-Modified": _http_time(stored.time_s), "Accept-Ranges": "bytes"}
        answer["Content-Type"] = "application/octet-stream"
        if status == 206:
            answer["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self.reply(status, answer, length=end - start)
        if method == "GET":
            self.objects.count_sent(end - start)
            self.send(stored.segments, start, end)

    # ---- multipart and listings ------------------------------------------------------------------------------------

    def put_part(self, name: str, query: dict[str, str], headers: dict[str, str]) -> None:
        part = Stored([self.body(headers)], self.objects.etag())
        upload = self.objects.upload(query["uploadId"], name)
        self.objects.drop(upload.parts.get(int(query["partNumber"])))
        upload.parts[int(query["partNumber"])] = part
        self.reply(200, {"ETag": part.etag, **_checksums(headers)})

    def complete(self, name: str, upload_id: str, headers: dict[str, str]) -> None:
        numbers = [int(n) for n in re.findall(r"<PartNumber>\s*(\d+)\s*</PartNumber>", self.text(headers))]
        parts = self.objects.upload(upload_id, name).parts
        if not numbers or numbers != sorted(set(numbers)) or not set(numbers) <= set(parts):
            raise S3Error(400, "InvalidPart")
        stored = Stored([segment for n in numbers for segment in parts[n].segments], self.objects.etag())
        self.objects.put(name, stored, only_new=headers.get("if-none-match") == "*")
        del self.objects.uploads[upload_id]
        for number in set(parts) - set(numbers):
            self.objects.drop(parts[number])
        etag = escape(stored.etag, {'"': "&quot;"})
        self.xml(
            "CompleteMultipartUploadResult", f"<Location>/{escape(name)}</Location>{_names(name)}<ETag>{etag}</ETag>"
        )

    def list_parts(self, name: str, upload_id: str) -> None:
        upload = self.objects.upload(upload_id, name)
        rows = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(p.etag)}</ETag><Size>{p.size}</Size>"
            f"<LastModified>{_xml_time(p.time_s)}</LastModified></Part>"
            for n, p in sorted(upload.parts.items())
        )
        self.xml(
            "ListPartsResult", f"{_names(name)}<UploadId>{upload_id}</UploadId><IsTruncated>false</IsTruncated>{rows}"
        )

    def list_uploads(self, bucket: str, query: dict[str, str]) -> None:
        prefix = f"{bucket}/{query.get('prefix', '')}"
        rows = "".join(
            f"<Upload><Key>{escape(u.name[len(bucket) + 1 :])}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{_xml_time(u.time_s)}</Initiated></Upload>"
            for upload_id, u in list(self.objects.uploads.items())
            if u.name.startswith(prefix)
        )
        self.xml("ListMultipartUploadsResult", f"<Bucket>{bucket}</Bucket><IsTruncated>false</IsTruncated>{rows}")

    def list_objects(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        limit = min(int(query.get("max-keys", "1000")), 1000)
        shown = quote if query.get("encoding-type") == "url" else escape
        with self.objects.lock:
            names = sorted(n[len(bucket) + 1 :] for n in self.objects.objects if n.startswith(f"{bucket}/{prefix}"))
            entries: dict[str, Stored | None] = {}
            for key in names:
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                group = key[: cut + len(delimiter)] if cut >= 0 else key
                if group > after:
                    entries.setdefault(group, None if cut >= 0 else self.objects.objects[f"{bucket}/{key}"])
        page, more = list(entries.items())[:limit], len(entries) > limit
        rows = "".join(
            f"<CommonPrefixes><Prefix>{shown(key)}</Prefix></CommonPrefixes>"
            if stored is None
            else f"<Contents><Key>{shown(key)}</Key><Size>{stored.size}</Size><ETag>{escape(stored.etag)}</ETag>"
            f"<LastModified>{_xml_time(stored.time_s)}</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for key, stored in page
        )
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more and page else ""
        encoding = "<EncodingType>url</EncodingType>" if shown is quote else ""
        self.xml(
            "ListBucketResult",
            f"<Name>{bucket}</Name><Prefix>{shown(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{encoding}{token}{rows}",
        )


def _checksums(headers: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.startswith("x-amz-checksum-")}


def _names(name: str) -> str:
    bucket, _, key = name.partition("/")
    return f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"


def _xml_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time_s))


def _http_time(time_s: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time_s))


def serve(port: int, keep_bytes: int, receive: str) -> None:
    """Serve on 127.0.0.1 until killed."""
    objects = Objects(keep_bytes)
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    while True:
        sock, _ = listener.accept()
        scratch = memoryview(bytearray(SCRATCH_BYTES)) if receive == "copy" else None
        threading.Thread(target=Connection(sock, objects, scratch).run, daemon=True).start()


@dataclass(frozen=True)
class NullServer:
    """A running server: its endpoint, and its process for reading what it costs."""

    url: str
    pid: int


@contextlib.contextmanager
def null_server(keep_bytes: int = 0, receive: str = "copy") -> Iterator[NullServer]:
    """A server on a free port in a process of its own, which ends with the block, and with this process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--with-parent", "--receive", receive]
    process = subprocess.Popen(
        [*command, "--keep-bytes", str(keep_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("the null server did not start")
        yield NullServer(url, process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--keep-bytes", type=float, default=0, help="memory for large bodies; 0: none is kept")
    parser.add_argument(
        "--receive", choices=("copy", "drop"), default="copy", help="how bodies that are not kept are read"
    )
    parser.add_argument("--with-parent", action="store_true", help="end when standard input is closed")
    args = parser.parse_args()
    if args.with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        serve(args.port, int(args.keep_bytes), args.receive)


if __name__ == "__main__":
    main()
