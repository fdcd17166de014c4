from __future__ import annotations

import itertools
import random

import pytest

from objckpt.store.retry import Fault, Tries, Verdict, classify, demands_checksum, pause_s, refuses_checksum


def answer(status: int, code: str, message: str = "") -> Fault:
    return Fault("answer", code, message, status)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (answer(503, "SlowDown"), Verdict.THROTTLE),
        (answer(429, "TooManyRequests"), Verdict.THROTTLE),
        (answer(503, "ServiceUnavailable"), Verdict.THROTTLE),
        (answer(500, "InternalError"), Verdict.RETRY),
        (answer(400, "RequestTimeout"), Verdict.RETRY),
        (answer(400, "BadDigest"), Verdict.RETRY),
        (answer(409, "OperationAborted"), Verdict.RETRY),
        (answer(502, "502"), Verdict.RETRY),
        (answer(400, "ExpiredToken"), Verdict.REFRESH),
        (answer(403, "RequestTimeTooSkewed"), Verdict.FAIL),
        (answer(403, "AccessDenied"), Verdict.FAIL),
        (answer(404, "NoSuchKey"), Verdict.FAIL),
        (answer(301, "PermanentRedirect"), Verdict.FAIL),
        (answer(501, "NotImplemented"), Verdict.FAIL),
        (answer(507, "XMinioStorageFull"), Verdict.FAIL),
        (answer(500, "InternalError", "write: no space left on device"), Verdict.FAIL),
        (Fault("network", "ConnectionClosedError", ""), Verdict.RETRY),
        (Fault("timeout", "TimeoutError", ""), Verdict.RETRY),
        (Fault("tls", "SSLError", "[SSL: CERTIFICATE_VERIFY_FAILED] …"), Verdict.FAIL),
        (Fault("tls", "SSLError", "EOF occurred in violation of protocol"), Verdict.RETRY),
        (Fault("credentials", "NoCredentialsError", ""), Verdict.FAIL),
    ],
)
def test_classify(fault: Fault, verdict: Verdict) -> None:
    assert classify(fault) is verdict


def test_refused_and_demanded_checksums_are_told_apart_from_damage() -> None:
    assert refuses_checksum(answer(501, "NotImplemented"))
    assert refuses_checksum(answer(400, "InvalidArgument", "unsupported x-amz-checksum-crc64nvme"))
    assert refuses_checksum(answer(400, "InvalidRequest", "Value for x-amz-trailer header is invalid."))
    assert refuses_checksum(answer(400, "InvalidRequest", "CRC64NVME is not supported"))
    assert not refuses_checksum(answer(400, "BadDigest", "The CRC64NVME you specified did not match"))
    assert not refuses_checksum(answer(403, "AccessDenied"))
    assert demands_checksum(answer(400, "InvalidRequest", "Content-MD5 is required with Object Lock"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive"),
        ("InvalidRequest", "The encryption method specified is not supported"),
        ("InvalidArgument", "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, or a valid sha256 value."),
        (
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256.",
        ),
        ("InvalidRequest", ""),
        ("InvalidStorageClass", "The storage class you specified is not valid"),
    ],
)
def test_other_bad_requests_are_no_refusal_of_checksums(code: str, message: str) -> None:
    assert not refuses_checksum(answer(400, code, message))


def test_pauses_grow_and_carry_jitter() -> None:
    pauses = [[pause_s(n, False, random.Random(seed)) for n in range(1, 8)] for seed in range(50)]
    assert all(a < b for row in pauses for a, b in itertools.pairwise(row))
    assert len({row[0] for row in pauses}) > 40
    assert pause_s(10_000, True, random.Random(1)) <= 20


def test_the_stores_last_answer_is_reported_when_the_deadline_cuts_the_last_try() -> None:
    full, cut = answer(500, "InternalError", "disk"), Fault("timeout", "TimeoutError", "")
    tries = Tries.within(60)
    assert tries.telling(cut) is cut
    assert tries.telling(full) is full and tries.telling(cut) is full
    reset = Fault("network", "ConnectionClosedError", "")
    assert tries.telling(reset) is reset


def test_tries_end_at_the_deadline() -> None:
    tries = Tries.within(0.0)
    assert tries.next_pause_s(Verdict.RETRY) is None
    assert Tries.within(60).next_pause_s(Verdict.RETRY) is not None
