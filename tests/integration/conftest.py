"""What keeps the processor for the tests themselves: the command in this process, and a store probed once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from objckpt.cli.main import run
from objckpt.save import commit
from objckpt.store import Store
from objckpt.store.probe import probe

_found: dict[str, dict[str, Any]] = {}  # by server


@pytest.fixture(autouse=True)
def probed_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """In this process each server is probed at its first use, not under each new URL, which would take most of a second
    every time. Agents, which are processes of their own, do it always.

    Gives a function that names the server, for one that is another in each test and yet the same.
    """
    named = ""

    def known(store: Store) -> dict[str, Any]:
        options = getattr(store, "options", None)
        server = (
            named or f"{type(store).__name__} {options and options.endpoint_url} {os.environ.get('AWS_ENDPOINT_URL')}"
        )
        if server not in _found:
            _found[server] = probe(store)
        return dict(_found[server])

    def name(server: str) -> None:
        nonlocal named
        named = server

    monkeypatch.setattr(commit, "probe", known)
    return name


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command line in this process, under further variables: `here("ls", url, AWS_PROFILE="x")`.

    A process of its own takes a second or more for its imports. What only one can show has one in some test of each verb.
    """

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()  # what was written before
        with mock.patch.dict(os.environ, environment):
            code = run(arguments)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return call
