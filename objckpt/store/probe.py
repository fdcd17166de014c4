"""What a store can do, found out by doing it: documents and version numbers of S3 servers are no proof.

Whether `If-None-Match: *` keeps two writers apart decides in which form the log is written. Some servers ignore the
header, some do not know it, and some look first and write then, which only a race shows.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from objckpt import limits
from objckpt.errors import (
    AccessError,
    AmbiguousWriteError,
    NotFoundError,
    ObjckptError,
    PreconditionFailedError,
    StoreError,
)
from objckpt.store.interface import Store

logger = logging.getLogger("objckpt")

PROBES = "probe/"
WRITERS = 16  # of one key, in each round
ROUNDS = 4
AT_ONCE = 2  # SeaweedFS lets each writer but two of those at once wait for a second or more; the first two do race
_TRIES = 4  # of one question whose answer was unclear
_PAUSE_S = 0.1
_PATIENCE_S = 2.0  # after which a question is not asked again
_BODY_BYTES = 256
_SMALL_PART_BYTES = limits.KiB

Outcome = Literal["won", "refused", "unclear", "failed"]
T = TypeVar("T")


@runtime_checkable
class Asks(Protocol):
    """A store that sends single requests of S3 as they are asked for; others cannot be asked for checksums and the like."""

    def once(self, operation: str, key: str | None, **arguments: Any) -> dict[str, Any]:
        """See `S3Store.once`."""


def probe(store: Store, *, rounds: int = ROUNDS, at_once: int = AT_ONCE) -> dict[str, Any]:
    """Ask the store what it can do, by about 80 small requests for `probe/<random>-…`. Blocks, some tenths of a second.

    Whatever it wrote is deleted, also after an error; a store that refuses the deletion keeps some bytes.

    Args:
        rounds: races of 16 writers for one key.
        at_once: requests in flight in a race, each on a connection of its own.

    Returns:
        Plain values; None is what could not be found out.
        conditional_put: a PUT with `If-None-Match: *` succeeds exactly once. conditional_put_evidence: how that showed.
        ranged_get: a GET of a range is answered by the range alone.
        checksum_crc64nvme: uploads may carry this checksum. checksums_verified: a wrong one is refused.
        multipart_min_bytes: parts (but the last) of this size are taken; 5 MiB, S3's rule, where small ones are refused.
        delete: what was written could be deleted.

    Raises:
        StoreError: not even small objects can be written.
    """
    made = _Made(store)
    found: dict[str, Any] = {}
    try:
        store.put(made.key("plain"), b"objckpt")  # repeated as a save would be; raises when nothing can be written
        found["conditional_put"], found["conditional_put_evidence"] = _conditional_put(made, rounds, at_once)
        for name, ask in (
            ("ranged_get", _ranged_get),
            ("checksum_crc64nvme", _takes_checksum),
            ("checksums_verified", _verifies_checksum),
            ("multipart_min_bytes", _multipart_min_bytes),
        ):
            found[name] = _known(name, ask, made)
    finally:
        found["delete"] = made.delete()
    return found


def judge(outcomes: Sequence[Outcome], holder: int | None) -> tuple[bool | None, str]:
    """Pure: what a round says about conditional PUT, and why. None: nothing.

    Args:
        outcomes: of each writer. "won": told that it had created the key; "refused": that it exists already.
        holder: the writer whose bytes the key has; None when there is no such key, -1 for bytes of nobody.
    """
    won = [i for i, outcome in enumerate(outcomes) if outcome == "won"]
    if len(won) > 1:
        return False, f"{len(won)} of {len(outcomes)} writers of one key were told that they had created it"
    if won and holder != won[0]:
        there = "nothing" if holder is None else "the bytes of another"
        return False, f"one of {len(outcomes)} writers was told that it had created the key, which has {there}"
    if holder is not None and (holder < 0 or outcomes[holder] == "refused"):
        return False, f"the key has bytes that none of {len(outcomes)} writers was told to have written"
    if won:
        return True, f"one of {len(outcomes)} writers created the key, and its bytes stayed"
    return None, "no writer was told that it had created the key"


class _Made:
    """The objects and uploads of one probe, under names that nobody else has.

    Not in a folder of their own: servers that keep objects as files would keep that, empty, and list it for ever.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.prefix = f"{PROBES}{secrets.token_hex(8)}-"
        self.keys: list[str] = []
        self.uploads: list[tuple[str, str]] = []

    def key(self, name: str) -> str:
        """A new key; what is written there is deleted in the end."""
        self.keys.append(f"{self.prefix}{name}-{len(self.keys)}")
        return self.keys[-1]

    def ask(self, operation: str, key: str | None, **arguments: Any) -> dict[str, Any]:
        if not isinstance(self.store, Asks):
            raise _Unknown("the store sends no single requests")
        return self.store.once(operation, key, **arguments)

    def delete(self) -> bool | None:
        """Remove everything. False when that was refused, None when it failed."""
        try:
            for key, upload_id in self.uploads:
                self.store.abort_upload(key, upload_id)
            refused = self.store.delete(self.keys)
        except ObjckptError as err:  # what was found out is worth more; a collection removes the rest
            logger.debug("probe: %s is left: %s", self.prefix, err)
            return False if isinstance(err, AccessError) else None
        for key, why in refused:
            logger.debug("probe: %s is left: %s", key, why)
        return not refused


class _Unknown(Exception):
    """The question has no answer."""


def _known(name: str, ask: Callable[[_Made], T], made: _Made) -> T | None:
    """The answer; None where there is none: no save fails for what is only not known."""
    end = time.monotonic() + _PATIENCE_S
    for _ in range(_TRIES):
        try:
            return ask(made)
        except (_Unknown, KeyError) as why:  # KeyError: an answer without what S3 promises
            logger.debug("probe: %s is unknown: %r", name, why)
            return None
        except ObjckptError as err:
            logger.debug("probe: %s: %s", name, err)
            if _is_final(err) or time.monotonic() > end:
                return None
            time.sleep(_PAUSE_S)
    return None


def _is_final(err: ObjckptError) -> bool:
    """Whether the same request would be answered alike."""
    status = err.context.get("status")
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 409, 429)


# ---- If-None-Match -------------------------------------------------------------------------------------------------


def _conditional_put(made: _Made, rounds: int, at_once: int) -> tuple[bool | None, str]:
    """Whether the condition holds, and how that showed. First in turn, which costs two requests, then by races."""
    works, evidence = _in_turn(made)
    if not works:
        return works, evidence
    conclusive = 0
    for n in range(rounds + _TRIES):
        verdict, why = _race(made, at_once)
        if verdict is False:
            return False, f"round {n + 1} of races: {why}"
        conclusive += verdict is True
        if conclusive == rounds:
            return True, (
                f"{evidence}; in each of {rounds} races of {WRITERS} writers, {at_once} at once, one created the key, "
                "and its bytes stayed"
            )
    return None, f"{evidence}; but only {conclusive} of {rounds + _TRIES} races had an outcome: {why}"


def _in_turn(made: _Made) -> tuple[bool | None, str]:
    unclear = ""
    for _ in range(_TRIES):
        key = made.key("in-turn")
        first, second = secrets.token_bytes(_BODY_BYTES), secrets.token_bytes(_BODY_BYTES)
        try:
            made.store.put_if_absent(key, first)
        except (AmbiguousWriteError, PreconditionFailedError) as err:  # refused: another answers than took the write
            unclear = str(err)
            time.sleep(_PAUSE_S)
            continue
        except StoreError as err:
            made.store.put(key, first)  # raises where nothing can be written any more, whatever the condition
            return False, f"a PUT with If-None-Match to a new key was refused, one without it was not: {err}"
        try:
            made.store.put_if_absent(key, second)
        except PreconditionFailedError as err:
            try:
                there = made.store.get(key, max_bytes=_BODY_BYTES)
            except ObjckptError as failed:
                return None, f"the key could not be read back: {failed}"
            if there != first:
                return False, "a second PUT with If-None-Match to one key was refused, and took effect all the same"
            return True, f"a second PUT to one key was refused ({err.context.get('code')})"
        except StoreError as err:
            unclear = str(err)
            time.sleep(_PAUSE_S)
            continue
        return False, "a second PUT with If-None-Match to one key succeeded: the header is ignored"
    return None, f"no clear answer to a PUT with If-None-Match: {unclear}"


def _race(made: _Made, at_once: int) -> tuple[bool | None, str]:
    """One round. A few threads for all writers: those of the first requests start together."""
    key = made.key("race")
    bodies = [bytes([n]) * _BODY_BYTES for n in range(WRITERS)]
    gate = threading.Barrier(at_once)

    def write(n: int) -> Outcome:
        if n < at_once:
            try:
                gate.wait(timeout=5)
            except threading.BrokenBarrierError:  # a thread could not start: they write all the same
                pass
        try:
            made.store.put_if_absent(key, bodies[n])
        except PreconditionFailedError:
            return "refused"
        except AmbiguousWriteError:
            return "unclear"
        except StoreError as err:
            logger.debug("probe: race: %s", err)
            return "failed"
        return "won"

    with ThreadPoolExecutor(at_once, "objckpt-probe") as pool:
        outcomes = list(pool.map(write, range(WRITERS)))
    try:
        there = made.store.get(key, max_bytes=_BODY_BYTES)
    except NotFoundError:
        return judge(outcomes, None)
    except ObjckptError as err:
        verdict, why = judge(outcomes, outcomes.index("won") if "won" in outcomes else None)
        return (False, why) if verdict is False else (None, f"the key could not be read back: {err}")
    return judge(outcomes, bodies.index(there) if there in bodies else -1)


# ---- the rest: each question is one or a few requests of S3, as they are --------------------------------------------


def _ranged_get(made: _Made) -> bool:
    key, body = made.key("range"), secrets.token_bytes(_BODY_BYTES)
    made.store.put(key, body)
    answer = made.ask("GetObject", key, Range="bytes=100-149")
    return answer["ResponseMetadata"]["HTTPStatusCode"] == 206 and bool(answer["Body"] == body[100:150])


def _takes_checksum(made: _Made) -> bool:
    return _accepts(made, made.key("checksum"), b"123456789", 0xAE8B14860A799888)  # the check value of the CRC


def _verifies_checksum(made: _Made) -> bool:
    # A refusal counts only where the right one is taken: else it is the header that is refused.
    if not _takes_checksum(made):
        return False
    return not _accepts(made, made.key("wrong-checksum"), b"123456789", 0xAE8B14860A799889)


def _accepts(made: _Made, key: str, body: bytes, crc: int) -> bool:
    try:
        made.ask("PutObject", key, Body=body, ChecksumCRC64NVME=base64.b64encode(crc.to_bytes(8, "big")).decode())
    except StoreError as err:
        if err.context.get("status") in (400, 501):
            return False
        raise
    return True


def _multipart_min_bytes(made: _Made) -> int:
    key = made.key("parts")
    upload_id = str(made.ask("CreateMultipartUpload", key)["UploadId"])
    made.uploads.append((key, upload_id))
    done = []
    for number in (1, 2):
        part = made.ask("UploadPart", key, UploadId=upload_id, PartNumber=number, Body=bytes(_SMALL_PART_BYTES))
        done.append({"PartNumber": number, "ETag": part["ETag"]})
    try:
        made.ask("CompleteMultipartUpload", key, UploadId=upload_id, MultipartUpload={"Parts": done})
    except StoreError as err:
        if err.context.get("code") != "EntityTooSmall":
            raise
        return limits.MIN_PART_BYTES
    made.uploads.remove((key, upload_id))
    return _SMALL_PART_BYTES
