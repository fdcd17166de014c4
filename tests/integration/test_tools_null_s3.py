"""The null server answers S3 clients as a store does, and gives back the bytes that it keeps."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import boto3
import pytest
import raw_sockets
from botocore.config import Config
from botocore.exceptions import ClientError
from null_s3 import NullServer, null_server

MiB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with null_server(keep_bytes=64 * MiB) as running:
        yield running


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")


def client(server: NullServer):
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return boto3.client("s3", endpoint_url=server.url, region_name="us-east-1", config=config)


@pytest.fixture
def s3(server: NullServer):
    return client(server)


def code(raised: pytest.ExceptionInfo[ClientError]) -> str:
    return raised.value.response["Error"]["Code"]


@pytest.mark.parametrize("size", [0, 1, 1000, 3 * MiB + 5])
def test_objects_come_back(s3, size):
    data = os.urandom(size)
    s3.put_object(Bucket="bkt", Key="a b/ü&<.bin", Body=data)
    assert s3.head_object(Bucket="bkt", Key="a b/ü&<.bin")["ContentLength"] == size
    assert s3.get_object(Bucket="bkt", Key="a b/ü&<.bin")["Body"].read() == data
    if size > 10:
        answer = s3.get_object(Bucket="bkt", Key="a b/ü&<.bin", Range="bytes=3-9")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert answer["ContentRange"] == f"bytes 3-9/{size}"
        assert answer["Body"].read() == data[3:10]
        assert s3.get_object(Bucket="bkt", Key="a b/ü&<.bin", Range="bytes=-4")["Body"].read() == data[-4:]


def test_missing_key_and_range(s3):
    with pytest.raises(ClientError) as raised:
        s3.get_object(Bucket="bkt", Key="nowhere")
    assert code(raised) == "NoSuchKey"
    s3.put_object(Bucket="bkt", Key="short", Body=b"abc")
    with pytest.raises(ClientError) as raised:
        s3.get_object(Bucket="bkt", Key="short", Range="bytes=3-9")
    assert code(raised) == "InvalidRange"


def test_one_of_racing_conditional_puts_wins(s3):
    outcome: list[str] = []

    def race(n: int) -> None:
        try:
            s3.put_object(Bucket="bkt", Key="slot", Body=b"%d" % n, IfNoneMatch="*")
            outcome.append("won")
        except ClientError as error:
            outcome.append(error.response["Error"]["Code"])

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome) == ["PreconditionFailed"] * 7 + ["won"]


def test_multipart(s3):
    parts = [os.urandom(5 * MiB), os.urandom(5 * MiB), os.urandom(77)]
    target = {"Bucket": "bkt", "Key": "multi"}
    upload = {**target, "UploadId": s3.create_multipart_upload(**target)["UploadId"]}
    done = [
        {"PartNumber": n, "ETag": s3.upload_part(**upload, PartNumber=n, Body=body)["ETag"]}
        for n, body in enumerate(parts, 1)
    ]
    assert [p["Size"] for p in s3.list_parts(**upload)["Parts"]] == [len(p) for p in parts]
    assert [u["Key"] for u in s3.list_multipart_uploads(Bucket="bkt")["Uploads"]] == ["multi"]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})
    assert s3.get_object(**target)["Body"].read() == b"".join(parts)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="bkt")

    s3.copy_object(Bucket="bkt", Key="copied", CopySource={"Bucket": "bkt", "Key": "multi"})
    s3.delete_object(**target)
    assert s3.get_object(Bucket="bkt", Key="copied")["Body"].read() == b"".join(parts)

    upload["UploadId"] = s3.create_multipart_upload(**target)["UploadId"]
    s3.upload_part(**upload, PartNumber=1, Body=parts[0])
    s3.abort_multipart_upload(**upload)
    with pytest.raises(ClientError) as raised:
        s3.list_parts(**upload)
    assert code(raised) == "NoSuchUpload"


def test_listing_in_pages_and_batch_delete(s3):
    keys = [f"list/{n:04d} +&" for n in range(1005)] + ["list/sub/x", "list/sub/y", "list2"]
    for key in keys:
        s3.put_object(Bucket="lst", Key=key, Body=b"")
    pages = list(s3.get_paginator("list_objects_v2").paginate(Bucket="lst", Prefix="list/"))
    assert len(pages) == 2
    assert [o["Key"] for page in pages for o in page["Contents"]] == keys[:-1]
    after = s3.list_objects_v2(Bucket="lst", Prefix="list/", StartAfter=keys[1003], Delimiter="/")
    assert [o["Key"] for o in after["Contents"]] == [keys[1004]]
    assert [p["Prefix"] for p in after["CommonPrefixes"]] == ["list/sub/"]
    s3.delete_objects(Bucket="lst", Delete={"Objects": [{"Key": key} for key in keys[:1000]]})
    s3.delete_object(Bucket="lst", Key="list2")
    assert s3.list_objects_v2(Bucket="lst")["KeyCount"] == 7


def test_memory_is_given_back():
    data = os.urandom(20 * MiB)
    with null_server(keep_bytes=64 * MiB) as server:
        s3 = client(server)
        for n in range(8):  # 160 MiB through 64
            s3.put_object(Bucket="bkt", Key=f"big{n % 2}", Body=data)
        s3.delete_objects(Bucket="bkt", Delete={"Objects": [{"Key": "big0"}, {"Key": "big1"}]})
        s3.put_object(Bucket="bkt", Key="big", Body=data + data)
        assert s3.get_object(Bucket="bkt", Key="big")["Body"].read() == data + data
        with pytest.raises(ClientError) as raised:
            s3.put_object(Bucket="bkt", Key="more", Body=data + data)
        assert code(raised) == "InsufficientStorage"


@pytest.mark.parametrize("receive", ["copy", "drop"])
def test_raw_sockets_move_every_byte(receive):
    buffer = bytearray(os.urandom(20 * MiB))
    pieces = raw_sockets.cut(memoryview(buffer), 3 * MiB)
    with null_server(receive=receive) as server:
        assert raw_sockets.put(server.url, "bench", pieces, 3).nbytes == len(buffer)
        assert raw_sockets.get(server.url, "bench", pieces, 3).gb_s > 0
        assert not any(buffer[: 3 * MiB])  # this server forgets what it receives, and answers zeros
    kept = bytearray(os.urandom(20 * MiB))
    with null_server(keep_bytes=32 * MiB) as server:
        raw_sockets.put(server.url, "bench", raw_sockets.cut(memoryview(kept), 3 * MiB), 3)
        raw_sockets.get(server.url, "bench", pieces, 3)
    assert buffer == kept


def test_raw_sockets_refuse_a_missing_object(server):
    with pytest.raises(ConnectionError, match="404"):
        raw_sockets.get(server.url, "empty", [memoryview(bytearray(8))], 1)


def test_server_ends_with_its_parent():
    tools = Path(raw_sockets.__file__).parent
    script = "import null_s3\nwith null_s3.null_server() as s:\n print(s.pid, flush=True)\n input()"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tools, stdin=-1, stdout=-1, text=True)
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.wait()
        assert select.select([pidfd], [], [], 10)[0], "the server outlives its parent"
    finally:
        os.close(pidfd)
        parent.stdin.close()
        parent.stdout.close()
