"""`s3://bucket/prefix` URLs, and the masking of credentials inside URLs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from objckpt import limits
from objckpt.errors import UsageError

# What botocore accepts; a server may be stricter and then answers with its own error.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
# Every S3 server tried stores these unchanged; others are folded, double-escaped or refused by some.
_SEGMENT = re.compile(r"[A-Za-z0-9._=@~-]+")
_MAX_SEGMENT_BYTES = 200  # servers that keep objects as files inherit their 255-byte names
_RESERVED_BYTES = 200  # the longest key objckpt appends to a prefix is shorter than this
# The password may hold "@" or, wrongly unescaped, "/": cut at the last "@" before white space or a quote.
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s'\"<>?#/]*(?::[^\s'\"<>?#]*)?@")


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a store. `prefix` is empty or ends with one "/", so that `run1/` never covers `run10/`."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The normalised URL, without a trailing "/"."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def full(self, key: str) -> str:
        """The key in the bucket of a key relative to this place. Raises UsageError for a key that S3 servers fold."""
        if not key or any(part in ("", ".", "..") for part in key.split("/")):
            raise UsageError(f"not a valid key: {key!r} (empty, '.' and '..' segments are folded by some stores)")
        full = self.prefix + key
        if len(full.encode()) > limits.MAX_KEY_BYTES:
            raise UsageError(f"key longer than {limits.MAX_KEY_BYTES} bytes: {full[:80]!r}…")
        return full

    def relative(self, full: str) -> str | None:
        """The inverse of `full()`; None for a key outside this place, for the place itself and for folder markers."""
        if not full.startswith(self.prefix) or full.endswith("/") or full == self.prefix:
            return None
        return full[len(self.prefix) :]


def parse_url(url: str) -> Location:
    """Parse `s3://bucket/prefix`. One trailing "/" is dropped; nothing else is folded or guessed.

    Raises:
        UsageError: not an s3:// URL, or a prefix that some S3 servers would fold, escape or refuse.
    """
    shown = _shown(url)
    why = f"not a valid s3:// URI: {shown!r}"
    if not url.startswith("s3://"):
        if url.lower().startswith(("http://", "https://")):
            why += "; write s3://bucket/prefix, and give the server as endpoint_url or AWS_ENDPOINT_URL"
        else:
            why += '; it must start with "s3://" in lower case, as in s3://bucket/prefix'
        raise UsageError(why)
    if "?" in url or "#" in url:
        raise UsageError(f"{why}; it has a query or fragment ('?' or '#'), which S3 URIs do not know")
    bucket, _, prefix = url[len("s3://") :].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{why}; the bucket name {mask_url('s3://' + bucket)[5:]!r} is empty or has characters outside [A-Za-z0-9._-]"
        )
    segments = prefix.removesuffix("/").split("/") if prefix else []
    for segment in segments:
        if segment in ("", ".", ".."):
            raise UsageError(f"{why}; empty, '.' and '..' segments are folded by some stores")
        if not _SEGMENT.fullmatch(segment):
            raise UsageError(f"{why}; the segment {segment!r} has characters outside [A-Za-z0-9._=@~-]")
        if len(segment) > _MAX_SEGMENT_BYTES:
            raise UsageError(f"{why}; a segment is longer than {_MAX_SEGMENT_BYTES} bytes")
    joined = "".join(segment + "/" for segment in segments)
    if len(joined) > limits.MAX_KEY_BYTES - _RESERVED_BYTES:
        raise UsageError(
            f"s3:// URI too long: the prefix has {len(joined)} bytes, of the {limits.MAX_KEY_BYTES} of an S3 key "
            f"{_RESERVED_BYTES} are needed for the names of the objects"
        )
    return Location(bucket, joined)


def _shown(url: str) -> str:
    """For messages: without user:password, query and fragment, where pasted URLs have passwords and signatures."""
    start, mark, rest = re.match(r"([^?#]*)([?#]?)(.*)", mask_url(url), re.DOTALL).groups()  # type: ignore[union-attr]
    if "@" in rest and "***@" not in start:  # a password with an unescaped mark
        start = start.partition("://")[0] + "://***"
    return f"{start}{mark}…" if mark else start


def mask_url(text: str) -> str:
    """`text` with the `user:password@` of every URL in it replaced by `***@`."""
    return _USERINFO.sub(r"\1***@", text)


def without_userinfo(url: str) -> str:
    """`url` without `user:password@`: signed requests carry no other credentials, and what is not sent cannot leak."""
    return _USERINFO.sub(r"\1", url)
