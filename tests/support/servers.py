"""Real S3 servers for tests: on free ports of 127.0.0.1, with data in a folder of their own, dying with the tests.

server = WeedServer(tmp_path)        # JuiceServer(tmp_path)
server.start(); server.environment() # what a client has to export
server.kill(); server.restart()      # SIGKILL and again, on the same ports, with the same data
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import boto3
import botocore.config
import botocore.exceptions
import pytest

from objckpt.cli import local_server
from objckpt.errors import ObjckptError

HOST = "127.0.0.1"
REGION = "us-east-1"
BUCKET = "checkpoints"
DEADLINE_S = 60.0
GIVEN = bool(os.environ.get("OBJCKPT_TEST_ENDPOINT"))
# Variables of the developer's own account and tools; a test that needs one sets it.
_FOREIGN = ("AWS_", "OBJCKPT_")


class Server(Protocol):
    """A server that tests may start, kill and restart. `endpoint_url` stays the same over restarts."""

    name: str
    bucket: str
    endpoint_url: str

    def environment(self) -> dict[str, str]:
        """The AWS variables that lead a client to it."""

    def start(self) -> None:
        """Start and wait until it takes requests; RuntimeError, with the end of its log, when it does not."""

    def kill(self) -> None:
        """SIGKILL; returns when it has ended."""

    def stop(self) -> None:
        """End it, in order; returns when it has ended. Idempotent."""

    def restart(self) -> None:
        """Start again on the same ports with the same data; kills it first when it runs."""


class WeedServer:
    """SeaweedFS: has conditional writes, checksums and batch delete."""

    name = "weed"
    bucket = BUCKET

    def __init__(self, directory: Path, options: Sequence[str] = ()) -> None:
        self.directory, self.options = directory, options
        self._server: local_server.LocalServer | None = None

    @property
    def endpoint_url(self) -> str:
        return self._running().endpoint_url

    @property
    def pid(self) -> int:
        return self._running().pid

    def _running(self) -> local_server.LocalServer:
        assert self._server is not None, "not started"
        return self._server

    def environment(self) -> dict[str, str]:
        return self._running().environment()

    def start(self) -> None:
        try:
            self._server = local_server.start(
                self.directory,
                self.bucket,
                deadline_s=DEADLINE_S,
                die_with_parent=True,
                options=self.options,
                ports=self._server.ports if self._server else None,
            )
        except ObjckptError as err:
            raise RuntimeError(f"{err}:\n{err.context.get('log')}") from err

    def kill(self) -> None:
        local_server.kill(self._running())

    def stop(self) -> None:
        if self._server is not None:
            local_server.kill(self._server)  # an orderly end takes seconds, and the data is thrown away

    def restart(self) -> None:
        self.kill()
        self.start()


class JuiceServer:
    """JuiceFS gateway (MinIO's front): no conditional writes, no checksums, batch delete wants Content-MD5."""

    name = "juicefs"
    bucket = BUCKET
    access_key, secret_key = "objckpt", "objckpt-secret"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = local_server.free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
        }

    def start(self) -> None:
        home = self.directory
        home.mkdir(parents=True, exist_ok=True)
        program, meta = find_program("juicefs"), f"sqlite3://{home}/meta.db"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MINIO_"))}
        if not (home / "meta.db").exists():
            format_ = [program, "format", "--storage", "file", "--bucket", f"{home}/blob/", "--trash-days", "0", meta]
            done = subprocess.run([*format_, "jfs"], env=clean, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"juicefs format failed:\n{done.stdout}{done.stderr}")
        options = ["--multi-buckets", "--keep-etag", "--object-tag", "--object-meta", "--no-usage-report"]
        options += ["--cache-dir", f"{home}/cache", "--log", f"{home}/gateway.log", "--no-banner"]
        with open(home / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [program, "gateway", *options, meta, f"{HOST}:{self.port}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean | {"MINIO_ROOT_USER": self.access_key, "MINIO_ROOT_PASSWORD": self.secret_key},
                start_new_session=True,
                preexec_fn=local_server.end_with_parent(),  # noqa: PLW1509 – one system call
            )
        self._wait_ready()

    def _wait_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + DEADLINE_S
        client = client_for(self)
        problem: object = None
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"juicefs gateway ended with status {self._process.returncode}:\n{self._log_tail()}")
            try:
                names = [b["Name"] for b in client.list_buckets()["Buckets"]]
                if self.bucket not in names:
                    client.create_bucket(Bucket=self.bucket)
                return
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as err:
                problem = err
            if time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"juicefs gateway is not ready ({problem}):\n{self._log_tail()}")
            time.sleep(0.05)

    def _log_tail(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self.kill()

    def restart(self) -> None:
        self.kill()
        self.start()


class GivenEndpoint:
    """A server that somebody else runs: OBJCKPT_TEST_ENDPOINT, OBJCKPT_TEST_BUCKET, and keys in the AWS variables."""

    name = "endpoint"

    def __init__(self) -> None:
        self.endpoint_url = os.environ["OBJCKPT_TEST_ENDPOINT"]
        self.bucket = os.environ["OBJCKPT_TEST_BUCKET"]
        self._given = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}

    def environment(self) -> dict[str, str]:
        return {"AWS_REGION": REGION} | self._given | {"AWS_ENDPOINT_URL": self.endpoint_url}

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def lead_to(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment for `server`; returns a fresh URL there."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)
    settings = server.environment() | {"AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.bucket}/t-{uuid.uuid4().hex}"


def client_for(server: Server) -> object:
    """A plain boto3 client, for what tests look at or break behind objckpt's back."""
    given = server.environment()
    return boto3.client(
        "s3",
        endpoint_url=given["AWS_ENDPOINT_URL"],
        aws_access_key_id=given.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=given.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=given.get("AWS_SESSION_TOKEN"),
        region_name=given["AWS_REGION"],
        config=botocore.config.Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def find_program(name: str) -> str:
    """A program beside this Python, else on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install -e '.[dev]'")
    return found
