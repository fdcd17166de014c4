"""Trouble is told when it lasts, once a minute, and its end; never a trouble or an end that is none."""

from __future__ import annotations

import logging
from collections.abc import Callable

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


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages since the last call."""
    caplog.set_level(logging.WARNING)

    def take() -> list[str]:
        out = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return out

    return take


def tries(clock: list[float]) -> Tries:
    return Tries(clock[0] + 300, began=clock[0])


def test_trouble_is_told_when_it_lasts_and_its_end(clock, told) -> None:
    seen, mine = Outage(), tries(clock)
    seen.failed(FAULT, WHERE, mine)
    clock[0] += PATIENCE_S - 1
    seen.failed(FAULT, WHERE, mine)
    assert told() == [], "short trouble is nobody's business"
    clock[0] += 2
    seen.failed(FAULT, WHERE, mine)
    assert told() == [
        "PutObject s3://bucket/run1/x at http://store has not succeeded for 6 s (SlowDown: slower); "
        "it is tried again for up to 294 s more"
    ]
    for _ in range(10):
        clock[0] += 5
        seen.failed(FAULT, WHERE, mine)
    assert told() == []
    clock[0] += AGAIN_S
    seen.failed(FAULT, WHERE, mine)
    assert len(told()) == 1
    seen.succeeded(WHERE, mine)
    assert told() == ["PutObject s3://bucket/run1/x at http://store succeeds again, after 116 s"]


def test_the_end_is_that_of_the_request_that_was_told_of(clock, told) -> None:
    seen, bad, other = Outage(), tries(clock), tries(clock)
    clock[0] += PATIENCE_S
    seen.failed(FAULT, WHERE, bad)
    seen.failed(FAULT, WHERE, other)
    assert len(told()) == 1, "one for all requests"
    for _ in range(100):
        clock[0] += 1
        seen.succeeded(WHERE, tries(clock))
        seen.succeeded(WHERE, other)
    assert told() == [], "the other one still fails"
    seen.succeeded(WHERE, bad)
    assert len(told()) == 1


def test_what_failed_long_ago_is_forgotten(clock, told) -> None:
    seen = Outage()
    seen.failed(FAULT, WHERE, tries(clock))  # and ended in a final answer
    clock[0] += 3600
    later = tries(clock)
    seen.failed(FAULT, WHERE, later)
    seen.succeeded(WHERE, later)
    assert told() == []


def test_what_moved_bytes_begins_anew(clock, told) -> None:
    mine = tries(clock)
    clock[0] += 100
    mine.progressed()
    Outage().failed(FAULT, WHERE, mine)
    assert told() == []
