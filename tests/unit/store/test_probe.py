"""What `probe` says of stores that work, of those that only seem to, and of those that answer badly."""

from __future__ import annotations

import threading

import msgpack
import pytest
from support.memory_store import MemoryBucket, MemoryStore
from support.stub_s3 import Reply, Reset, StubBucket, StubServer, error

from objckpt.config import StoreOptions
from objckpt.errors import AccessError, AmbiguousWriteError, ConnectError, PreconditionFailedError, StoreError
from objckpt.store import open_store, probe
from objckpt.store.probe import WRITERS, judge


def test_memory_store():
    bucket = MemoryBucket()
    found = probe.probe(MemoryStore(bucket))
    assert found["conditional_put"] is True and "4 races of 16 writers" in found["conditional_put_evidence"]
    assert [found[name] for name in ("ranged_get", "checksum_crc64nvme", "multipart_min_bytes")] == [None] * 3
    assert bucket.objects == {} and found["delete"] is True
    races = [key for operation, key in bucket.operations if operation == "put_if_absent" and "race" in key]
    assert len(races) == 4 * WRITERS and len(set(races)) == 4


def test_ignored_condition():
    bucket = MemoryBucket(conditional=False)
    found = probe.probe(MemoryStore(bucket))
    assert found["conditional_put"] is False and "ignored" in found["conditional_put_evidence"]
    assert bucket.objects == {}
    assert (
        sum(operation == "put_if_absent" for operation, _ in bucket.operations) == 2
    )  # no races where two requests prove it


class LooksFirst(MemoryStore):
    """Looks for the key, then writes: right in turn; in race number `bad`, two that look at once both write."""

    def __init__(self, bucket: MemoryBucket, bad: int) -> None:
        super().__init__(bucket)
        self.bad, self.races, self.gate = bad, [], threading.Barrier(2)
        self.lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> None:
        if "race" in key:
            with self.lock:
                if key not in self.races:
                    self.races.append(key)
            if len(self.races) == self.bad and not any(f.endswith(key) for f in self.bucket.objects):
                self.gate.wait(timeout=20)  # never over with one writer: the probe does send two at once
                self.put(key, data)
                return
        super().put_if_absent(key, data)


@pytest.mark.parametrize("bad", [1, 4])
def test_two_winners_of_one_race(bad):
    bucket = MemoryBucket()
    found = probe.probe(LooksFirst(bucket, bad))
    assert found["conditional_put"] is False
    assert found["conditional_put_evidence"].startswith(f"round {bad} of races: 2 of 16 writers")
    assert bucket.objects == {}


def test_requests_of_a_race_are_at_once():
    arrived, most = 0, 0
    lock, both = threading.Lock(), threading.Event()

    class Counts(MemoryStore):
        def put_if_absent(self, key, data):
            nonlocal arrived, most
            if "race" in key and not both.is_set():
                with lock:
                    arrived += 1
                    most = max(most, arrived)
                if most == 3:
                    both.set()
                assert both.wait(20)
            super().put_if_absent(key, data)

    assert probe.probe(Counts(), at_once=3)["conditional_put"] is True
    assert most == 3


@pytest.mark.parametrize(
    ("outcomes", "holder", "verdict"),
    [
        (["won", "refused"], 0, True),
        (["unclear", "won"], 1, True),
        (["won", "won"], 0, False),
        (["won", "unclear"], 1, False),  # told so, and overwritten
        (["won", "refused"], 1, False),
        (["won", "refused"], None, False),
        (["won", "refused"], -1, False),
        (["refused", "refused"], 1, False),  # refused, and took effect all the same
        (["refused", "unclear"], 1, None),
        (["unclear", "failed"], None, None),
        (["refused", "refused"], None, None),
        (["failed", "refused"], 0, None),
    ],
)
def test_judge(outcomes, holder, verdict):
    found, why = judge(outcomes, holder)
    assert found is verdict and why


def test_a_refused_write_that_takes_effect():
    class Lies(MemoryStore):
        def put_if_absent(self, key, data):
            there = self._location.full(key) in self.bucket.objects
            self.put(key, data)
            if there:
                raise PreconditionFailedError("no", code="PreconditionFailed")

    found = probe.probe(Lies())
    assert found["conditional_put"] is False and "took effect" in found["conditional_put_evidence"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(probe, "_PAUSE_S", 0.001)


def test_unclear_answers_are_no_proof(quick):
    bucket = MemoryBucket()

    class Unclear(MemoryStore):
        def put_if_absent(self, key, data):
            super().put_if_absent(key, data)
            raise AmbiguousWriteError("lost", code="InternalError")

    found = probe.probe(Unclear(bucket))
    assert found["conditional_put"] is None and "no clear answer" in found["conditional_put_evidence"]
    assert bucket.objects == {}


def test_some_unclear_answers_do_not_matter(quick):
    seen = 0

    class Flaky(MemoryStore):
        def put_if_absent(self, key, data):
            nonlocal seen
            seen += 1
            super().put_if_absent(key, data)
            if seen in (1, 4, 5, 6):
                raise AmbiguousWriteError("lost", code="InternalError")

    assert probe.probe(Flaky())["conditional_put"] is True


def test_a_store_that_cannot_be_written_raises():
    def hook(phase, operation, key):
        if operation == "put":
            raise AccessError("denied", status=403)

    with pytest.raises(AccessError, match="denied"):
        probe.probe(MemoryStore(MemoryBucket(hook)))


def test_nothing_is_left_after_an_error():
    class Stop(BaseException):
        pass

    bucket = MemoryBucket()

    def hook(phase, operation, key):
        if operation == "get" and "race" in key:
            raise Stop

    bucket.hook = hook
    with pytest.raises(Stop):
        probe.probe(MemoryStore(bucket))
    assert bucket.objects == {} and ("delete", bucket.operations[-1][1]) == bucket.operations[-1]


def test_a_refused_deletion_is_told():
    class Locked(MemoryStore):
        def delete(self, keys):
            return [(key, AccessError("locked")) for key in keys]

    assert probe.probe(Locked())["delete"] is False

    class Broken(MemoryStore):
        def delete(self, keys):
            raise ConnectError("gone")

    found = probe.probe(Broken())
    assert found["delete"] is None and found["conditional_put"] is True


# ---- over the wire


def ask(script, **options):
    with StubServer(script) as server:
        store = open_store("s3://bucket/run1", StoreOptions(endpoint_url=server.url, retry_deadline_s=2, **options))
        try:
            return probe.probe(store)
        finally:
            store.close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")


def but(answers):
    """A bucket, but for the requests that `answers(request)` has an answer to."""
    bucket = StubBucket()

    def script(request):
        return answers(request) or bucket(request)

    return bucket, script


def test_what_a_plain_server_can_do():
    bucket, script = but(lambda request: None)
    found = ask(script)
    assert found.pop("conditional_put_evidence")
    assert found == {
        "conditional_put": True,
        "ranged_get": True,
        "checksum_crc64nvme": True,
        "checksums_verified": False,
        "multipart_min_bytes": 1024,
        "delete": True,
    }
    assert msgpack.unpackb(msgpack.packb(found)) == found  # it goes into a record
    assert bucket.objects == {} and bucket.uploads == {}


def test_a_careful_server():
    right = "rosUhgp5mIg="

    def answers(request):
        if request.headers.get("x-amz-checksum-crc64nvme", right) != right:
            return error(400, "BadDigest")
        return error(400, "EntityTooSmall") if request.operation == "CompleteMultipartUpload" else None

    bucket, script = but(answers)
    found = ask(script)
    assert (found["checksum_crc64nvme"], found["checksums_verified"]) == (True, True)
    assert found["multipart_min_bytes"] == 5 * 1024 * 1024
    assert bucket.objects == {} and bucket.uploads == {}


def test_a_poor_server():
    def answers(request):
        if "x-amz-checksum-crc64nvme" in request.headers or "if-none-match" in request.headers:
            return error(501, "NotImplemented")
        if request.operation == "CreateMultipartUpload":
            return error(403, "AccessDenied")
        if "range" in request.headers:
            return Reply(200, bucket.objects[request.key])
        return None

    bucket, script = but(answers)
    found = ask(script)
    assert found["conditional_put"] is False and "NotImplemented" in found["conditional_put_evidence"]
    assert (found["checksum_crc64nvme"], found["checksums_verified"]) == (False, False)
    assert found["ranged_get"] is False and found["multipart_min_bytes"] is None
    assert bucket.objects == {}


def test_only_conditional_writes_forbidden():
    bucket, script = but(lambda r: error(403, "AccessDenied") if "if-none-match" in r.headers else None)
    found = ask(script)
    assert found["conditional_put"] is False and "one without it was not" in found["conditional_put_evidence"]
    assert bucket.objects == {}


def test_bad_answers_are_no_answers(quick):
    def answers(request):
        if request.operation == "UploadPart":
            return Reply(200)  # no ETag
        if "range" in request.headers or "x-amz-checksum-crc64nvme" in request.headers:
            return Reset(0)
        return None

    bucket, script = but(answers)
    found = ask(script)
    assert found["conditional_put"] is True
    names = ("ranged_get", "checksum_crc64nvme", "checksums_verified", "multipart_min_bytes")
    assert [found[name] for name in names] == [None] * 4
    assert bucket.objects == {} and bucket.uploads == {}


def test_read_only_and_unreachable():
    with pytest.raises(AccessError, match="s3:PutObject"):
        ask(lambda request: error(403, "AccessDenied"))
    with pytest.raises(StoreError):
        ask(lambda request: Reset(0))
