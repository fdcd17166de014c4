"""TLS against a real server with a certificate of a CA of our own: what works, and what each mistake is told."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import GIVEN, WeedServer, lead_to

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.cli import local_server
from objckpt.errors import ConnectError, ObjckptError, SaveError
from objckpt.store import open_store, open_uploads

pytestmark = [
    pytest.mark.skipif(GIVEN, reason="needs a server of its own"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates"),
]
ROOT = Path(__file__).resolve().parents[2]
UNTRUSTED = r"certificate is not trusted: give the CA .* ca_bundle or AWS_CA_BUNDLE"


class TlsServer(WeedServer):
    """Serves https for the name localhost beside http."""

    def __init__(self, directory: Path) -> None:
        self.ca = str(directory / "ca.pem")
        self.port = local_server.free_port()
        certificate, key = make_certificates(directory)
        options = [f"-s3.cert.file={certificate}", f"-s3.key.file={key}", f"-s3.port.https={self.port}"]
        super().__init__(directory / "weed", options)

    def environment(self) -> dict[str, str]:
        return super().environment() | {"AWS_ENDPOINT_URL": f"https://localhost:{self.port}"}

    @property
    def plain(self) -> str:
        """The endpoint without TLS."""
        return self.endpoint_url


def make_certificates(directory: Path) -> tuple[Path, Path]:
    """A CA, and a certificate of it for localhost; returns the latter's path and its key's."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=objckpt tests")
    openssl("req", *new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (directory / "names").write_text("subjectAltName=DNS:localhost\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.pem", *signing)
    return directory / "server.pem", directory / "server.key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    found = TlsServer(tmp_path_factory.mktemp("tls"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def url(server: TlsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    return lead_to(server, monkeypatch)


def options(**changes: Any) -> StoreOptions:
    return StoreOptions(**{"retry_deadline_s": 30.0, "request_timeout_s": 20.0} | changes)


def ls(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "objckpt", "ls", url, *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("by", ["option", "environment"])
def test_save_restore_and_ls(server, url, by, monkeypatch):
    store, arguments = options(ca_bundle=server.ca), ["--ca-bundle", server.ca]
    if by == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", server.ca)
        store, arguments = options(), []
    w = torch.arange(3_000_000, dtype=torch.float32)
    with Checkpointer(url, store=store) as ckpt:  # the uploader is a process of its own
        ckpt.save(1, {"w": w}).wait_committed(60)
        into = {"w": torch.zeros_like(w)}
        assert ckpt.restore(into) == 1
        assert torch.equal(into["w"], w)
    done = ls(url, *arguments)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 2


def refusals(
    url: str, store: StoreOptions, names: Collection[str] = ("list", "upload", "save")
) -> dict[str, ObjckptError]:
    """The errors of a listing, of an upload and of a save."""
    found: dict[str, ObjckptError] = {}

    async def upload() -> None:
        async with open_uploads(url, store) as uploads:
            await uploads.put("data/x", [memoryview(b"x")], None)

    def save() -> None:
        ckpt = Checkpointer(url, store=store, options=SaveOptions(uploader="thread"))
        try:
            ckpt.save(1, {"n": 1}).wait_committed(60)
        finally:
            ckpt.close()

    calls: dict[str, Callable[[], object]] = {
        "list": open_store(url, store).list, "upload": lambda: asyncio.run(upload()), "save": save
    }  # fmt: skip
    for name in names:
        with pytest.raises(ObjckptError) as caught:
            calls[name]()
        found[name] = caught.value
    return found


def check(found: dict[str, ObjckptError], said: str, endpoint: str) -> None:
    """Every one of the errors names the remedy and the endpoint."""
    for name, error in found.items():
        assert re.search(said, str(error)) and endpoint in str(error), (name, str(error))
    assert type(found["list"]) is ConnectError and type(found.get("save", SaveError(""))) is SaveError


def test_an_unknown_ca(server, url):
    found = refusals(url, options())
    check(found, UNTRUSTED, f"https://localhost:{server.port}")
    assert type(found["upload"]) is ConnectError
    done = ls(url)
    assert done.returncode == ConnectError.exit_code and "AWS_CA_BUNDLE" in done.stderr and done.stdout == ""


def test_another_ca(server, url, tmp_path):
    make_certificates(tmp_path)
    check(refusals(url, options(ca_bundle=str(tmp_path / "ca.pem"))), UNTRUSTED, "https://localhost")


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_bundle_that_holds_no_certificate(server, url, tmp_path, by, monkeypatch):
    path = tmp_path / "not.pem"
    path.write_text("hello")
    if by == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
    store = options(ca_bundle=str(path) if by == "option" else None)
    begin = time.monotonic()
    for error in refusals(url, store, ("list", "upload")).values():
        assert f"the CA bundle {path}" in str(error)
    assert time.monotonic() - begin < 15  # not repeated until the deadlines


def test_another_host_name(server, url):
    endpoint = f"https://127.0.0.1:{server.port}"
    found = refusals(url, options(ca_bundle=server.ca, endpoint_url=endpoint))
    check(found, "certificate is one for other host names", endpoint)


def test_https_to_a_port_without_tls(server, url):
    endpoint = server.plain.replace("http://", "https://")
    found = refusals(url, options(ca_bundle=server.ca, endpoint_url=endpoint))
    check(found, "speaks no TLS at this port: write http://", endpoint)


def test_http_to_a_port_for_tls(server, url):
    """The server hangs up, in one way or another; that is told long before the deadline of 300 s."""
    endpoint = f"http://localhost:{server.port}"
    begin = time.monotonic()
    check(refusals(url, StoreOptions(endpoint_url=endpoint), ("list", "upload")), "write https://", endpoint)
    assert time.monotonic() - begin < 60
