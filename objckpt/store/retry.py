"""What to do about a failed request: pure functions from a fault to a verdict, and from a try's number to a pause."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

# Until a store has answered once, a refused connection is a wrong address far more often than a restart.
FIRST_CONTACT_S = 6.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 20.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed request as plain data. `code` is the store's error code, or the name of the network's exception."""

    source: Literal["answer", "network", "timeout", "refused", "tls", "credentials", "garbage", "client"]
    code: str
    message: str
    status: int | None = None
    region: str | None = None  # where the store says that the bucket lives
    date: str | None = None  # the store's clock, from the Date header


class Verdict(Enum):
    """What the caller does about a fault."""

    RETRY = "retry"
    THROTTLE = "throttle"  # retry, later and with fewer parallel requests
    REFRESH = "refresh"  # read the credentials again, then retry
    FAIL = "fail"


_THROTTLE = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "ThrottledException",
    "RequestThrottled", "RequestThrottledException", "TooManyRequests", "TooManyRequestsException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "ServerBusy", "429",
}  # fmt: skip
# BadDigest and its kin mean that the bytes were damaged on the way: the source is intact, so send again.
_RETRY = {
    "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException", "OperationAborted",
    "ConditionalRequestConflict", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "PriorRequestNotComplete", "XMinioServerNotInitialized", "Busy",
    "RequestExpired", "TransientError",
}  # fmt: skip
_REFRESH = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_FULL = {
    "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "XMinioDiskFull", "QuotaExceeded", "QuotaExceededException",
    "InsufficientStorage", "InsufficientCapacity", "StorageFull", "BucketQuotaExceeded", "507",
}  # fmt: skip
_FULL_TEXT = ("no space left", "disk full", "quota exceeded", "storage full", "exceeded quota", "insufficient storage")
_PERMANENT_TLS = (
    "certificate_verify_failed", "certificate verify failed", "hostname", "wrong_version_number",
    "record layer failure", "unknown_ca", "unknown ca", "handshake_failure", "unsupported protocol",
)  # fmt: skip


def classify(fault: Fault) -> Verdict:
    """The verdict on one failed request; needs no memory of earlier ones."""
    if fault.source in ("network", "timeout", "refused", "garbage"):
        return Verdict.RETRY
    if fault.source == "tls":
        permanent = any(text in fault.message.lower() for text in _PERMANENT_TLS)
        return Verdict.FAIL if permanent else Verdict.RETRY
    if fault.source in ("credentials", "client"):
        return Verdict.FAIL
    if fault.code in _THROTTLE or fault.status == 429:
        return Verdict.THROTTLE
    if fault.code in _REFRESH:
        return Verdict.REFRESH
    if is_full(fault) or fault.code == "NotImplemented" or fault.status == 501:
        return Verdict.FAIL
    if fault.code in _RETRY or fault.status in (408, 500, 502, 503, 504):
        return Verdict.THROTTLE if fault.status == 503 else Verdict.RETRY
    return Verdict.RETRY if fault.status is not None and fault.status > 500 else Verdict.FAIL


def is_full(fault: Fault) -> bool:
    """True when the store refuses more data: disk full or quota."""
    text = fault.message.lower()
    return fault.code in _FULL or fault.status == 507 or any(t in text for t in _FULL_TEXT)


def refuses_checksum(fault: Fault) -> bool:
    """True when the answer means "I do not know this checksum header" rather than "the bytes are damaged".

    501 is S3's answer to a header that it does not know. InvalidRequest and InvalidArgument have a hundred other causes
    (a part number, an encryption header): those must name the checksum, else one such answer would end all checksums.
    """
    if fault.source != "answer" or fault.code in _RETRY:
        return False
    if fault.code == "NotImplemented" or fault.status == 501:
        return True
    text = fault.message.lower()
    return fault.status == 400 and any(t in text for t in ("checksum", "crc", "trailer"))


def demands_checksum(fault: Fault) -> bool:
    """True when the answer means "this upload must carry a Content-MD5 or a checksum" (buckets with Object Lock)."""
    text = fault.message.lower()
    named = "content-md5" in text or "checksum" in text or "object lock" in text
    return (
        fault.source == "answer"
        and fault.status == 400
        and fault.code in ("InvalidRequest", "MissingContentMD5")
        and named
    )


def is_unclear(fault: Fault) -> bool:
    """True when a write that ended so may or may not have taken effect."""
    return fault.source != "credentials" and classify(fault) in (Verdict.RETRY, Verdict.THROTTLE, Verdict.REFRESH)


def pause_s(tries: int, throttled: bool, rng: random.Random) -> float:
    """Seconds to wait after failed try number `tries` (1, 2, …).

    In [d/2, d) with d doubling: jitter parts the ranks, and yet each pause is longer than the one before.
    """
    first = FIRST_PAUSE_S * (2.5 if throttled else 1.0)
    whole = min(LONGEST_PAUSE_S, first * 2.0 ** min(tries - 1, 30))
    return whole * (0.5 + 0.5 * rng.random())


@dataclass(slots=True)
class Tries:
    """The tries of one operation: counts them, and says how long to pause or that the time is over."""

    deadline: float  # time.monotonic() at which the operation gives up
    rng: random.Random = field(default_factory=random.Random)
    count: int = 0
    total: int = 0
    answered: Fault | None = None  # the last fault that was an answer
    began: float = field(default_factory=time.monotonic)  # the first try, or the last that moved bytes
    troubled: float | None = None  # since when, once that was told; see `Outage`

    @classmethod
    def within(cls, seconds: float) -> Tries:
        """Tries that may go on for `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def left_s(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def next_pause_s(self, verdict: Verdict, *, at_most_s: float | None = None) -> float | None:
        """Count a failed try. Seconds to sleep before the next one; None when the deadline would pass meanwhile."""
        self.count += 1
        self.total += 1
        pause = pause_s(self.count, verdict is Verdict.THROTTLE, self.rng)
        if at_most_s is not None:
            pause = min(pause, at_most_s)
        return pause if pause < self.left_s() else None

    def telling(self, fault: Fault) -> Fault:
        """Note a fault; returns the one to report: what the store has answered tells more than a try cut by the deadline."""
        if fault.source == "answer":
            self.answered = fault
        return self.answered if fault.source == "timeout" and self.answered is not None else fault

    def progressed(self) -> None:
        """The last try moved bytes before it broke: start again with short pauses."""
        self.count, self.began = 0, time.monotonic()

    def renew(self, seconds: float) -> None:
        """The tries have moved enough bytes to go on for `seconds` from now."""
        self.deadline = time.monotonic() + seconds
