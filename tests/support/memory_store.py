"""The store's interface over a dict: the reference of the conformance suite, and a fast store for other tests.

    bucket = MemoryBucket()
    store, uploads = MemoryStore(bucket, "s3://bucket/run1"), MemoryUploads(bucket, "s3://bucket/run1")

`bucket.hook(phase, operation, key)`, phase "before" or "after" the effect, may raise or block: crash sweeps use it.
`bucket.list_lag = n`: an object is listed only after n further operations on the bucket, as on stores of old.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from objckpt.config import StoreOptions
from objckpt.errors import IntegrityError, NotFoundError, PreconditionFailedError, StoreError
from objckpt.store import ObjectInfo, PartDone, Pieces, UploadInfo, parse_url

Objects = list[ObjectInfo]
OpenUploads = list[UploadInfo]
Refusals = list[tuple[str, StoreError]]
Hook = Callable[[str, str, str], None]


class MemoryBucket:
    """The contents of one bucket, shared by any number of stores. Keys are the full ones."""

    def __init__(self, hook: Hook | None = None, *, conditional: bool = True) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.uploads: dict[str, tuple[str, float, dict[int, tuple[str, bytes]]]] = {}
        self.lock = threading.RLock()
        self.hook: Hook = hook or (lambda phase, operation, key: None)
        self.conditional = conditional  # False: If-None-Match is accepted and ignored, as some servers do
        self.operations: list[tuple[str, str]] = []
        self.list_lag = 0
        self._born: dict[str, int] = {}  # full key -> number of operations when the object appeared
        self._ids = itertools.count(1)

    def new_id(self) -> str:
        """A fresh upload id."""
        return f"id-{next(self._ids)}"

    def store(self, full: str, data: bytes) -> None:
        """Write an object; inside `around`."""
        if full not in self.objects:
            self._born[full] = len(self.operations)
        self.objects[full] = (bytes(data), time.time())

    def listed(self, full: str) -> bool:
        """Whether listings show the object already."""
        return not self.list_lag or len(self.operations) - self._born.get(full, -self.list_lag) >= self.list_lag

    def around(self, operation: str, key: str) -> _Around:
        """`with bucket.around(…):` the effect happens inside, the hook before and after."""
        return _Around(self, operation, key)


class _Around:
    def __init__(self, bucket: MemoryBucket, operation: str, key: str) -> None:
        self.bucket, self.operation, self.key = bucket, operation, key

    def __enter__(self) -> None:
        self.bucket.operations.append((self.operation, self.key))
        self.bucket.hook("before", self.operation, self.key)
        self.bucket.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bucket.lock.release()
        if kind is None:
            self.bucket.hook("after", self.operation, self.key)


class MemoryStore:
    """`Store` over a `MemoryBucket`."""

    def __init__(
        self, bucket: MemoryBucket | None = None, url: str = "s3://bucket/prefix", options: StoreOptions | None = None
    ) -> None:
        self.bucket = bucket or MemoryBucket()
        self._location = parse_url(url)
        self._options = options or StoreOptions()

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def options(self) -> StoreOptions:
        return self._options

    def list(self, prefix: str = "", *, start_after: str = "") -> Objects:
        with self.bucket.around("list", prefix):
            found = []
            for full, (data, modified_s) in sorted(self.bucket.objects.items()):
                key = self._location.relative(full)
                if key is not None and key.startswith(prefix) and key > start_after and self.bucket.listed(full):
                    found.append(ObjectInfo(key, len(data), modified_s))
            return found

    def once(self, operation: str, key: str | None, **arguments: Any) -> dict[str, Any]:
        """Of the requests that S3 knows only the listing of folders."""
        assert (operation, key, arguments["Delimiter"]) == ("ListObjectsV2", None, "/")
        under = arguments["Prefix"]
        rests = [full.removeprefix(under) for full in self.bucket.objects if full.startswith(under)]
        return {"CommonPrefixes": [{"Prefix": under + rest.split("/")[0] + "/"} for rest in rests if "/" in rest]}

    def _data(self, key: str) -> bytes:
        full = self._location.full(key)
        if full not in self.bucket.objects:
            raise NotFoundError(f"no object {full} in memory", key=full, status=404, code="NoSuchKey")
        return self.bucket.objects[full][0]

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self.bucket.around("get", key):
            data = self._data(key)
            if len(data) > max_bytes:
                raise IntegrityError(f"{key}: {len(data)} bytes, at most {max_bytes} are valid", key=key)
            return data

    def get_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, filled: Callable[[int], None] | None = None
    ) -> None:
        with self.bucket.around("get_into", key):
            views = [memoryview(buffer).cast("B") for buffer in buffers]
            at, end = start, start + sum(len(view) for view in views)
            data = self._data(key) if end > start else b""
            if end > start and len(data) < end:
                raise IntegrityError(f"{key}: bytes [{start}, {end}) are needed, it has {len(data)}", key=key)
            for index, view in enumerate(views):
                view[:] = data[at : at + len(view)]
                at += len(view)
                if filled is not None:
                    filled(index)

    def head(self, key: str) -> ObjectInfo:
        with self.bucket.around("head", key):
            data = self._data(key)
            return ObjectInfo(key, len(data), self.bucket.objects[self._location.full(key)][1])

    def put(self, key: str, data: bytes) -> None:
        with self.bucket.around("put", key):
            self.bucket.store(self._location.full(key), data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self.bucket.around("put_if_absent", key):
            full = self._location.full(key)
            if full in self.bucket.objects and self.bucket.conditional:
                raise PreconditionFailedError(f"{full} exists", key=full, status=412, code="PreconditionFailed")
            self.bucket.store(full, data)

    def delete(self, keys: Iterable[str]) -> Refusals:
        for key in keys:
            with self.bucket.around("delete", key):
                self.bucket.objects.pop(self._location.full(key), None)
        return []

    def list_uploads(self, prefix: str = "") -> OpenUploads:
        with self.bucket.around("list_uploads", prefix):
            found = []
            for upload_id, (full, started_s, _) in self.bucket.uploads.items():
                key = self._location.relative(full)
                if key is not None and key.startswith(prefix):
                    found.append(UploadInfo(key, upload_id, started_s))
            return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    def abort_upload(self, key: str, upload_id: str) -> None:
        with self.bucket.around("abort_upload", key):
            self.bucket.uploads.pop(upload_id, None)

    def close(self) -> None:
        pass


class MemoryUploads:
    """`Uploads` over a `MemoryBucket`; also an async context manager, as `open_uploads` returns."""

    def __init__(
        self, bucket: MemoryBucket, url: str = "s3://bucket/prefix", options: StoreOptions | None = None
    ) -> None:
        self.bucket = bucket
        self._location = parse_url(url)

    async def __aenter__(self) -> MemoryUploads:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def _parts(self, key: str, upload_id: str) -> dict[int, tuple[str, bytes]]:
        found = self.bucket.uploads.get(upload_id)
        if found is None or found[0] != self._location.full(key):
            raise StoreError(f"no upload {upload_id} of {key}", key=key, status=404, code="NoSuchUpload")
        return found[2]

    async def put(self, key: str, pieces: Pieces, crc: int | None) -> None:
        await asyncio.sleep(0)
        with self.bucket.around("put_pieces", key):
            self.bucket.store(self._location.full(key), b"".join(pieces))

    async def create(self, key: str) -> str:
        await asyncio.sleep(0)
        with self.bucket.around("create", key):
            upload_id = self.bucket.new_id()
            self.bucket.uploads[upload_id] = (self._location.full(key), time.time(), {})
            return upload_id

    async def part(self, key: str, upload_id: str, number: int, pieces: Pieces, crc: int | None) -> PartDone:
        await asyncio.sleep(0)
        with self.bucket.around("part", key):
            data = b"".join(pieces)
            etag = hashlib.md5(data).hexdigest()
            self._parts(key, upload_id)[number] = (etag, data)
            return PartDone(number, etag, len(data))

    async def complete(self, key: str, upload_id: str, parts: list[PartDone], size: int, crc: int | None) -> None:
        await asyncio.sleep(0)
        with self.bucket.around("complete", key):
            full = self._location.full(key)
            if upload_id not in self.bucket.uploads and len(self.bucket.objects.get(full, (b"",))[0]) == size:
                return
            stored = self._parts(key, upload_id)
            if [part.number for part in parts] != list(range(1, len(parts) + 1)) or sum(p.size for p in parts) != size:
                raise StoreError(f"{key}: the parts are not those of {size} bytes", key=key)
            if any(stored.get(part.number, ("", b""))[0] != part.etag for part in parts):
                raise StoreError(f"{key}: InvalidPart", key=key, status=400, code="InvalidPart")
            self.bucket.store(full, b"".join(stored[part.number][1] for part in parts))
            del self.bucket.uploads[upload_id]

    async def abort(self, key: str, upload_id: str) -> None:
        await asyncio.sleep(0)
        with self.bucket.around("abort", key):
            self.bucket.uploads.pop(upload_id, None)
