"""What the null server holds: objects, uploads, and the memory out of which kept bodies are cut."""

from __future__ import annotations

import bisect
import itertools
import mmap
import threading
import time
from dataclasses import dataclass, field

PAGE_BYTES = 4096
MADV_POPULATE_WRITE = 23  # Linux 5.14


class S3Error(Exception):
    """An error answer; `code` as in the S3 API."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Memory:
    """One mapping, touched in advance, out of which bodies are cut (first fit)."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self.map = mmap.mmap(-1, max(self.size, PAGE_BYTES))
        try:
            self.map.madvise(MADV_POPULATE_WRITE)
        except OSError:  # an older kernel
            for at in range(0, self.size, PAGE_BYTES):
                self.map[at] = 0
        self.view = memoryview(self.map)
        self.free = [(0, self.size)] if self.size else []  # (start, end), sorted
        self.lock = threading.Lock()

    def take(self, size: int) -> int:
        need = -(-size // PAGE_BYTES) * PAGE_BYTES
        with self.lock:
            for i, (start, end) in enumerate(self.free):
                if end - start >= need:
                    self.free[i : i + 1] = [(start + need, end)] if end - start > need else []
                    return start
        raise S3Error(507, "InsufficientStorage")

    def give(self, start: int, size: int) -> None:
        end = start + -(-size // PAGE_BYTES) * PAGE_BYTES
        with self.lock:
            i = bisect.bisect(self.free, (start, end))
            if i < len(self.free) and self.free[i][0] == end:
                end = self.free.pop(i)[1]
            if i and self.free[i - 1][1] == start:
                i -= 1
                start = self.free.pop(i)[0]
            self.free.insert(i, (start, end))


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes: in `data`, at `at` in the memory, or (neither) only their number."""

    size: int
    data: bytes | None = None
    at: int | None = None


@dataclass
class Stored:
    segments: list[Segment]
    etag: str
    time_s: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(s.size for s in self.segments)


@dataclass
class Upload:
    name: str
    parts: dict[int, Stored] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)


class Objects:
    """All state: objects by `bucket/key`, and uploads by id."""

    def __init__(self, keep_bytes: int) -> None:
        self.keep = keep_bytes > 0
        self.memory = Memory(keep_bytes)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.lock = threading.Lock()
        self.serial = itertools.count(1)
        self.sent_bytes = 0  # bodies of GET

    def count_sent(self, nbytes: int) -> None:
        with self.lock:
            self.sent_bytes += nbytes

    def etag(self) -> str:
        return f'"{next(self.serial):032x}"'

    def drop(self, stored: Stored | None) -> None:
        for segment in stored.segments if stored else []:
            if segment.at is not None:
                self.memory.give(segment.at, segment.size)

    def copy(self, segment: Segment) -> Segment:
        if segment.at is None:
            return segment
        at = self.memory.take(segment.size)
        self.memory.view[at : at + segment.size] = self.memory.view[segment.at : segment.at + segment.size]
        return Segment(segment.size, at=at)

    def put(self, name: str, stored: Stored, *, only_new: bool) -> None:
        with self.lock:
            if only_new and name in self.objects:
                self.drop(stored)
                raise S3Error(412, "PreconditionFailed")
            old, self.objects[name] = self.objects.get(name), stored
        self.drop(old)

    def get(self, name: str) -> Stored:
        try:
            return self.objects[name]
        except KeyError:
            raise S3Error(404, "NoSuchKey") from None

    def delete(self, name: str) -> None:
        with self.lock:
            self.drop(self.objects.pop(name, None))

    def upload(self, upload_id: str, name: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.name != name:
            raise S3Error(404, "NoSuchUpload")
        return upload


def unframe(data: bytearray) -> bytes:
    """The payload of an aws-chunked body: `<hex size>[;…]\\r\\n<bytes>\\r\\n` repeated, then trailers."""
    out, at = bytearray(), 0
    while True:
        line_end = data.index(b"\r\n", at)
        size = int(data[at:line_end].split(b";")[0], 16)
        if size == 0:
            return bytes(out)
        out += memoryview(data)[line_end + 2 : line_end + 2 + size]
        at = line_end + 4 + size
