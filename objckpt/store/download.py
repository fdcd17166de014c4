"""Reads a range of an object from the socket straight into the caller's memory, resuming bodies that break."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Sequence
from http.client import IncompleteRead
from typing import Any

from botocore.exceptions import ClientError

from objckpt import limits
from objckpt.errors import IntegrityError, ObjckptError
from objckpt.store import deadline
from objckpt.store.calls import Calls
from objckpt.store.retry import Tries
from objckpt.store.session import current_credentials
from objckpt.store.translate import Where

# One call into the socket's reader. When a connection breaks inside it, its bytes are not counted and are read again.
_STEP_BYTES = limits.MiB
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class _Cursor:
    """The place reached in a list of buffers."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers]
        self._index = 0
        self._at = 0  # inside the current buffer
        self.done = 0
        self.total = sum(len(view) for view in self._views)

    def view(self) -> memoryview:
        """Where the next bytes go."""
        return self._views[self._index][self._at : self._at + _STEP_BYTES]

    def advance(self, count: int) -> None:
        """`count` bytes were written to `view()`."""
        self._at += count
        self.done += count

    def completed(self) -> Generator[int, None, None]:
        """Step over every buffer that is full, the empty ones included; yields its number."""
        while self._index < len(self._views) and self._at == len(self._views[self._index]):
            self._index, self._at = self._index + 1, 0
            yield self._index - 1


def read_range(
    calls: Calls, key: str, start: int, buffers: Sequence[memoryview], filled: Callable[[int], None] | None
) -> None:
    """See `Store.get_into`.

    A large range on a slow link takes what it takes: both time limits begin again as long as bytes come at no less than
    `deadline.SLOWEST_BYTES_PER_S`.
    """
    cursor = _Cursor(buffers)
    end = start + cursor.total
    tries = Tries.within(calls.options.retry_deadline_s)
    renew_at = renew_bytes = int(calls.options.retry_deadline_s * deadline.SLOWEST_BYTES_PER_S)
    while True:
        client = calls.client()
        signed_with, reached = current_credentials(client), cursor.done
        where = calls.where("GetObject", key)
        stream = _receive(client, calls, key, start, end, cursor, where)
        limit = deadline.Limit(calls.options.request_timeout_s, renewed=True)
        try:
            while True:
                try:
                    with limit:
                        index = next(stream)
                except StopIteration:
                    calls.outage.succeeded(where, tries)
                    return
                except ObjckptError:
                    raise
                except Exception as error:
                    if cursor.done > reached:
                        tries.progressed()
                    if cursor.done >= renew_at:
                        renew_at = cursor.done + renew_bytes
                        tries.renew(calls.options.retry_deadline_s)
                    note = f"{cursor.done} of {cursor.total} bytes of the range [{start}, {end}) had arrived"
                    calls.failed(error, where, tries, signed_with, note)
                    break
                if filled is not None:
                    filled(index)
        finally:
            stream.close()


def _receive(
    client: Any, calls: Calls, key: str, start: int, end: int, cursor: _Cursor, where: Where
) -> Generator[int, None, None]:
    """One GET from the place reached on; yields the number of each buffer that is complete."""
    yield from cursor.completed()
    if cursor.done == cursor.total:
        return
    first = start + cursor.done
    full = calls.location.full(key)
    try:
        answer = client.get_object(Bucket=calls.location.bucket, Key=full, Range=f"bytes={first}-{end - 1}")
    except ClientError as error:
        if error.response["ResponseMetadata"].get("HTTPStatusCode") == 416:
            raise _short(where, start, end, None) from error
        raise
    raw = answer["Body"]._raw_stream
    clean = False
    try:
        skip = _bytes_before(answer, first, start, end, where)
        source = raw._fp  # http.client's response: urllib3's own readinto() copies
        _discard(source, skip, time.monotonic() + calls.options.request_timeout_s)
        while cursor.done < cursor.total:
            count = source.readinto(cursor.view())
            if not count:
                raise IncompleteRead(b"", cursor.total - cursor.done)
            cursor.advance(count)
            yield from cursor.completed()
        clean = source.isclosed()  # nothing is left on the connection, so it can be used again
    finally:
        if not clean:
            raw.close()
        raw.release_conn()


def _bytes_before(answer: Any, first: int, start: int, end: int, where: Where) -> int:
    """Bytes to drop before those wanted: 0, or `first` when the store ignores ranges.

    Raises IntegrityError when the object is too short.
    """
    length = answer.get("ContentLength")
    if answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
        if length is not None and length < end:
            raise _short(where, start, end, length)
        return first
    said = _CONTENT_RANGE.fullmatch(answer.get("ContentRange") or "")
    if said is None:
        if length is not None and length < end - first:
            raise _short(where, start, end, first + length)
        return 0
    if int(said[1]) != first:
        raise IntegrityError(
            f"{where}: bytes from {first} on were asked for, the answer begins at byte {said[1]}",
            key=where.key, expected=first, actual=int(said[1]),
        )  # fmt: skip
    if int(said[2]) + 1 < end:
        raise _short(where, start, end, int(said[2]) + 1)
    return 0


def _discard(source: Any, count: int, end: float) -> None:
    scratch = memoryview(bytearray(min(count, _STEP_BYTES)))
    while count:
        got = source.readinto(scratch[:count])
        if not got:
            raise IncompleteRead(b"", count)
        if time.monotonic() > end:  # bytes for nothing do not renew the time
            raise TimeoutError("no complete answer in time: the store ignores ranges and sends the whole object")
        count -= got


def _short(where: Where, start: int, end: int, size: int | None) -> IntegrityError:
    has = "fewer bytes" if size is None else f"only {size} bytes"
    return IntegrityError(
        f"{where}: the object is shorter than recorded: bytes [{start}, {end}) are needed, it has {has}",
        key=where.key, expected=end, actual=size,
    )  # fmt: skip
