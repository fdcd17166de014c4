"""Fixtures: real S3 servers, started once a session on first use, and a fresh place in one of them for each test.

With OBJCKPT_TEST_ENDPOINT and OBJCKPT_TEST_BUCKET in the environment, and the usual AWS variables for the keys, the
tests use that server instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.servers import GIVEN, GivenEndpoint, JuiceServer, Server, WeedServer, lead_to


@pytest.fixture(scope="session")
def given_server() -> Server:
    """The server named by the environment."""
    return GivenEndpoint()


@pytest.fixture(scope="session")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default server. Shared: a test that kills servers makes one of its own (`support.servers`)."""
    yield from _running(WeedServer(tmp_path_factory.mktemp("weed")))


@pytest.fixture(scope="session")
def juicefs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The second server, the one without conditional writes. Shared."""
    yield from _running(JuiceServer(tmp_path_factory.mktemp("juicefs")))


def _running(server: Server) -> Iterator[Server]:
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["endpoint"] if GIVEN else ["weed", "juicefs"])
def s3_server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn, or the one named by the environment."""
    name = {"endpoint": "given_server", "weed": "weed_server", "juicefs": "juicefs_server"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture
def s3_url(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh `s3://bucket/prefix` on each server in turn; the environment leads there."""
    return lead_to(s3_server, monkeypatch)


@pytest.fixture
def weed_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh `s3://bucket/prefix` on the default server; the environment leads there."""
    return lead_to(request.getfixturevalue("given_server" if GIVEN else "weed_server"), monkeypatch)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line at the end of the whole run, whichever process the test runs in: what a sweep has covered."""
    return lambda text: request.node.user_properties.append(("told", text))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == "told" and report.when == "call":
                    terminalreporter.write_line(text)
