"""Faults on the wire, made by a scripted S3 server; `E…` names the case in the list of known failures of the field."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme
from support.stub_s3 import Hang, Reply, Request, Reset, Script, StubBucket, StubServer, error

from objckpt.config import StoreOptions
from objckpt.errors import (
    AccessError,
    AmbiguousWriteError,
    BucketError,
    ConnectError,
    IntegrityError,
    NotFoundError,
    PreconditionFailedError,
    StoreError,
    StoreFullError,
)
from objckpt.store import Store, Uploads, open_store, open_uploads

URL = "s3://bucket/run1"
OPTIONS = StoreOptions(request_timeout_s=5, retry_deadline_s=20)
PARTS = [random.Random(n).randbytes(size) for n, size in enumerate((300_000, 300_000, 7))]
DATA = b"".join(PARTS)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def serve() -> Iterator[Callable[[Script], StubServer]]:
    servers: list[StubServer] = []

    def start(script: Script) -> StubServer:
        servers.append(StubServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


Serve = Callable[[Script], StubServer]


def store_at(server: StubServer, **changes: object) -> Store:
    return open_store(URL, dataclasses.replace(OPTIONS, endpoint_url=server.url, **changes))


def with_uploads(server: StubServer, work: Callable[[Uploads], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with open_uploads(URL, dataclasses.replace(OPTIONS, endpoint_url=server.url, **changes)) as uploads:
            await work(uploads)

    asyncio.run(run())


async def multipart(uploads: Uploads, key: str = "data/m") -> None:
    """Upload DATA as three parts; abort on failure, as a saver does."""
    upload_id = await uploads.create(key)
    try:
        done = await asyncio.gather(
            *(uploads.part(key, upload_id, n, [memoryview(p)], crc64nvme(p)) for n, p in enumerate(PARTS, 1))
        )
        await uploads.complete(key, upload_id, list(done), len(DATA), crc64nvme(DATA))
    except StoreError:
        await uploads.abort(key, upload_id)
        raise


def read(store: Store, key: str, start: int, size: int) -> bytes:
    buffer = bytearray(size)
    store.get_into(key, start, [memoryview(buffer)])
    return bytes(buffer)


# ---- completion


def test_complete_with_an_error_in_a_200_answer_is_repeated(serve: Serve) -> None:  # E028
    bucket, left = StubBucket(), itertools.count()

    def script(request: Request) -> Reply:
        if request.operation == "CompleteMultipartUpload" and next(left) < 2:
            return Reply(200, error(200, "InternalError").body)
        return bucket(request)

    server = serve(script)
    with_uploads(server, multipart)
    assert bucket.objects["run1/data/m"] == DATA
    assert server.count("CompleteMultipartUpload") == 3


def test_complete_that_always_has_an_error_in_a_200_answer_fails(serve: Serve) -> None:  # E028
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        if request.operation == "CompleteMultipartUpload":
            return Reply(200, error(200, "InternalError").body)
        return bucket(request)

    with pytest.raises(StoreError, match="data/m"):
        with_uploads(serve(script), multipart, retry_deadline_s=1)
    assert bucket.objects == {}
    assert bucket.uploads == {}


@pytest.mark.parametrize("took_effect", [True, False])
def test_complete_with_an_empty_200_answer_is_not_trusted(serve: Serve, took_effect: bool) -> None:  # E028
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        if request.operation == "CompleteMultipartUpload":
            if took_effect:
                bucket(request)
            return Reply(200)
        return bucket(request)

    if took_effect:
        with_uploads(serve(script), multipart)
        assert bucket.objects["run1/data/m"] == DATA
    else:
        with pytest.raises(StoreError, match="not there"):
            with_uploads(serve(script), multipart)


def test_complete_whose_answer_was_lost_has_succeeded(serve: Serve) -> None:
    bucket, first = StubBucket(), itertools.count()

    def script(request: Request) -> Reply | Reset:
        if request.operation == "CompleteMultipartUpload" and next(first) == 0:
            bucket(request)
            return Reset(0)
        return bucket(request)

    with_uploads(serve(script), multipart)
    assert bucket.objects["run1/data/m"] == DATA


def test_a_late_first_try_of_a_part_is_repaired(serve: Serve) -> None:  # E067
    bucket, tries = StubBucket(), itertools.count()

    def script(request: Request) -> Reply | Hang:
        if request.part == 2 and next(tries) == 0:
            _ = request.body
            return Hang()
        if request.operation == "CompleteMultipartUpload" and next(completions) == 0:
            upload = bucket.uploads[request.query["uploadId"]][1]
            upload[2] = ('"late"', upload[2][1])  # the first try lands now, with another ETag
        return bucket(request)

    completions = itertools.count()
    server = serve(script)
    with_uploads(server, multipart, request_timeout_s=1)
    assert bucket.objects["run1/data/m"] == DATA
    assert server.count("CompleteMultipartUpload") == 2


def test_a_stored_object_that_is_short_is_noticed(serve: Serve) -> None:  # E071
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        reply = bucket(request)
        if request.operation == "CompleteMultipartUpload":
            bucket.objects["run1/data/m"] = DATA[: len(DATA) // 2]
        return reply

    with pytest.raises(StoreError, match=f"{len(DATA) // 2} of {len(DATA)} bytes"):
        with_uploads(serve(script), multipart)


# ---- pressure, resets and hanging peers


def test_slow_down_lowers_the_pace_and_the_upload_succeeds(serve: Serve) -> None:  # E064
    bucket, seen, lock = StubBucket(), {}, threading.Lock()

    def script(request: Request) -> Reply:
        _ = request.body
        if request.part is not None:
            with lock:
                times = seen.setdefault(request.part, [])
                times.append(request.at_s)
            if len(times) <= 4:
                return error(503, "SlowDown", "Please reduce your request rate.")
        return bucket(request)

    server = serve(script)
    with_uploads(server, multipart)
    assert bucket.objects["run1/data/m"] == DATA
    for times in seen.values():
        gaps = [b - a for a, b in itertools.pairwise(times)]
        # From below only: a gap has the wait for a place and for this machine in it, too.
        assert all(gap > 0.124 * 2**n for n, gap in enumerate(gaps)), gaps


def test_a_reset_body_is_sent_again(serve: Serve) -> None:  # E065
    bucket, tries = StubBucket(), itertools.count()

    def script(request: Request) -> Reply | Reset:
        return Reset(10) if request.part == 1 and next(tries) < 3 else bucket(request)

    with_uploads(serve(script), multipart)
    assert bucket.objects["run1/data/m"] == DATA


def test_a_permanent_reset_ends_at_the_deadline(serve: Serve) -> None:  # E065
    bucket = StubBucket()
    server = serve(lambda request: Reset(10) if request.part == 1 else bucket(request))
    begin = time.monotonic()
    with pytest.raises(ConnectError, match=server.url):
        with_uploads(server, multipart, retry_deadline_s=2)
    assert time.monotonic() - begin < 6
    assert bucket.uploads == {}


def test_a_port_that_opens_late_is_waited_for() -> None:  # E065
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    bucket, started = StubBucket(), []

    def start() -> None:
        started.append(StubServer(bucket, port))

    timer = threading.Timer(1.5, start)
    timer.start()
    try:
        store = open_store(URL, dataclasses.replace(OPTIONS, endpoint_url=f"http://127.0.0.1:{port}"))
        assert store.list() == []
    finally:
        timer.join()
        started[0].close()


def test_a_refused_first_connection_is_an_error_soon() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    store = open_store(URL, StoreOptions(endpoint_url=f"http://127.0.0.1:{port}"))
    begin = time.monotonic()
    with pytest.raises(ConnectError, match=str(port)):
        store.list()
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("read_body", [True, False])
def test_a_peer_that_hangs_costs_one_request_timeout(serve: Serve, read_body: bool) -> None:
    bucket, tries = StubBucket(), itertools.count()
    big = bytes(32 << 20)

    def script(request: Request) -> Reply | Hang:
        if request.operation == "PutObject" and next(tries) == 0:
            _ = request.body if read_body else None
            return Hang()
        return bucket(request)

    async def work(uploads: Uploads) -> None:
        await uploads.put("data/x", [memoryview(big)], None)

    with_uploads(serve(script), work, request_timeout_s=1)
    assert bucket.objects["run1/data/x"] == big


# ---- credentials


def write_credentials(secret: str) -> None:
    text = f"[default]\naws_access_key_id = {secret}\naws_secret_access_key = {secret}\naws_session_token = {secret}\n"
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text(text)


@pytest.fixture
def from_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    write_credentials("KEYA")


@pytest.mark.usefixtures("from_file")
def test_expired_credentials_are_read_again(serve: Serve) -> None:  # E068
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        _ = request.body
        if request.part == 3 and "Credential=KEYA/" in request.headers["authorization"]:
            write_credentials("KEYB")
            return error(400, "ExpiredToken", "The provided token has expired.")
        return bucket(request)

    with_uploads(serve(script), multipart)
    assert bucket.objects["run1/data/m"] == DATA


@pytest.mark.usefixtures("from_file")
def test_expired_credentials_without_newer_ones_are_named_and_recover(serve: Serve) -> None:  # E068
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        expired = "Credential=KEYA/" in request.headers["authorization"]
        return error(400, "ExpiredToken", "The provided token has expired.") if expired else bucket(request)

    server = serve(script)
    store = store_at(server)
    with pytest.raises(AccessError, match="expired"):
        store.list()
    write_credentials("KEYB")
    assert store.list() == []
    assert server.count("ListObjectsV2") == 3


def test_no_credentials(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    server = serve(StubBucket())
    with pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
        store_at(server).list()
    with pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
        with_uploads(server, multipart)
    with pytest.raises(AccessError, match="nowhere"):
        store_at(server, profile="nowhere").list()


def test_secrets_stay_out_of_logs_and_errors(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # E097
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETMARK")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKENMARK")
    caplog.set_level(logging.DEBUG)
    bucket = StubBucket()
    server = serve(lambda r: error(403, "AccessDenied") if r.operation == "GetObject" else bucket(r))
    options = dataclasses.replace(OPTIONS, endpoint_url=server.url.replace("http://", "http://user:PASSMARK@"))
    store = open_store(URL, options)
    store.list()
    store.put("log/x", b"x")
    with pytest.raises(AccessError) as caught:
        store.get("log/x", max_bytes=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", options.endpoint_url or "")
    open_store(URL, OPTIONS).list()

    async def work() -> None:
        async with open_uploads(URL, options) as uploads:
            await multipart(uploads)

    asyncio.run(work())
    texts = [caplog.text, str(caught.value), repr(caught.value.context), repr(pickle.dumps(caught.value))]
    assert any("x-amz-security-token" in text.lower() for text in texts)  # the logs were really written
    for mark in ("SECRETMARK", "TOKENMARK", "PASSMARK"):
        assert all(mark not in text for text in texts), mark


# ---- checksums


def test_a_store_that_refuses_checksum_headers(serve: Serve) -> None:  # E073
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        _ = request.body
        names = [n for n in request.headers if n.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer"))]
        return error(501, "NotImplemented", f"{names} are not implemented") if names else bucket(request)

    server = serve(script)

    async def work(uploads: Uploads) -> None:
        await multipart(uploads)
        await multipart(uploads, "data/n")
        await uploads.put("data/o", [memoryview(DATA)], crc64nvme(DATA))

    with_uploads(server, work)
    store = store_at(server)
    store.put("log/a", b"x")
    store.put_if_absent("log/b", b"x")
    assert store.delete(["log/a", "log/b"]) == []
    assert sorted(bucket.objects) == ["run1/data/m", "run1/data/n", "run1/data/o"]
    assert server.count("CreateMultipartUpload") == 3  # refused once, then remembered
    assert server.count("UploadPart") == 6


def demanding(bucket: StubBucket, known: tuple[str, ...]) -> Script:
    def script(request: Request) -> Reply:
        _ = request.body
        if request.method == "PUT" and not any(name in request.headers for name in known):
            return error(400, "InvalidRequest", "Content-MD5 OR x-amz-checksum- is required with Object Lock")
        return bucket(request)

    return script


@pytest.mark.parametrize("known", [("content-md5", "x-amz-checksum-crc64nvme"), ("content-md5",)])
def test_a_store_that_demands_a_checksum(serve: Serve, known: tuple[str, ...]) -> None:  # E074
    bucket = StubBucket()
    server = serve(demanding(bucket, known))

    async def work(uploads: Uploads) -> None:
        await multipart(uploads)
        await uploads.put("data/empty", [], crc64nvme(b""))

    with_uploads(server, work)
    store = store_at(server)
    store.put("log/a", b"")
    store.put_if_absent("log/b", b"x")
    assert len(bucket.objects) == 4


def test_a_store_that_demands_a_checksum_explains_the_conflict(serve: Serve) -> None:  # E074
    server = serve(demanding(StubBucket(), ("content-md5", "x-amz-checksum-crc64nvme")))
    with pytest.raises(StoreError, match=r"Object Lock.*checksums"):
        with_uploads(server, multipart, checksums="off")


@pytest.mark.parametrize("etag", ['"abc-3"', 'W/"x"', '"0123456789abcdef0123456789abcdef"'])
def test_etags_are_not_understood(serve: Serve, etag: str) -> None:  # E081
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        reply = bucket(request)
        if "ETag" in reply.headers and request.part is None:
            reply.headers["ETag"] = etag
        return reply

    server = serve(script)
    store = store_at(server)
    store.put("log/a", b"abc")
    store.put_if_absent("log/b", b"abc")
    assert store.get("log/a", max_bytes=3) == b"abc"
    assert read(store, "log/a", 1, 2) == b"bc"


def test_a_part_without_an_etag_is_an_error(serve: Serve) -> None:  # E081
    bucket = StubBucket()

    def script(request: Request) -> Reply:
        reply = bucket(request)
        reply.headers.pop("ETag", None)
        return reply

    server = serve(script)
    with pytest.raises(StoreError, match="without an ETag"):
        with_uploads(server, multipart)

    async def put(uploads: Uploads) -> None:
        await uploads.put("data/x", [memoryview(DATA)], None)

    with_uploads(server, put)  # a whole object is looked at instead


# ---- addresses


@pytest.mark.parametrize("addressing", ["path", "virtual"])
def test_addressing(serve: Serve, addressing: str, monkeypatch: pytest.MonkeyPatch) -> None:  # E082
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.0.1", *rest, **more))

    def script(request: Request) -> Reply:
        if addressing == "virtual":
            request.bucket, request.key = "bucket", request.target[1:].partition("?")[0]
        return bucket(request)

    bucket = StubBucket()
    server = serve(script)
    url = server.url.replace("127.0.0.1", "localhost")
    store = open_store(URL, dataclasses.replace(OPTIONS, endpoint_url=url, addressing=addressing))
    store.put("log/x", b"x")
    request = server.requests[0]
    expected = ("localhost", "/bucket/run1/log/x") if addressing == "path" else ("bucket.localhost", "/run1/log/x")
    assert (request.headers["host"], request.target) == (f"{expected[0]}:{server.port}", expected[1])


def test_a_bucket_in_another_region(serve: Serve) -> None:  # E085
    server = serve(lambda r: error(301, "PermanentRedirect", "use the endpoint", x_amz_bucket_region="eu-west-1"))
    begin = time.monotonic()
    with pytest.raises(BucketError, match=r'bucket.*region="eu-west-1"'):
        store_at(server).list()
    assert len(server.requests) <= 3
    with pytest.raises(BucketError, match="eu-west-1"):
        with_uploads(server, multipart)
    assert len(server.requests) <= 6
    assert time.monotonic() - begin < 5


# ---- reading


def test_a_body_that_breaks_is_resumed(serve: Serve) -> None:  # E062
    bucket, tries = StubBucket(), itertools.count()
    bucket.objects["run1/data/x"] = DATA

    def script(request: Request) -> Reply:
        reply = bucket(request)
        if request.operation == "GetObject" and next(tries) == 0:
            return Reply(206, reply.body[:500], reply.headers, length=len(reply.body))
        return reply

    server = serve(script)
    store = store_at(server)
    assert read(store, "data/x", 100, 1000) == DATA[100:1100]
    assert [r.headers["range"] for r in server.requests] == ["bytes=100-1099", "bytes=600-1099"]


def test_a_body_that_always_breaks_names_the_bytes(serve: Serve) -> None:  # E062
    bucket = StubBucket()
    bucket.objects["run1/data/x"] = DATA
    served = itertools.count()

    def script(request: Request) -> Reply:
        reply = bucket(request)
        return Reply(206, reply.body[: 500 if next(served) == 0 else 0], reply.headers, length=len(reply.body))

    with pytest.raises(StoreError, match=r"data/x.*500 of 1000 bytes"):
        read(store_at(serve(script), retry_deadline_s=1), "data/x", 0, 1000)


def test_a_get_of_a_record_that_breaks_is_repeated(serve: Serve) -> None:  # E062
    bucket, tries = StubBucket(), itertools.count()
    bucket.objects["run1/log/x"] = b"0123456789"

    def script(request: Request) -> Reply:
        return Reply(200, b"01234", length=10) if next(tries) == 0 else bucket(request)

    server = serve(script)
    assert store_at(server).get("log/x", max_bytes=10) == b"0123456789"
    assert len(server.requests) == 2


def test_a_store_that_ignores_ranges(serve: Serve) -> None:
    bucket = StubBucket()
    bucket.objects["run1/data/x"] = DATA

    def script(request: Request) -> Reply:
        request.headers.pop("range", None)
        return bucket(request)

    store = store_at(serve(script))
    assert read(store, "data/x", 100, 1000) == DATA[100:1100]
    assert read(store, "data/x", 0, len(DATA)) == DATA
    with pytest.raises(IntegrityError):
        read(store, "data/x", len(DATA) - 5, 6)


def test_an_html_page_instead_of_the_object(serve: Serve) -> None:  # E071
    page = b"<html><body>Sign in</body></html>"
    store = store_at(serve(lambda request: Reply(200, page, {"Content-Type": "text/html"})), retry_deadline_s=1)
    with pytest.raises(IntegrityError, match=str(len(page))):
        read(store, "data/x", 0, 1000)
    with pytest.raises(StoreError, match=r"listing|XML"):
        store.list()


def test_a_foreign_checksum_header_on_a_range_is_ignored(serve: Serve) -> None:  # E088
    bucket = StubBucket()
    bucket.objects["run1/data/x"] = DATA

    def script(request: Request) -> Reply:
        reply = bucket(request)
        reply.headers["x-amz-checksum-crc32"] = "AAAAAA=="
        return reply

    store = store_at(serve(script))
    assert read(store, "data/x", 10, 100) == DATA[10:110]
    assert store.get("data/x", max_bytes=len(DATA)) == DATA


def test_an_error_of_the_callback_is_passed_on(serve: Serve) -> None:
    bucket = StubBucket()
    bucket.objects["run1/data/x"] = DATA
    server = serve(bucket)
    store = store_at(server)

    def fail(index: int) -> None:
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        store.get_into("data/x", 0, [memoryview(bytearray(5)), memoryview(bytearray(5))], filled=fail)
    assert len(server.requests) == 1


# ---- listings


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (error(403, "AccessDenied"), AccessError),
        (error(503, "ServiceUnavailable"), StoreError),
        (error(404, "NoSuchBucket"), BucketError),
        (Reply(404), BucketError),
        (Reply(200), StoreError),
        (Reply(200, b"<html></html>"), StoreError),
    ],
)
def test_cannot_list_is_never_empty(serve: Serve, reply: Reply, expected: type[StoreError]) -> None:  # E107, E091
    with pytest.raises(expected, match="ListObjectsV2"):
        store_at(serve(lambda request: reply), retry_deadline_s=1).list("log/")


@pytest.mark.parametrize(("status", "expected"), [(404, NotFoundError), (403, AccessError), (500, StoreError)])
def test_errors_without_a_body(serve: Serve, status: int, expected: type[StoreError]) -> None:  # E107, E091
    store = store_at(serve(lambda request: Reply(status)), retry_deadline_s=1)
    for call in (
        lambda: store.get("log/x", max_bytes=1),
        lambda: store.head("log/x"),
        lambda: read(store, "log/x", 0, 1),
    ):
        with pytest.raises(expected, match="log/x"):
            call()


# ---- the conditional put


def test_put_if_absent_is_one_request_whatever_happens(serve: Serve) -> None:
    cases: list[tuple[Reply | Reset | Hang, type[StoreError]]] = [
        (Reset(0), AmbiguousWriteError),
        (Reply(500), AmbiguousWriteError),
        (error(503, "SlowDown"), AmbiguousWriteError),
        (error(200, "x"), AmbiguousWriteError),
        (Hang(), AmbiguousWriteError),
        (error(412, "PreconditionFailed"), PreconditionFailedError),
        (error(409, "ConditionalRequestConflict"), PreconditionFailedError),
        (error(501, "NotImplemented"), StoreError),
        (error(403, "SignatureDoesNotMatch"), AccessError),
        (error(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), BucketError),
        (error(507, "XMinioStorageFull"), StoreFullError),
    ]
    for reply, expected in cases:
        bucket = StubBucket()

        def script(
            request: Request, bucket: StubBucket = bucket, reply: Reply | Reset | Hang = reply
        ) -> Reply | Reset | Hang:
            return reply if request.operation == "PutObject" and "if-none-match" in request.headers else bucket(request)

        server = serve(script)
        store = store_at(server, request_timeout_s=1)
        store.put("log/warm", b"x")  # the connection that breaks is a kept-alive one
        with pytest.raises(expected) as caught:
            store.put_if_absent("log/x", b"x")
        assert type(caught.value) is expected, reply
        assert sum("if-none-match" in request.headers for request in server.requests) == 1, reply


def test_no_request_expects_100_continue(serve: Serve) -> None:
    bucket = StubBucket()
    server = serve(bucket)
    with_uploads(server, multipart)
    store_at(server).put("log/x", b"x")
    assert all("expect" not in request.headers for request in server.requests)
    assert all("x-amz-trailer" not in request.headers for request in server.requests)


# ---- messages


@pytest.mark.parametrize(
    ("reply", "expected", "said"),
    [
        (error(403, "SignatureDoesNotMatch"), AccessError, "secret"),
        (error(403, "InvalidAccessKeyId"), AccessError, "AWS_ACCESS_KEY_ID"),
        (error(403, "RequestTimeTooSkewed"), AccessError, "clock"),
        (error(403, "AccessDenied"), AccessError, "s3:ListBucket"),
        (error(404, "NoSuchBucket"), BucketError, "does not exist"),
        (error(507, "XMinioStorageFull"), StoreFullError, "full"),
        (error(400, "QuotaExceeded"), StoreFullError, "quota"),
    ],
)
def test_messages_name_endpoint_key_and_remedy(
    serve: Serve, reply: Reply, expected: type[StoreError], said: str
) -> None:
    server = serve(lambda request: (request.body, reply)[1])
    with pytest.raises(expected, match=said) as caught:
        store_at(server).put("log/x", b"x")
    for text in (server.url, "s3://bucket/run1/log/x", "PutObject"):
        assert text in str(caught.value)
    assert caught.value.__cause__ is not None
    with pytest.raises(expected, match=said):
        with_uploads(server, multipart)


# ---- economy


def test_many_operations_use_one_client_and_few_sockets(serve: Serve) -> None:  # E061
    server = serve(StubBucket())
    store = store_at(server)
    for n in range(300):
        store.put(f"log/{n}", b"x")
    assert server.connections_made == 1
    store.close()
