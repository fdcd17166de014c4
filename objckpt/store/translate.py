"""The one border where exceptions of botocore, aiohttp, urllib3 and ssl become faults, and faults become our errors."""

from __future__ import annotations

import email.utils
import time
from dataclasses import dataclass
from http.client import HTTPException

import urllib3.exceptions
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from objckpt.errors import (
    AccessError,
    BucketError,
    ConnectError,
    NotFoundError,
    PreconditionFailedError,
    StoreError,
    StoreFullError,
)
from objckpt.store.location import mask_url
from objckpt.store.retry import Fault, demands_checksum, is_full

_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.RefreshWithMFAUnsupportedError,
    boto.InvalidConfigError,
)
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidClientTokenId", "InvalidToken"}
_REGION = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "Redirect", "InvalidRegion",
}  # fmt: skip


_UPLOADS = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}


@dataclass(frozen=True, slots=True)
class Where:
    """What was asked of whom; every message names it."""

    operation: str
    endpoint: str
    bucket: str
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.operation} s3://{self.bucket}/{self.key or ''} at {mask_url(self.endpoint)}"


def fault_of(error: BaseException) -> Fault:
    """The fault behind an exception of the client libraries."""
    text = mask_url(str(error)) or type(error).__name__
    name = type(error).__name__
    if isinstance(error, boto.ClientError):
        return _answered(error)
    if isinstance(error, _CREDENTIALS):
        return Fault("credentials", name, text)
    if isinstance(error, boto.SSLError):
        return Fault("tls", name, text)
    if isinstance(error, (boto.EndpointConnectionError, boto.ProxyConnectionError)):
        return Fault("refused", name, text)
    if isinstance(error, (boto.ConnectTimeoutError, boto.ReadTimeoutError, TimeoutError)):
        return Fault("timeout", name, text)
    if isinstance(error, boto.ConnectionClosedError):
        # So is wrapped what happens while a request is sent, a limit that is over included.
        for inner in getattr(error.kwargs.get("error"), "args", ()):
            if isinstance(inner, TimeoutError):
                return Fault("timeout", "TimeoutError", str(inner) or "the request could not be sent in time")
    if isinstance(error, ResponseParserError):
        return Fault("garbage", name, "the answer is not S3's XML; is this the address of an S3 server?")
    # The rest of HTTPClientError wraps whatever the socket raised; so do the bodies of aiohttp and urllib3.
    broken = (boto.HTTPClientError, urllib3.exceptions.HTTPError, HTTPException, OSError, boto.IncompleteReadError)
    if isinstance(error, broken) or type(error).__module__.startswith("aiohttp"):
        return Fault("network", name, text)
    return Fault("client", name, text)


def _answered(error: boto.ClientError) -> Fault:
    body = error.response.get("Error", {})
    meta = error.response.get("ResponseMetadata", {})
    headers = meta.get("HTTPHeaders", {})
    status = meta.get("HTTPStatusCode")
    region = headers.get("x-amz-bucket-region") or body.get("Region")
    message = mask_url(str(body.get("Message") or ""))
    return Fault("answer", str(body.get("Code") or status), message, status, region, headers.get("date"))


def error_of(fault: Fault, where: Where, *, tries: int = 1, checksums_off: bool = False, note: str = "") -> StoreError:
    """The error to raise for a fault that is final. The caller chains the original by `raise … from`."""
    cls, remedy = _diagnose(fault, where, checksums_off)
    status = f" ({fault.status})" if fault.status is not None else ""
    after = f", after {tries} tries" if tries > 1 else ""
    said = f": {fault.message.rstrip('. ')}" if fault.message else ""
    noted = f"; {note}" if note else ""
    message = f"{where} failed{after}: {fault.code}{status}{said}{noted}."
    return cls(
        f"{message} {remedy}".rstrip(),
        operation=where.operation,
        endpoint=mask_url(where.endpoint),
        bucket=where.bucket,
        key=where.key,
        code=fault.code,
        status=fault.status,
        region=fault.region,
    )


def _diagnose(fault: Fault, where: Where, checksums_off: bool) -> tuple[type[StoreError], str]:
    """The class that says what a handler does, and a sentence that says what a person does."""
    if fault.source == "credentials":
        if fault.code == "ProfileNotFound":
            return (
                AccessError,
                "Check the profile's name, or AWS_PROFILE, against ~/.aws/config and ~/.aws/credentials.",
            )
        remedy = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or write ~/.aws/credentials."
        if where.endpoint.rstrip("/").endswith(".amazonaws.com"):
            remedy += " This is AWS itself: for another store set AWS_ENDPOINT_URL."
        return AccessError, remedy
    if fault.source == "tls":
        return ConnectError, _tls_remedy(fault.message.lower())
    if fault.source in ("refused", "timeout", "network"):
        remedy = "Is the endpoint right (endpoint_url or AWS_ENDPOINT_URL), and the server running and reachable?"
        # A port for TLS hangs up on http: some answer 400 first, which is lost when the connection is reset.
        plain = fault.source == "network" and where.endpoint.startswith("http://")
        return ConnectError, f"{remedy} If it wants TLS, write https://." if plain else remedy
    if fault.source == "garbage":
        return StoreError, "Check endpoint_url or AWS_ENDPOINT_URL."
    if fault.source == "client":
        return StoreError, ""
    return _diagnose_answer(fault, where, checksums_off)


def _tls_remedy(text: str) -> str:
    if "wrong_version" in text or "wrong version" in text or "record layer" in text:
        return "The server speaks no TLS at this port: write http:// in the endpoint, or the port that has TLS."
    if "doesn't match" in text or "mismatch" in text or "not valid for" in text:
        return "The certificate is one for other host names: write one of them in the endpoint."
    if "certificate" in text:
        return "The server's certificate is not trusted: give the CA that signed it as ca_bundle or AWS_CA_BUNDLE."
    return "TLS failed: is the endpoint right (endpoint_url or AWS_ENDPOINT_URL), and the server reachable?"


def _diagnose_answer(fault: Fault, where: Where, checksums_off: bool) -> tuple[type[StoreError], str]:
    code, status = fault.code, fault.status
    if code in _EXPIRED:
        return AccessError, "The credentials expired, and the AWS chain has no newer ones: renew them and try again."
    if code == "RequestTimeTooSkewed":
        return AccessError, f"The clock of this host is wrong{_skew(fault)}: set it by NTP."
    if code in _REGION or (status is not None and 300 <= status < 400) or (fault.region and status == 400):
        lives = f"is in region {fault.region}" if fault.region else "is in another region"
        option = fault.region or "the bucket's region"
        return BucketError, f'Bucket {where.bucket} {lives}: set the option region="{option}" or AWS_REGION={option}.'
    if code == "NoSuchBucket" or (status == 404 and where.operation.startswith("List") and code != "NoSuchUpload"):
        return (
            BucketError,
            f"Bucket {where.bucket} does not exist there: create it, or correct the URL or the endpoint.",
        )
    if code == "InvalidBucketName":
        return BucketError, f"The server refuses the bucket name {where.bucket}."
    if code == "NoSuchUpload":
        return StoreError, "The multipart upload is gone: completed, aborted, or removed by a lifecycle rule."
    if status == 404:
        return NotFoundError, ""
    if status == 412:
        return PreconditionFailedError, ""
    if is_full(fault):
        return (
            StoreFullError,
            "The store is full or a quota is reached: free space there; what was saved before is intact.",
        )
    if code in _WRONG_KEY:
        return (
            AccessError,
            "The access key or the secret is wrong for this endpoint: check AWS_ACCESS_KEY_ID and its secret.",
        )
    if status in (401, 403) or code == "AccessDenied":
        hint = (
            ""
            if where.operation.startswith("List")
            else " (a missing key is answered so too where listing is forbidden)"
        )
        return AccessError, (
            f"The credentials lack the permission{hint}; objckpt needs s3:ListBucket, s3:GetObject, s3:PutObject, "
            "s3:DeleteObject, s3:AbortMultipartUpload, s3:ListMultipartUploadParts and s3:ListBucketMultipartUploads."
        )
    if checksums_off and demands_checksum(fault):
        return StoreError, 'This bucket demands checksums on uploads (Object Lock): use checksums="auto", not "off".'
    if code == "NotImplemented" or status == 501:
        return (
            StoreError,
            'The server does not know a header of this request; checksums="off" sends no checksum headers.',
        )
    if (
        status is not None
        and status >= 500
        and where.operation in _UPLOADS
        and code not in ("SlowDown", "ServiceUnavailable")
    ):
        # SeaweedFS, for one, answers InternalError when its disk or its volumes are full.
        return (
            StoreError,
            "The server's own log has the cause; often its disk is full. What was saved before is intact.",
        )
    if code in ("InvalidRequest", "InvalidArgument") and where.operation in _UPLOADS and not checksums_off:
        return StoreError, 'If it is the CRC-64/NVME of the upload that the server does not take: use checksums="off".'
    if code == str(status) and status == 400 and where.endpoint.startswith("http://"):
        return StoreError, "An S3 server gives a reason: is this a port for TLS? Then write https:// in the endpoint."
    return StoreError, ""


def _skew(fault: Fault) -> str:
    parsed = email.utils.parsedate_tz(fault.date) if fault.date else None
    if parsed is None:
        return ""
    return f" by {time.time() - email.utils.mktime_tz(parsed):+.0f} s against the store's"
