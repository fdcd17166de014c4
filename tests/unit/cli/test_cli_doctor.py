"""`objckpt doctor` over a scripted server: what it says of each thing that can be wrong, and that it leaves nothing."""

from __future__ import annotations

import json
import signal
from email.utils import formatdate
from time import time

import pytest
from support.handmade import put_checkpoint
from support.stub_s3 import Reply, Reset, StubBucket, StubServer, error

from objckpt.cli.doctor import Report, recommend
from objckpt.config import StoreOptions
from objckpt.limits import MiB
from objckpt.store import open_store
from objckpt.store.speed import Rate

URL = "s3://bucket/run1"
SECRET = "this-is-the-secret-key"


class Place:
    """A bucket behind a server, but for the requests that `answers` has an answer to."""

    def __init__(self, cli, monkeypatch):
        self.bucket = StubBucket()
        self.answers = lambda request: None
        self._cli, self._setenv = cli, monkeypatch.setenv

    def script(self, request):
        return self.answers(request) or self.bucket(request)

    def deny(self, *operations: str) -> None:
        self.answers = lambda request: error(403, "AccessDenied", "no") if request.operation in operations else None

    def doctor(self, *arguments: str):
        with StubServer(self.script) as server:
            self._setenv("AWS_ENDPOINT_URL", server.url)
            return self._cli("doctor", URL, *arguments)

    def report(self, *arguments: str):
        """Exit code, the document, and status by name of check."""
        code, out, err = self.doctor("--quick", "--json", *arguments)
        assert err == ""
        document = json.loads(out)
        assert document["ok"] == (code == 0)
        return code, document, {check["name"]: check["status"] for check in document["checks"]}


@pytest.fixture
def place(cli, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLEEXAMPLE42")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    return Place(cli, monkeypatch)


def test_all_is_well(place):
    code, document, checks = place.report()
    assert code == 0 and set(checks.values()) == {"ok"}
    assert set(checks) >= {
        "credentials", "endpoint", "bucket", "clock", "list", "put", "get", "conditional put", "multipart create",
        "multipart part", "multipart complete", "multipart abort", "list uploads", "delete", "log",
    }  # fmt: skip
    assert document["capabilities"]["conditional_put"] is True
    assert document["log"] == {"mode": "plain", "records": 0, "checkpoints": 0}
    assert abs(document["clock_skew_s"]) <= 2 and document["latency_s"]["put"] > 0
    details = {check["name"]: check["detail"] for check in document["checks"]}
    assert details["credentials"] == "from env, access key …LE42"
    assert SECRET not in json.dumps(document)
    assert place.bucket.objects == {} and place.bucket.uploads == {}


def test_text(place):
    code, out, err = place.doctor("--quick")
    assert (code, err) == (0, "")
    assert "ok    put " in out and "verdict: states can be saved here and restored" in out
    assert "recommended: the default options" in out and "MB/s" not in out


def test_read_only_credentials(place):
    place.deny("PutObject", "CreateMultipartUpload", "DeleteObject", "DeleteObjects")
    code, document, checks = place.report()
    assert code == 8
    assert checks["list"] == checks["get"] == "ok"
    assert checks["put"] == checks["multipart create"] == "FAIL"
    assert checks["multipart part"] == checks["multipart complete"] == checks["multipart abort"] == "-"
    assert checks["delete"] == "warn"
    detail = next(check["detail"] for check in document["checks"] if check["name"] == "put")
    assert "AccessDenied" in detail and "s3:PutObject" in detail
    assert document["capabilities"] == {} and document["latency_s"] is None
    code, out, _ = place.doctor("--quick")
    assert code == 8 and "FAIL  put" in out and "verdict: this store cannot be used yet: put failed" in out


def test_listing_denied(place):
    place.deny("ListObjectsV2")
    code, _, checks = place.report()
    assert code == 8 and checks["list"] == "FAIL" and checks["bucket"] == "-" and checks["put"] == "ok"
    assert place.bucket.objects == {} and place.bucket.uploads == {}


def test_reading_denied(place):
    place.deny("GetObject")
    code, _, checks = place.report()
    assert code == 8 and checks["get"] == "FAIL" and checks["put"] == "ok"
    assert place.bucket.objects == {}


@pytest.mark.parametrize(
    ("operation", "check"),
    [
        ("ListMultipartUploads", "list uploads"),
        ("ListParts", "list parts"),
        ("AbortMultipartUpload", "multipart abort"),
    ],
)
def test_what_is_not_needed_is_a_warning(place, operation, check):
    place.deny(operation)
    code, document, checks = place.report()
    assert code == 0 and {name for name, status in checks.items() if status != "ok"} == {check}
    detail = next(c["detail"] for c in document["checks"] if c["name"] == check)
    assert "AccessDenied" in detail and "Without it: " in detail


def test_deletion_denied(place):
    place.deny("DeleteObject", "DeleteObjects")
    code, document, checks = place.report()
    assert code == 0 and checks["delete"] == checks["left behind"] == "warn"
    assert document["capabilities"]["delete"] is False
    code, out, _ = place.doctor()  # without --quick
    assert code == 0 and "not measured: what that writes could not be removed" in out


def test_throughput_leaves_nothing(place, monkeypatch):
    from objckpt.cli import doctor
    from objckpt.store import speed

    monkeypatch.setattr(speed, "PART_BYTES", (MiB, 2 * MiB))
    monkeypatch.setattr(speed, "_SLICE_S", 0.05)
    monkeypatch.setattr(doctor, "_BUDGET_S", 60.0)
    code, out, err = place.doctor("--json")
    assert (code, err) == (0, "")
    rates = json.loads(out)["throughput"]
    writes = [(r["part_bytes"], r["concurrency"]) for r in rates if r["direction"] == "write" and r["bytes_per_s"]]
    assert writes == [(size, n) for size in (MiB, 2 * MiB) for n in (1, 4, 8)]
    assert place.bucket.objects == {} and place.bucket.uploads == {}


def test_a_failing_part_leaves_nothing(place):
    sent = 0

    def answers(request):
        nonlocal sent
        sent += request.operation == "UploadPart" and int(request.headers["content-length"]) > MiB
        return error(400, "InvalidRequest") if request.operation == "UploadPart" and sent > 3 else None

    place.answers = answers
    code, out, _ = place.doctor()
    assert code == 7 and "InvalidRequest" in out
    assert place.bucket.objects == {} and place.bucket.uploads == {}


@pytest.mark.parametrize(
    ("answer", "code", "check"),
    [
        (error(403, "SignatureDoesNotMatch"), 8, "credentials"),
        (error(403, "InvalidAccessKeyId"), 8, "credentials"),
        (error(400, "ExpiredToken"), 8, "credentials"),
        (error(403, "RequestTimeTooSkewed"), 8, "clock"),
        (error(404, "NoSuchBucket"), 9, "bucket"),
        (error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), 9, "bucket"),
        (Reply(200, b"<html>welcome</html>"), 7, "endpoint"),
        (Reset(0), 10, "endpoint"),
    ],
)
def test_what_stops_everything(place, answer, code, check):
    place.answers = lambda request: answer
    found, document, checks = place.report()
    assert found == code and {name for name, status in checks.items() if status == "FAIL"} == {check}
    assert "put" not in checks and document["capabilities"] == {}


def test_no_credentials(place, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, document, checks = place.report()
    assert code == 8 and checks == {"credentials": "FAIL"}
    assert "AWS_ACCESS_KEY_ID" in document["checks"][0]["detail"]


def test_refused_connection(place, cli, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    code, out, _ = cli("doctor", URL)
    assert code == 10 and "FAIL  endpoint" in out and "Could not connect" in out


def test_clock(place):
    def answers(request):
        reply = place.bucket(request)
        reply.headers["Date"] = formatdate(time() - 300, usegmt=True)
        return reply

    place.answers = answers
    code, document, checks = place.report()
    assert code == 0 and checks["clock"] == "warn" and 298 <= document["clock_skew_s"] <= 302


def test_keyed_log_and_a_log_that_is_there(place):
    def answers(request):
        request.headers.pop("if-none-match", None)  # the server ignores it

    place.answers = answers
    with StubServer(place.script) as server:
        put_checkpoint(open_store(URL, StoreOptions(endpoint_url=server.url)), 5, {"epoch": 3})
    before = dict(place.bucket.objects)
    code, document, checks = place.report()
    assert code == 0 and checks["log"] == "warn"
    assert document["log"]["mode"] == "keyed" and document["log"]["checkpoints"] == 1
    assert place.bucket.objects == before
    assert "not kept apart" in next(c["detail"] for c in document["checks"] if c["name"] == "log")


def test_handlers_of_signals_are_put_back(place):
    before = signal.getsignal(signal.SIGTERM)
    place.deny("ListObjectsV2", "PutObject", "CreateMultipartUpload")
    place.doctor("--quick")
    assert signal.getsignal(signal.SIGTERM) is before


# ---- advice


def advice(rates=(), given=None, **capabilities):
    report = Report(URL, capabilities=capabilities)
    report.rates = [Rate("write", size * MiB, n, speed) for size, n, speed in rates]
    return recommend(report, given or StoreOptions())


def test_defaults_where_nothing_speaks_against_them():
    found = advice([(16, 4, 900e6), (16, 8, 1000e6), (64, 8, 1100e6)], checksum_crc64nvme=None)
    assert (found.store, found.save, found.lines()) == ({}, {}, [])


def test_advice():
    found = advice([(16, 4, 400e6), (16, 8, 800e6), (64, 8, 1200e6)], checksum_crc64nvme=False)
    assert found.lines() == ["StoreOptions(checksums='off', connections=16)", "SaveOptions(part_bytes=67108864)"]
    assert len(found.reasons) == 3
    assert advice([(16, 4, 800e6), (16, 8, 400e6)]).store == {"connections": 4}
    assert advice([(5, 1, 0.5e6)]).store["request_timeout_s"] > 120
    kept = advice(given=StoreOptions(endpoint_url="https://s3.example", region="r"))
    assert kept.lines() == ["StoreOptions(endpoint_url='https://s3.example', region='r')"]
    assert advice([(16, 4, None), (16, 8, None)]).store == {}


def test_advice_can_be_pasted():
    from objckpt import SaveOptions

    found = advice([(16, 4, 400e6), (16, 8, 800e6), (64, 8, 1200e6)], checksum_crc64nvme=False)
    made = [eval(line, {"StoreOptions": StoreOptions, "SaveOptions": SaveOptions}) for line in found.lines()]
    assert made == [StoreOptions(**found.store), SaveOptions(**found.save)]
