"""Listings, page by page. An answer that is not a complete listing raises: it never looks like an empty store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from objckpt.errors import StoreError
from objckpt.store.calls import Calls
from objckpt.store.interface import ObjectInfo, UploadInfo


def objects(calls: Calls, prefix: str, start_after: str) -> list[ObjectInfo]:
    """See `Store.list`."""
    root = calls.location.prefix
    first: dict[str, Any] = {"StartAfter": root + start_after} if start_after else {}

    def following(page: dict[str, Any]) -> dict[str, Any]:
        if token := page.get("NextContinuationToken"):
            return {"ContinuationToken": token}
        contents = page.get("Contents")
        return {"StartAfter": contents[-1]["Key"]} if contents else {}

    found: dict[str, ObjectInfo] = {}
    for page in _pages(calls, "list_objects_v2", prefix, first, following):
        for entry in page.get("Contents", ()):
            key = calls.location.relative(entry["Key"])
            # Servers order keys differently ("a/b" before "a-b"), so the border is drawn again here.
            if key is not None and key.startswith(prefix) and key > start_after:
                found[key] = ObjectInfo(key, entry.get("Size", 0), entry["LastModified"].timestamp())
    return [found[key] for key in sorted(found)]


def uploads(calls: Calls, prefix: str) -> list[UploadInfo]:
    """See `Store.list_uploads`."""

    def following(page: dict[str, Any]) -> dict[str, Any]:
        markers = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
        return {name: value for name, value in markers.items() if value}

    found = []
    for page in _pages(calls, "list_multipart_uploads", prefix, {}, following):
        for entry in page.get("Uploads", ()):
            key = calls.location.relative(entry["Key"])
            if key is not None and key.startswith(prefix):
                started = entry["Initiated"].timestamp() if "Initiated" in entry else 0.0
                found.append(UploadInfo(key, entry["UploadId"], started))
    return sorted(found, key=lambda upload: (upload.key, upload.upload_id))


def _pages(
    calls: Calls,
    method: str,
    prefix: str,
    position: dict[str, Any],
    following: Callable[[dict[str, Any]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    operation = "ListObjectsV2" if method == "list_objects_v2" else "ListMultipartUploads"
    args = {"Bucket": calls.location.bucket, "Prefix": calls.location.prefix + prefix}
    while True:

        def send(client: Any, position: dict[str, Any] = position) -> dict[str, Any]:
            page: dict[str, Any] = getattr(client, method)(**args, **position)
            return page

        page = calls.run(operation, prefix, send)
        where = calls.where(operation, prefix)
        if "IsTruncated" not in page:  # every S3 listing has it; an empty body or a proxy's page has not
            raise StoreError(
                f"{where}: the answer is not a listing. Check the endpoint.", key=where.key, operation=operation
            )
        yield page
        if not page["IsTruncated"]:
            return
        then = following(page)
        if not then or then == position:
            raise StoreError(
                f"{where}: the listing does not advance beyond {position}", key=where.key, operation=operation
            )
        position = then
