"""What only a real server can show: signed payloads, virtual hosts, a disk that is full."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import GIVEN, WeedServer, lead_to

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.errors import SaveError, StoreError
from objckpt.limits import MiB
from objckpt.store import open_store

own_server = pytest.mark.skipif(GIVEN, reason="needs a server of its own")
Start = Callable[..., WeedServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a SeaweedFS of the test's own, with further options of `weed mini`."""
    made: list[WeedServer] = []

    def start(*options: str) -> WeedServer:
        made.append(WeedServer(tmp_path / f"weed-{len(made)}", options))
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.stop()


def state_of(step: int, nbytes: int = 24 * MiB) -> dict[str, Any]:
    """Cheap, and different in every step: several parts, so that the upload is a multipart one."""
    return {"w": torch.arange(step, step + nbytes // 8, dtype=torch.int64), "n": step}


def check(ckpt: Checkpointer, step: int) -> None:
    found = ckpt.load(step)
    assert found["n"] == step and torch.equal(found["w"], state_of(step, found["w"].nbytes)["w"])


@pytest.mark.parametrize("uploader", ["process", "thread"])
def test_signed_payloads(s3_url, uploader):
    """SHA-256 of every body in its signature: of the zero-copy bodies of parts, and of the log's records."""
    with Checkpointer(s3_url, store=StoreOptions(sign_payload=True), options=SaveOptions(uploader=uploader)) as ckpt:
        ckpt.save(1, state_of(1)).wait_committed(60)
        ckpt.save(2, {"n": 2, "w": torch.zeros(0, dtype=torch.int64)}).wait_committed(60)
        check(ckpt, 1)
        assert ckpt.latest() == 2


@own_server
def test_virtual_hosts(start, monkeypatch):
    """The bucket in the host name. `*.localhost` has no entry in /etc/hosts, so the look-up is ours (in this process)."""
    server = start("-s3.domainName=localhost")
    url = lead_to(server, monkeypatch)
    monkeypatch.setenv("NO_PROXY", ".localhost")
    looked_up, resolve = set(), socket.getaddrinfo

    def ours(host: str, *rest: Any, **more: Any) -> Any:
        looked_up.add(host)
        return resolve("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", ours)
    store = StoreOptions(addressing="virtual", endpoint_url=server.endpoint_url.replace("127.0.0.1", "localhost"))
    with Checkpointer(url, store=store, options=SaveOptions(uploader="thread")) as ckpt:
        ckpt.save(1, state_of(1)).wait_committed(60)
        check(ckpt, 1)
        assert [info.key for info in open_store(url, store).list("log/")]
    assert looked_up == {f"{server.bucket}.localhost"}
    with Checkpointer(url) as ckpt:  # the same place by path
        check(ckpt, 1)


@own_server
@pytest.mark.parametrize("how", ["volumes", "file-size"])
def test_a_full_store(start, monkeypatch, how):
    """The save fails within its deadline and says what may be the cause; what was saved before is whole.

    SeaweedFS has no code for it: it answers 500. "volumes": it has reached its number of volumes. "file-size": the
    kernel refuses its writes, as on a full disk, until space is made.
    """
    server = start(*(["-master.volumeSizeLimitMB=30", "-volume.max=2"] if how == "volumes" else []))
    url = lead_to(server, monkeypatch)
    store = StoreOptions(retry_deadline_s=6, request_timeout_s=6)
    with Checkpointer(url, store=store) as ckpt:
        ckpt.save(1, state_of(1, 8 * MiB)).wait_committed(60)
        if how == "file-size":
            limits = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (16 * MiB, resource.RLIM_INFINITY))
        last, failed = 1, None
        while failed is None:
            assert last < 12, "the store takes everything"
            try:
                ckpt.save(last + 1, state_of(last + 1)).wait_committed(30)
                last += 1
            except SaveError as err:
                failed = err
        assert failed.context["step"] == last + 1
        assert re.search(r"was not committed .*500.*its disk is full", str(failed))
        assert [c.step for c in ckpt.checkpoints()] == list(range(1, last + 1))
        for step in range(1, last + 1):
            check(ckpt, step)
        assert open_store(url, store).list_uploads() == []
        if how == "file-size":
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limits)
            ckpt.save(last + 1, state_of(last + 1)).wait_committed(60)
            check(ckpt, last + 1)
        else:
            with pytest.raises(StoreError):
                open_store(url, store).put("log/x", bytes(MiB))
