"""Trouble is told when it lasts, once a minute, and its end."""

from __future__ import annotations

import logging

import pytest

from objckpt.store import outage
from objckpt.store.outage import AGAIN_S, PATIENCE_S, Outage
from objckpt.store.retry import Fault, Tries
from objckpt.store.translate import Where

WHERE, FAULT = Where("PutObject", "http://store", "bucket", "run1/x"), Fault("answer", "SlowDown", "slower", 503)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(outage.time, "monotonic", lambda: now[0])
    return now


def test_what_is_told(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    seen, tries = Outage(), Tries(clock[0] + 300, began=clock[0])

    def told() -> list[str]:
        out = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return out

    seen.failed(FAULT, WHERE, tries)
    clock[0] += PATIENCE_S - 1
    seen.failed(FAULT, WHERE, tries)
    assert told() == []
    seen.succeeded(WHERE)
    assert told() == [], "short trouble is nobody's business"
    clock[0] += 2
    seen.failed(FAULT, WHERE, tries)
    assert told() == [
        "PutObject s3://bucket/run1/x at http://store has not succeeded for 6 s (SlowDown: slower); "
        "it is tried again for up to 294 s more"
    ], "this one request has been in trouble for longer"
    for _ in range(10):
        clock[0] += 5
        seen.failed(FAULT, WHERE, tries)
    assert told() == []
    clock[0] += AGAIN_S
    seen.failed(FAULT, WHERE, tries)
    assert len(told()) == 1
    seen.succeeded(WHERE)
    (over,) = told()
    assert "succeeds again, after 1" in over
    seen.succeeded(WHERE)
    assert told() == []


def test_what_moved_bytes_begins_anew(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    tries = Tries(clock[0] + 300, began=clock[0])
    clock[0] += 100
    tries.progressed()
    Outage().failed(FAULT, WHERE, tries)
    assert caplog.records == []
