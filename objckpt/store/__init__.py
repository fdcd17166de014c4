"""Object store access. S3 only, torch-free; the asynchronous half is imported when `open_uploads` is called."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from objckpt.config import StoreOptions
from objckpt.store.interface import ObjectInfo, PartDone, Pieces, Store, UploadInfo, Uploads
from objckpt.store.location import Location, mask_url, parse_url

__all__ = [
    "Location",
    "ObjectInfo",
    "PartDone",
    "Pieces",
    "Store",
    "UploadInfo",
    "Uploads",
    "mask_url",
    "open_store",
    "open_uploads",
    "parse_url",
]


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """The store at `s3://bucket/prefix`, for reading and small writes. No request is made.

    Raises:
        UsageError: the URL is not acceptable.
    """
    from objckpt.store.s3 import S3Store

    return S3Store(parse_url(url), options or StoreOptions())


def open_uploads(url: str, options: StoreOptions | None = None) -> AbstractAsyncContextManager[Uploads]:
    """The uploads of `s3://bucket/prefix`: `async with open_uploads(url) as uploads`. No request is made.

    Raises:
        UsageError: the URL is not acceptable.
    """
    from objckpt.store.uploads import open_s3_uploads

    return open_s3_uploads(parse_url(url), options or StoreOptions())
