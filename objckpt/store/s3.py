"""The synchronous store: reading, small writes, deletion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

from botocore import xform_name
from botocore.exceptions import NoCredentialsError

from objckpt import limits
from objckpt.config import StoreOptions
from objckpt.errors import (
    AmbiguousWriteError,
    IntegrityError,
    NotFoundError,
    PreconditionFailedError,
    StoreError,
)
from objckpt.store import deadline, download, listing
from objckpt.store.calls import Calls
from objckpt.store.interface import ObjectInfo, Objects, OpenUploads, Refusals
from objckpt.store.location import Location, mask_url
from objckpt.store.retry import Fault, Verdict, classify, is_unclear
from objckpt.store.session import current_credentials, md5_of
from objckpt.store.translate import Where, error_of, fault_of

_READ_BYTES = limits.MiB
_ABORT_ROUNDS = 10  # a part that is in flight during an abort may survive it, so aborts are repeated
_ONCE_S = 20.0  # for a small request out of curiosity
_NO_BATCH = {
    "NotImplemented",
    "MethodNotAllowed",
    "MalformedXML",
    "MissingContentLength",
    "InvalidRequest",
    "InvalidArgument",
}


class S3Store:
    """`Store` over botocore; see there for what each method promises."""

    def __init__(self, location: Location, options: StoreOptions) -> None:
        self._location = location
        self._options = options
        self._calls = Calls(location, options)
        self._batch_delete = True  # False once the server has refused it

    @property
    def url(self) -> str:
        """The normalised URL."""
        return self._location.url

    @property
    def options(self) -> StoreOptions:
        """The options it was opened with."""
        return self._options

    def list(self, prefix: str = "", *, start_after: str = "") -> Objects:
        """See `Store.list`."""
        return listing.objects(self._calls, prefix, start_after)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.get`."""
        where = self._calls.where("GetObject", key)

        def send(client: Any) -> bytes:
            answer = client.get_object(Bucket=self._location.bucket, Key=self._location.full(key))
            body, length = answer["Body"], answer.get("ContentLength")
            try:
                if length is not None and length > max_bytes:
                    raise _too_long(where, length, max_bytes)
                data = bytearray()
                while piece := body.read(_READ_BYTES):  # raises when the body is shorter than announced
                    data += piece
                    if len(data) > max_bytes:
                        raise _too_long(where, len(data), max_bytes)
                return bytes(data)
            finally:
                body.close()

        return self._calls.run("GetObject", key, send)

    def get_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, filled: Callable[[int], None] | None = None
    ) -> None:
        """See `Store.get_into`."""
        download.read_range(self._calls, key, start, buffers, filled)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        full = self._location.full(key)
        answer = self._calls.run(
            "HeadObject", key, lambda client: client.head_object(Bucket=self._location.bucket, Key=full)
        )
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def put(self, key: str, data: bytes) -> None:
        """See `Store.put`."""
        full, md5 = self._location.full(key), md5_of(data)
        self._calls.run(
            "PutObject",
            key,
            lambda client: client.put_object(Bucket=self._location.bucket, Key=full, Body=data, ContentMD5=md5),
        )

    def put_if_absent(self, key: str, data: bytes) -> None:
        """See `Store.put_if_absent`."""
        full = self._location.full(key)
        client = self._calls.client()
        signed_with = current_credentials(client)
        where = self._calls.where("PutObject", key)
        try:
            # Content-MD5 and no checksum header: every server knows it, so no second request without it is ever needed.
            with deadline.Limit(self._options.request_timeout_s):
                answer = client.put_object(
                    Bucket=self._location.bucket, Key=full, Body=data, ContentMD5=md5_of(data), IfNoneMatch="*"
                )
        except Exception as error:
            fault = fault_of(error)
            if fault.status in (409, 412):
                raise PreconditionFailedError(
                    f"{where}: the key exists or is being written ({fault.code})", key=key, code=fault.code
                ) from error
            expired = classify(fault) is Verdict.REFRESH
            if (expired and self._calls.refresh(signed_with)) or (not expired and is_unclear(fault)):
                raise _ambiguous(f"no clear answer: {fault.code} {fault.message}", where, fault) from error
            raise error_of(fault, where) from error
        if not answer.get("ETag"):
            raise _ambiguous("answered without an ETag, which is not how S3 answers", where, None)

    def delete(self, keys: Iterable[str]) -> Refusals:
        """See `Store.delete`."""
        left, refused = sorted(set(keys)), []
        while left:
            batch, left = left[: limits.MAX_DELETE_KEYS], left[limits.MAX_DELETE_KEYS :]
            if self._batch_delete and len(batch) > 1:
                try:
                    batch, bad = self._delete_batch(batch)
                    refused += bad
                except StoreError as error:
                    if error.context.get("code") not in _NO_BATCH and error.context.get("status") not in (
                        405,
                        411,
                        501,
                    ):
                        raise
                    self._batch_delete = False
            for key in batch:
                if (error_ := self._delete_one(key)) is not None:
                    refused.append((key, error_))
        return refused

    def _delete_batch(self, batch: Sequence[str]) -> tuple[Any, Any]:
        """(keys to try again one by one, keys refused for good)."""
        wanted = {"Objects": [{"Key": self._location.full(key)} for key in batch], "Quiet": True}
        answer = self._calls.run(
            "DeleteObjects", None, lambda client: client.delete_objects(Bucket=self._location.bucket, Delete=wanted)
        )
        again, refused = [], []
        for entry in answer.get("Errors", ()):
            key = self._location.relative(entry.get("Key") or "")
            fault = Fault("answer", str(entry.get("Code")), str(entry.get("Message") or ""))
            if key is None or fault.code in ("NoSuchKey", "NoSuchVersion"):
                continue
            if classify(fault) in (Verdict.RETRY, Verdict.THROTTLE):
                again.append(key)
            else:
                refused.append((key, error_of(fault, self._calls.where("DeleteObjects", key))))
        return again, refused

    def _delete_one(self, key: str) -> StoreError | None:
        full = self._location.full(key)
        try:
            self._calls.run(
                "DeleteObject", key, lambda client: client.delete_object(Bucket=self._location.bucket, Key=full)
            )
        except NotFoundError:
            return None
        except StoreError as error:
            if error.context.get("status") in (400, 403, 405, 409, 423):  # refused for this key, for example by a lock
                return error
            raise
        return None

    def list_uploads(self, prefix: str = "") -> OpenUploads:
        """See `Store.list_uploads`."""
        return listing.uploads(self._calls, prefix)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """See `Store.abort_upload`."""
        args = {"Bucket": self._location.bucket, "Key": self._location.full(key), "UploadId": upload_id}
        for _ in range(_ABORT_ROUNDS):
            try:
                self._calls.run("AbortMultipartUpload", key, lambda client: client.abort_multipart_upload(**args))
                if not self._calls.run("ListParts", key, lambda client: client.list_parts(**args)).get("Parts"):
                    return
            except StoreError as error:
                if error.context.get("code") == "NoSuchUpload" or isinstance(error, NotFoundError):
                    return
                raise
        where = self._calls.where("AbortMultipartUpload", key)
        raise StoreError(f"{where}: parts are left after {_ABORT_ROUNDS} aborts", key=key)

    def once(self, operation: str, key: str | None, **arguments: Any) -> dict[str, Any]:
        """One small request of S3 as it is, which nothing repeats: for finding out what a store does.

        Args:
            operation: S3's name, such as "PutObject".
            arguments: S3's parameters, without bucket and key.

        Returns:
            The answer as botocore gives it, `Body` read. Raises StoreError for anything that is no success.
        """
        client = self._calls.client()
        at = {"Bucket": self._location.bucket} | ({"Key": self._location.full(key)} if key is not None else {})
        try:
            with deadline.Limit(min(self._options.request_timeout_s, _ONCE_S)):
                answer: dict[str, Any] = getattr(client, xform_name(operation))(**at, **arguments)
                if "Body" in answer:
                    with closing(answer["Body"]) as body:
                        answer["Body"] = body.read()
        except Exception as error:
            raise error_of(fault_of(error), self._calls.where(operation, key)) from error
        return answer

    def identity(self) -> dict[str, str]:
        """Where requests go and whose key signs them: endpoint, region, provider of the AWS chain, end of the key's id.

        Sends nothing to the store; the chain may ask its own services. AccessError when it has no credentials.
        """
        client = self._calls.client()
        try:
            signer = current_credentials(client)
            if signer is None:
                raise NoCredentialsError
            key_id = str(signer.get_frozen_credentials().access_key)
        except Exception as error:
            raise error_of(fault_of(error), self._calls.where("Connect", None)) from error
        return {
            "endpoint": mask_url(client.meta.endpoint_url),
            "region": str(client.meta.region_name),
            "provider": str(signer.method),
            "key_id": "…" + key_id[-4:] if len(key_id) >= 16 else "…",
        }

    def close(self) -> None:
        """See `Store.close`."""
        self._calls.close()


def _too_long(where: Where, length: int, max_bytes: int) -> IntegrityError:
    return IntegrityError(
        f"{where}: the object has {length} bytes or more, at most {max_bytes} are valid here",
        key=where.key, expected=max_bytes, actual=length,
    )  # fmt: skip


def _ambiguous(text: str, where: Where, fault: Fault | None) -> AmbiguousWriteError:
    return AmbiguousWriteError(
        f"{where}: {text}",
        operation=where.operation, endpoint=where.endpoint, bucket=where.bucket, key=where.key,
        code=fault.code if fault else None, status=fault.status if fault else None,
    )  # fmt: skip
