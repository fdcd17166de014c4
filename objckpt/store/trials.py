"""Which requests a store permits, found out by sending each of them once, under `probe/`.

A policy document tells what somebody wrote; what a person needs to know before a run of weeks is what gets through.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from objckpt.errors import AccessError, NotFoundError, ObjckptError, PreconditionFailedError, StoreError
from objckpt.store.location import parse_url
from objckpt.store.s3 import S3Store

T = TypeVar("T")
_BODY = b"objckpt"
_DENIED = {"AccessDenied", "AllAccessDisabled", "403", "Forbidden"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One request. `ok` is None when it could not be tried; `without` says what does not work where it is refused."""

    name: str
    action: str  # S3's name of the permission
    needed: bool  # without it nothing can be saved and restored
    ok: bool | None
    why: str = ""  # the store's answer when it is no success
    without: str = ""
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Clock:
    """The store's clock against this host's, to a second. Positive: this host's is ahead."""

    skew_s: float


def is_denied(error: ObjckptError) -> bool:
    """Whether it is this one request that is forbidden, rather than the credentials that are wrong."""
    return isinstance(error, AccessError) and error.context.get("code") in _DENIED


def contact(store: S3Store, root: str) -> Clock | None:
    """The first request, a listing. None when listing is denied, which says that everything else is right so far.

    Raises:
        StoreError: the endpoint cannot be reached, the bucket is not there, or the credentials are wrong.
    """
    began = time.time()
    try:
        answer = store.once("ListObjectsV2", None, Prefix=parse_url(store.url).prefix + root, MaxKeys=1)
    except AccessError as err:
        if is_denied(err):
            return None
        raise
    if "IsTruncated" not in answer:  # every S3 listing has it; a web server's page has not
        raise StoreError(f"ListObjectsV2 {store.url}: the answer is not a listing: is the endpoint an S3 server's?")
    said = email.utils.parsedate_tz(answer["ResponseMetadata"]["HTTPHeaders"].get("date"))
    if said is None:
        return None
    # The header has whole seconds, cut off: the middle of the second that it names.
    return Clock((began + time.time()) / 2 - email.utils.mktime_tz(said) - 0.5)


def try_all(store: S3Store, root: str) -> list[Trial]:
    """Send each kind of request that objckpt sends. Blocks. What it makes, under `root`, is deleted if that is permitted.

    Raises StoreError only where the store cannot be reached any more.
    """
    run = _Run(store)
    key, parts = f"{root}object", f"{root}parts"
    prefix = parse_url(store.url).prefix
    run.trial("list", "s3:ListBucket", lambda: store.once("ListObjectsV2", None, Prefix=prefix + root, MaxKeys=1))
    put = run.trial("put", "s3:PutObject", lambda: store.once("PutObject", key, Body=_BODY))
    run.trial("get", "s3:GetObject", lambda: _get(store, key, written=put is not None))
    run.trial("conditional put", "s3:PutObject", lambda: _conditional(store, f"{root}once"),
              without="the log takes its keyed form, which does not keep two jobs apart that write at once")  # fmt: skip
    created = run.trial("multipart create", "s3:PutObject", lambda: store.once("CreateMultipartUpload", parts))
    upload = str((created or {}).get("UploadId") or "")
    part = run.trial("multipart part", "s3:PutObject", lambda: store.once(
        "UploadPart", parts, UploadId=upload, PartNumber=1, Body=_BODY), after=bool(upload))  # fmt: skip
    listing = "unfinished uploads cannot be found and removed"
    run.trial("list uploads", "s3:ListBucketMultipartUploads", lambda: store.once(
        "ListMultipartUploads", None, Prefix=prefix + root), without=f"gc: {listing}")  # fmt: skip
    run.trial("list parts", "s3:ListMultipartUploadParts", lambda: store.once(
        "ListParts", parts, UploadId=upload), after=bool(upload), without="aborts of failed saves fail")  # fmt: skip
    run.trial("multipart complete", "s3:PutObject", lambda: store.once(
        "CompleteMultipartUpload", parts, UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": (part or {}).get("ETag", "")}]},
    ), after=part is not None)  # fmt: skip
    other = run.quietly(lambda: store.once("CreateMultipartUpload", f"{root}aborted")) if upload else None
    left = str((other or {}).get("UploadId") or "")
    run.trial("multipart abort", "s3:AbortMultipartUpload", lambda: store.once(
        "AbortMultipartUpload", f"{root}aborted", UploadId=left), after=bool(left),
        without="failed saves leave unfinished uploads, which cost storage until a lifecycle rule ends them")  # fmt: skip
    if part is None and upload:
        run.quietly(lambda: store.abort_upload(parts, upload))
    run.trial("delete", "s3:DeleteObject", lambda: _delete(store, [key, f"{root}once", parts]),
              without="keep_last, rm and gc free no space")  # fmt: skip
    return run.trials


class _Run:
    def __init__(self, store: S3Store) -> None:
        self.store = store
        self.trials: list[Trial] = []

    def trial(
        self, name: str, action: str, send: Callable[[], T], *, after: bool = True, without: str = ""
    ) -> T | None:
        """Send it and note the outcome; None when it failed. `without`: what is lost, for a request that is not needed."""
        needed = not without
        if not after:
            self.trials.append(Trial(name, action, needed, None, "not tried: the request before it failed", without))
            return None
        try:
            result = send()
        except StoreError as err:
            if "status" not in err.context or err.context["status"] is None:
                raise  # no answer
            self.trials.append(Trial(name, action, needed, False, str(err), without, err))
            return None
        self.trials.append(Trial(name, action, needed, True, "", without))
        return result

    def quietly(self, send: Callable[[], T]) -> T | None:
        try:
            return send()
        except StoreError:
            return None


def _get(store: S3Store, key: str, *, written: bool) -> None:
    try:
        answer = store.once("GetObject", key)
    except NotFoundError:
        if written:
            raise
        return  # nothing is there, and that is what is answered to those who may read
    if answer["Body"] != _BODY:
        raise StoreError(f"{store.url}/{key}: other bytes were read than had been written", key=key, status=200)


def _conditional(store: S3Store, key: str) -> None:
    try:
        store.once("PutObject", key, Body=_BODY, IfNoneMatch="*")
    except PreconditionFailedError as err:  # nobody else has the key
        raise StoreError(f"a new key was refused as existing: {err}", key=key, status=412) from err


def _delete(store: S3Store, keys: list[str]) -> Any:
    for _, error in store.delete(keys):
        raise error
