"""Fixtures: the command line over an in-memory bucket."""

from __future__ import annotations

import pytest
from support.memory_store import MemoryBucket, MemoryStore

import objckpt.store
from objckpt.cli.main import run
from objckpt.store import parse_url


@pytest.fixture
def bucket(monkeypatch):
    """The bucket that every verb sees, under any URL."""
    made = MemoryBucket()

    def open_store(url, options=None):
        return MemoryStore(made, parse_url(url).url)

    monkeypatch.setattr(objckpt.store, "open_store", open_store)
    return made


@pytest.fixture
def store(bucket):
    """What lies under `s3://bucket/run1`."""
    return MemoryStore(bucket, "s3://bucket/run1")


@pytest.fixture
def cli(capsys):
    """Run a command line: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call
