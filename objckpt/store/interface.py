"""The store's interface: the two protocols that the rest of objckpt programs against, and their small values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from objckpt.config import StoreOptions
from objckpt.errors import StoreError

Pieces = Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object. `key` is relative to the store's prefix; `modified_s` is seconds since the epoch."""

    key: str
    size: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class UploadInfo:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    upload_id: str
    started_s: float


@dataclass(frozen=True, slots=True)
class PartDone:
    """A part that the store has taken; `etag` is passed back on completion and trusted for nothing else."""

    number: int
    etag: str
    size: int


# Inside a class that has a method `list`, the builtin's name means that method.
Objects = list[ObjectInfo]
OpenUploads = list[UploadInfo]
Refusals = list[tuple[str, StoreError]]


class Store(Protocol):
    """Reading, small writes and deletion; synchronous and thread-safe. Keys are relative to the URL's prefix.

    Every operation repeats failed requests within `options.retry_deadline_s`, except `put_if_absent`, and raises a
    `StoreError` that names operation, key and endpoint.
    """

    @property
    def url(self) -> str:
        """The normalised URL."""

    @property
    def options(self) -> StoreOptions:
        """The options it was opened with."""

    def list(self, prefix: str = "", *, start_after: str = "") -> Objects:
        """All objects whose key starts with `prefix` and is greater than `start_after`, sorted by key.

        A failed or refused listing raises; an empty list means that there is nothing.
        """

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. Raises NotFoundError; IntegrityError when it is longer than `max_bytes`."""

    def get_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, filled: Callable[[int], None] | None = None
    ) -> None:
        """Read `[start, start + total length)` into the writable `buffers` in turn, by one ranged GET.

        `filled(i)` is called in this thread once buffer `i` is complete. A broken body is resumed where it broke.
        Raises NotFoundError; IntegrityError when the object is shorter; the contents of the buffers are then undefined.
        """

    def head(self, key: str) -> ObjectInfo:
        """Size and time of an object. Raises NotFoundError."""

    def put(self, key: str, data: bytes) -> None:
        """Write a small object; may overwrite."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write by one conditional request that no layer repeats.

        Raises PreconditionFailedError when the key exists or is being written; AmbiguousWriteError when the answer does
        not tell; StoreError with code "NotImplemented" where the store does not know the condition. Success is no proof
        of exclusivity: some stores ignore the condition.
        """

    def delete(self, keys: Iterable[str]) -> Refusals:
        """Delete; a missing key is success. Returns the keys that were refused, each with its error."""

    def list_uploads(self, prefix: str = "") -> OpenUploads:
        """The unfinished multipart uploads under `prefix`."""

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort until no part is left; an upload that is gone is success."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


class Uploads(Protocol):
    """Writing of large objects; asynchronous, for one event loop. Buffers are free when a call has ended, however."""

    async def put(self, key: str, pieces: Pieces, crc: int | None) -> None:
        """Write an object by one request. `crc`: CRC-64/NVME of its bytes, sent along where the store takes it."""

    async def create(self, key: str) -> str:
        """Begin a multipart upload; returns its id."""

    async def part(self, key: str, upload_id: str, number: int, pieces: Pieces, crc: int | None) -> PartDone:
        """Send part `number` (from 1); may be called again with the same bytes."""

    async def complete(self, key: str, upload_id: str, parts: list[PartDone], size: int, crc: int | None) -> None:
        """Make the object of `size` bytes visible; returns only when the store is known to have all of it."""

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort until no part is left; an upload that is gone is success."""
