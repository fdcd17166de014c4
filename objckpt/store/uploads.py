"""The asynchronous half: large objects by multipart upload, the bytes sent from where they lie."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from objckpt.config import StoreOptions
from objckpt.errors import NotFoundError, ObjckptError, StoreError
from objckpt.store import payload  # noqa: F401  aiohttp learns of UploadBody
from objckpt.store import session as sessions
from objckpt.store.body import UploadBody
from objckpt.store.interface import PartDone, Pieces, Uploads
from objckpt.store.location import Location
from objckpt.store.outage import Outage
from objckpt.store.pace import Pace
from objckpt.store.retry import (
    FIRST_CONTACT_S,
    Fault,
    Tries,
    Verdict,
    classify,
    demands_checksum,
    is_unclear,
    refuses_checksum,
)
from objckpt.store.translate import Where, error_of, fault_of

T = TypeVar("T")
Send = Callable[[str], Awaitable[T]]  # one request, with the checksum mode of this try

_ABORT_ROUNDS = 10
_PART_REPAIRS = 2  # completions repeated with the store's own list of parts


@asynccontextmanager
async def open_s3_uploads(location: Location, options: StoreOptions) -> AsyncIterator[Uploads]:
    """See `objckpt.store.open_uploads`."""
    try:
        session = sessions.make_session(options, AioSession)
        settings = sessions.client_settings(session, options)
        # Each request gets its own timeout from us: aiohttp's covers only reading, not a peer that takes no bytes.
        config = AioConfig(
            connector_args={"socket_factory": _keepalive_socket},
            **sessions.config_settings(options, read_timeout_s=options.retry_deadline_s + options.request_timeout_s),
        )
        context = session.create_client(config=config, **settings)
        client = await context.__aenter__()
    except ObjckptError:
        raise
    except Exception as error:
        where = Where("Connect", options.endpoint_url or sessions.DEFAULT_ENDPOINT, location.bucket)
        raise error_of(fault_of(error), where) from error
    try:
        sessions.tame(client)
        yield S3Uploads(client, location, options)
    finally:
        await context.__aexit__(None, None, None)


def _keepalive_socket(address: Any) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made


class S3Uploads:
    """`Uploads` over aiobotocore; see there for what each method promises."""

    def __init__(self, client: Any, location: Location, options: StoreOptions) -> None:
        self._client = client
        self._location = location
        self._options = options
        self._pace = Pace(options.connections)
        self._refreshing = asyncio.Lock()
        self._answered = False
        self._outage = Outage()
        self._checksum = "crc" if options.checksums == "auto" else "off"  # then "none", then "md5": see _after()

    # ---- the operations

    async def put(self, key: str, pieces: Pieces, crc: int | None) -> None:
        """See `Uploads.put`."""
        size = sum(piece.nbytes for piece in pieces)

        async def send(mode: str) -> Any:
            body = UploadBody(pieces)
            try:
                headers = await _checksum_headers(mode, body, crc)
                return await self._client.put_object(**self._at(key), Body=body, ContentLength=size, **headers)
            finally:
                body.close()

        unclear = False

        def seen(fault: Fault) -> None:
            nonlocal unclear
            unclear = unclear or is_unclear(fault)

        try:
            answer = await self._run("PutObject", key, send, seen=seen)
        except StoreError:
            # A store that forbids overwriting refuses the repetition of a write whose answer was lost.
            if unclear and await self._size_of(key) == size:
                return
            raise
        if not answer.get("ETag"):
            await self._expect(key, size, "PutObject was answered without an ETag")

    async def create(self, key: str) -> str:
        """See `Uploads.create`."""

        async def send(mode: str) -> Any:
            declared = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if mode == "crc" else {}
            return await self._client.create_multipart_upload(**self._at(key), **declared)

        answer = await self._run("CreateMultipartUpload", key, send)
        if not answer.get("UploadId"):
            raise StoreError(f"{self._where('CreateMultipartUpload', key)}: the answer has no upload id", key=key)
        return str(answer["UploadId"])

    async def part(self, key: str, upload_id: str, number: int, pieces: Pieces, crc: int | None) -> PartDone:
        """See `Uploads.part`."""
        size = sum(piece.nbytes for piece in pieces)

        async def send(mode: str) -> Any:
            body = UploadBody(pieces)
            try:
                headers = await _checksum_headers(mode, body, crc)
                return await self._client.upload_part(
                    **self._at(key, upload_id), PartNumber=number, Body=body, ContentLength=size, **headers
                )
            finally:
                body.close()

        answer = await self._run("UploadPart", key, send)
        if not answer.get("ETag"):
            where = self._where("UploadPart", key)
            raise StoreError(
                f"{where}: part {number} was answered without an ETag, which the completion needs. "
                "Is a proxy removing headers, or the endpoint not an S3 server?",
                key=where.key, operation="UploadPart", endpoint=where.endpoint,
            )  # fmt: skip
        return PartDone(number, answer["ETag"], size)

    async def complete(self, key: str, upload_id: str, parts: list[PartDone], size: int, crc: int | None) -> None:
        """See `Uploads.complete`."""
        if [part.number for part in parts] != list(range(1, len(parts) + 1)) or sum(
            part.size for part in parts
        ) != size:
            # A part left out makes a shorter object, and no server complains.
            raise StoreError(
                f"{self._where('CompleteMultipartUpload', key)}: the parts are not those of {size} bytes", key=key
            )
        etags = {part.number: part.etag for part in parts}
        repairs, tried = 0, False

        async def send(mode: str) -> Any:
            nonlocal repairs, tried
            if tried and await self._size_of(key) == size:
                return None  # the try before took effect, only its answer was lost
            tried = True
            listed = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in etags.items()]}
            whole: dict[str, Any] = {}
            if mode == "crc" and crc is not None:
                whole = {"ChecksumCRC64NVME": _base64(crc), "ChecksumType": "FULL_OBJECT"}
            try:
                answer = await self._client.complete_multipart_upload(
                    **self._at(key, upload_id), MultipartUpload=listed, **whole
                )
            except Exception as error:
                fault = fault_of(error)
                if fault.code in ("InvalidPart", "InvalidPartOrder") and repairs < _PART_REPAIRS:
                    repairs += 1
                    etags.update(await self._listed_etags(key, upload_id, parts))
                    raise _Again from error
                if fault.source == "answer" and classify(fault) is Verdict.FAIL and await self._size_of(key) == size:
                    return None  # NoSuchUpload, AccessDenied and others are how stores answer a repetition
                raise
            if not answer.get("ETag"):
                await self._expect(key, size, "CompleteMultipartUpload was answered without an ETag")
                return None
            return answer

        answer = await self._run("CompleteMultipartUpload", key, send)
        if answer is not None:
            stored = await self._size_of(key)  # None: reading is not permitted to this writer
            if stored not in (size, None):
                raise StoreError(
                    f"{self._where('CompleteMultipartUpload', key)}: the store has {stored} of {size} bytes",
                    key=self._location.full(key), expected=size, actual=stored,
                )  # fmt: skip

    async def abort(self, key: str, upload_id: str) -> None:
        """See `Uploads.abort`."""
        at = self._at(key, upload_id)
        for _ in range(_ABORT_ROUNDS):
            try:
                await self._run("AbortMultipartUpload", key, lambda mode: self._client.abort_multipart_upload(**at))
                if not (await self._run("ListParts", key, lambda mode: self._client.list_parts(**at))).get("Parts"):
                    return
            except StoreError as error:
                if error.context.get("code") == "NoSuchUpload" or isinstance(error, NotFoundError):
                    return
                raise
        raise StoreError(
            f"{self._where('AbortMultipartUpload', key)}: parts are left after {_ABORT_ROUNDS} aborts", key=key
        )

    # ---- the pieces of the operations

    def _at(self, key: str, upload_id: str | None = None) -> dict[str, Any]:
        at = {"Bucket": self._location.bucket, "Key": self._location.full(key)}
        return at if upload_id is None else {**at, "UploadId": upload_id}

    def _where(self, operation: str, key: str) -> Where:
        return Where(operation, self._client.meta.endpoint_url, self._location.bucket, self._location.prefix + key)

    async def _size_of(self, key: str) -> int | None:
        """The stored size by HEAD; -1 for a missing object, None where the store does not tell."""
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                return int((await self._client.head_object(**self._at(key)))["ContentLength"])
        except Exception as error:
            return -1 if fault_of(error).status == 404 else None

    async def _expect(self, key: str, size: int, problem: str) -> None:
        if (stored := await self._size_of(key)) != size:
            found = "not there" if stored == -1 else "of unknown size" if stored is None else f"of {stored} bytes"
            where = self._where("HeadObject", key)
            raise StoreError(
                f"{where}: {problem}, and the object is {found}, not of {size}", key=where.key, expected=size
            )

    async def _listed_etags(self, key: str, upload_id: str, parts: list[PartDone]) -> dict[int, str]:
        """The ETags that the store has for our parts: a try that landed late replaces the ETag, but not the bytes."""
        sizes = {part.number: part.size for part in parts}
        etags: dict[int, str] = {}
        marker = 0
        while True:
            page = await self._client.list_parts(**self._at(key, upload_id), PartNumberMarker=marker)
            listed = page.get("Parts", ())
            etags |= {p["PartNumber"]: p["ETag"] for p in listed if sizes.get(p["PartNumber"]) == p["Size"]}
            if not page.get("IsTruncated") or not listed:
                return etags
            marker = listed[-1]["PartNumber"]

    # ---- one operation: its tries, its deadline, and what a failed try changes

    async def _run(self, operation: str, key: str, send: Send[T], *, seen: Callable[[Fault], None] | None = None) -> T:
        tries = Tries.within(self._options.retry_deadline_s)
        where = self._where(operation, key)
        while True:
            async with self._pace.slot():
                mode = self._checksum
                signed_with = sessions.current_credentials(self._client)
                try:
                    async with asyncio.timeout(min(self._options.request_timeout_s, tries.left_s())):
                        result = await send(mode)
                except ObjckptError:
                    raise
                except _Again:
                    continue
                except Exception as error:
                    fault = fault_of(error)
                    if seen is not None:
                        seen(fault)
                    pause = await self._after(fault, error, mode, signed_with, tries, where)
                else:
                    self._answered = True
                    self._pace.succeeded()
                    self._outage.succeeded(where, tries)
                    return result
            await asyncio.sleep(pause)  # outside the slot: a waiting operation holds no connection

    async def _after(
        self, fault: Fault, error: Exception, mode: str, signed_with: Any, tries: Tries, where: Where
    ) -> float:
        """Seconds to pause before the next try; raises when there is none."""
        self._answered = self._answered or fault.source == "answer"
        if self._other_checksum(fault, mode):
            return 0.0
        verdict, told = classify(fault), tries.telling(fault)
        if verdict is Verdict.REFRESH:
            fresh = tries.count < 3 and await self._refresh(signed_with)
            verdict = Verdict.RETRY if fresh else Verdict.FAIL
        if verdict is Verdict.THROTTLE:
            self._pace.throttled()
        pause = tries.next_pause_s(verdict)
        if fault.source == "refused" and not self._answered:
            waited = self._options.retry_deadline_s - tries.left_s()
            pause = None if waited >= FIRST_CONTACT_S else pause
        if verdict is Verdict.FAIL or pause is None:
            off = self._options.checksums == "off"
            raise error_of(told, where, tries=tries.total, checksums_off=off) from error
        self._outage.failed(told, where, tries)
        return pause

    def _other_checksum(self, fault: Fault, mode: str) -> bool:
        """True: try again, with another checksum than `mode`.

        Steps from CRC to none, or to Content-MD5 where one is demanded, when the store refuses, and remembers it.
        """
        if mode == "off":
            return False
        if self._checksum != mode:
            return refuses_checksum(fault)  # a parallel request has stepped meanwhile
        if demands_checksum(fault) and mode != "md5":
            self._checksum = "md5"
        elif mode == "crc" and refuses_checksum(fault):
            self._checksum = "none"
        return self._checksum != mode

    async def _refresh(self, signed_with: Any) -> bool:
        """Read the credentials again. True when there are others than those that a refused request was signed with."""
        async with self._refreshing:
            if sessions.current_credentials(self._client) is not signed_with:
                return True
            fresh = await sessions.make_session(self._options, AioSession).get_credentials()
            if fresh is None:
                return False
            if await fresh.get_frozen_credentials() == await signed_with.get_frozen_credentials():
                return False
            sessions.swap_credentials(self._client, fresh)
            return True


class _Again(Exception):
    """The request has been changed and is to be sent again at once."""


async def _checksum_headers(mode: str, body: UploadBody, crc: int | None) -> dict[str, str]:
    if mode == "crc" and crc is not None:
        return {"ChecksumCRC64NVME": _base64(crc)}
    if mode == "md5":
        md5 = await asyncio.to_thread(lambda: sessions.md5_of(body.read()))
        body.seek(0)
        return {"ContentMD5": md5}
    return {}


def _base64(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()
