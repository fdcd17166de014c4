"""Opening the log: what the store can do is asked once, recorded, and believed for this place only."""

from __future__ import annotations

from typing import Any

import pytest
from support.log_writer import commit, session, writer
from support.memory_store import MemoryBucket, MemoryStore

import objckpt.save.commit
from objckpt.errors import StoreError
from objckpt.format import keys
from objckpt.log import read_log
from objckpt.save.commit import LogWriter


class Probe:
    """In place of the probe: counts, and answers what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bool | None = True) -> None:
        self.answer, self.calls = answer, 0
        monkeypatch.setattr(objckpt.save.commit, "probe", self)

    def __call__(self, store: MemoryStore) -> dict[str, Any]:
        self.calls += 1
        return {"conditional_put": self.answer, "conditional_put_evidence": "seen"}


def opened(store: MemoryStore, who: int) -> LogWriter:
    made = LogWriter(store, session(who), 1, 5.0)
    made.open()
    return made


@pytest.mark.parametrize("conditional", [True, False])
def test_the_probe_s_result_is_in_the_open_record(conditional: bool) -> None:
    store = MemoryStore(MemoryBucket(conditional=conditional))
    log = opened(store, 1).log
    assert log.capabilities["conditional_put"] is conditional and log.keyed is not conditional
    assert log.capabilities["url"] == store.url and log.capabilities["conditional_put_evidence"]
    assert read_log(store).capabilities == log.capabilities
    assert [info.key for info in store.list()] == [info.key for info in store.list(keys.LOG)]


def test_later_sessions_believe_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, store = Probe(monkeypatch), MemoryStore()
    for who in (1, 2, 3):
        by = opened(store, who)
        commit(by, who)
        by.open()
    assert probe.calls == 1 and read_log(store).opens[-1].capabilities["conditional_put"] is True


def test_what_was_not_clear_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, store = Probe(monkeypatch, answer=None), MemoryStore()
    first = opened(store, 1)
    assert not first.log.keyed
    probe.answer = True
    second = opened(store, 2)
    assert probe.calls == 2 and second.log.capabilities["conditional_put"] is True


def test_a_log_that_was_copied_here_says_nothing_of_this_store(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(monkeypatch)
    there, here = MemoryStore(url="s3://there/run"), MemoryStore(url="s3://here/run")
    commit(opened(there, 1), 1)
    for info in there.list():
        here.put(info.key, there.get(info.key, max_bytes=1 << 20))
    probe.answer = False
    by = opened(here, 2)
    assert probe.calls == 2 and by.log.keyed
    commit(by, 2)
    assert [c.step for c in read_log(here).checkpoints] == [1, 2]


def test_an_open_that_failed_in_the_probe_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    store, by = MemoryStore(), LogWriter(MemoryStore(), session(1), 1, 5.0)

    def broken(store: MemoryStore) -> dict[str, Any]:
        raise StoreError("503")

    with monkeypatch.context() as patch:
        patch.setattr(objckpt.save.commit, "probe", broken)
        with pytest.raises(StoreError, match="503"):
            by.open()
    assert by.epoch == 0 and read_log(store).records == ()
    by.open()
    assert by.epoch == 1


def test_only_a_store_that_keeps_no_writers_apart_is_warned_of() -> None:
    for conditional in (True, False):
        said: list[str] = []
        by = LogWriter(MemoryStore(), session(1), 1, 5.0, warn=said.append)
        by.open({"conditional_put": conditional, "conditional_put_evidence": "the header is ignored"})
        commit(by, 1)
        by.open()
        assert len(said) == (not conditional)
        assert all("s3://bucket/prefix" in text and "the header is ignored" in text for text in said)


def test_capabilities_that_are_given_need_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(monkeypatch)
    assert writer(MemoryStore()).log.capabilities == {"conditional_put": True} and probe.calls == 0
