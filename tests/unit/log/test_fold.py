"""The fold: what the records say, whoever wrote them. No store."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt.errors import FormatError, NotCommittedError, UsageError, WriterFencedError
from objckpt.format import keys
from objckpt.format.records import Commit, Open, Record, Retire, Tag
from objckpt.log import Log, fence


def session(n: int) -> str:
    return f"{n:026d}"


class Story:
    """Records one after the other; the epoch of session n is n."""

    def __init__(self) -> None:
        self.log = Log("s3://bucket/run1")

    def add(self, kind: type[Record], who: int, **fields: Any) -> int:
        seq = self.log.next_seq
        head = {"write_id": seq.to_bytes(16, "big"), "epoch": who, "session": session(who), "time_s": 0.0, "host": "h"}
        self.log = self.log.extended([(seq, kind(seq=seq, **head, **fields))])
        return seq

    def open(self, who: int) -> int:
        return self.add(Open, who, world_size=1)

    def commit(self, who: int, step: int, parent: int | None = None, attempt: str = "") -> int:
        return self.add(
            Commit, who, step=step, attempt=attempt or keys.attempt(step, session(who), self.log.next_seq),
            parent=parent, world_size=1, raw_bytes=0, stored_bytes=0, tensors=0, ranks=[("0" * 32, 1)], signature="0" * 16,
        )  # fmt: skip

    def retire(self, who: int, seqs: Sequence[int] = (), attempts: Sequence[str] = (), reason: str = "why") -> int:
        return self.add(Retire, who, seqs=list(seqs), attempts=list(attempts), reason=reason)

    def tag(self, who: int, name: str, target: int | None) -> int:
        return self.add(Tag, who, name=name, target=target)

    @property
    def live(self) -> list[int]:
        return [c.seq for c in self.log.checkpoints]


@pytest.fixture
def story() -> Story:
    return Story()


# ---- live, retired, too late ---------------------------------------------------------------------------------------


def test_an_empty_log(story: Story) -> None:
    log = story.log
    assert (log.epoch, log.next_seq, log.checkpoints, log.tags, log.lineage()) == (0, 0, [], {}, frozenset())
    assert (log.capabilities, log.keyed, log.loose) == ({}, False, False)


def test_a_retired_checkpoint_is_no_longer_live_but_was_one(story: Story) -> None:
    story.open(1)
    a, b = story.commit(1, 1), story.commit(1, 2)
    story.retire(1, [a])
    assert story.live == [b] and [c.seq for c in story.log.commits] == [a, b] and story.log.retired == {a}
    assert story.log.fenced == []
    with pytest.raises(NotCommittedError):
        story.log.at(1)


def test_the_newest_is_retired_too_when_it_is_named(story: Story) -> None:
    story.open(1)
    a, b = story.commit(1, 1), story.commit(1, 2)
    story.retire(1, [b])
    assert story.log.newest().seq == a
    story.retire(1, [a, b])
    with pytest.raises(NotCommittedError):
        story.log.newest()


def test_an_attempt_that_was_given_up_never_commits(story: Story) -> None:
    story.open(1)
    attempt = keys.attempt(5, session(1), 1)
    story.retire(1, attempts=[attempt], reason="rank 3 is late")
    late = story.commit(1, 5, attempt=attempt)
    assert story.live == [] and [c.seq for c in story.log.fenced] == [late] and story.log.commits == []
    assert story.log.aborted == {attempt} and story.log.why_aborted(attempt) == "rank 3 is late"


def test_a_commit_before_its_attempt_is_given_up_stays(story: Story) -> None:
    story.open(1)
    attempt = keys.attempt(5, session(1), 1)
    seq = story.commit(1, 5, attempt=attempt)
    story.retire(1, attempts=[attempt])
    assert story.live == [seq] and story.log.fenced == []


def test_a_commit_after_a_newer_writer_s_open_never_counts(story: Story) -> None:
    story.open(1)
    a = story.commit(1, 1)
    story.open(2)
    late = story.commit(1, 2, a)
    b = story.commit(2, 3, a)
    assert story.live == [a, b] and [c.seq for c in story.log.fenced] == [late]
    assert story.log.epoch == 2 and [r.epoch for r in story.log.opens] == [1, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "commit", "retire", "tag"]), st.integers(1, 4)), max_size=25))
def test_live_fenced_and_retired_share_out_all_commits(events: list[tuple[str, int]]) -> None:
    story, made, opened = Story(), list[int](), 0
    expected_late = set[int]()
    for kind, who in events:
        if kind == "open":
            story.open(who)
            opened = max(opened, who)
        elif kind == "commit":
            made.append(story.commit(who, len(made)))
            if who < opened:
                expected_late.add(made[-1])
        elif kind == "retire":
            story.retire(who, made[: who - 1])
        else:
            story.tag(who, "best", made[-1] if made else None)
    log = story.log
    late, commits = {c.seq for c in log.fenced}, {c.seq for c in log.commits}
    assert late == expected_late and late | commits == set(made) and not late & commits
    assert set(story.live) == commits - log.retired
    assert set(log.tags.values()) <= set(story.live)
    assert [log.before(r).records for r in log.records] == [log.records[:n] for n in range(len(log.records))]


# ---- fencing -------------------------------------------------------------------------------------------------------


def test_fence_looks_at_those_who_train_only(story: Story) -> None:
    story.open(1)
    seq = story.commit(1, 1)
    story.retire(7, [seq])
    story.tag(8, "best", None)
    fence(story.log, 1, session(1))  # whoever removes or names something replaces nobody
    with pytest.raises(WriterFencedError, match="replaced by session"):
        fence(story.log, 1, session(2))
    story.open(2)
    with pytest.raises(WriterFencedError) as caught:
        fence(story.log, 1, session(1))
    assert caught.value.context == {"epoch": 1, "by": session(2)}
    fence(story.log, 2, session(2))


def test_a_commit_of_a_higher_epoch_fences_too(story: Story) -> None:
    """Its open record may be one that cannot be read."""
    story.open(1)
    story.commit(2, 1)
    with pytest.raises(WriterFencedError):
        fence(story.log, 1, session(1))


# ---- tags ----------------------------------------------------------------------------------------------------------


def test_tags_are_the_last_of_a_name_and_of_live_checkpoints_only(story: Story) -> None:
    story.open(1)
    a, b = story.commit(1, 1), story.commit(1, 2)
    story.tag(1, "best", a)
    story.tag(1, "paper", a)
    assert story.log.tags == {"best": a, "paper": a}
    story.tag(1, "best", b)
    assert story.log.tags == {"best": b, "paper": a}
    story.tag(1, "best", None)
    assert story.log.tags == {"paper": a}
    story.retire(1, [a])
    assert story.log.tags == {}
    story.tag(1, "nowhere", 0)  # an open record
    assert story.log.tags == {}


# ---- choosing ------------------------------------------------------------------------------------------------------


def test_find(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    story.open(1)
    a, b, c, d = (story.commit(1, step) for step in (10, 20, 20, 5))
    story.tag(1, "best", b)
    story.tag(1, "v1.0-rc_2", a)
    caplog.set_level(logging.WARNING, "objckpt")
    for which, seq in [(None, d), (10, a), ("10", a), ("010", a), (f"20@{b}", b), (f"20@{c}", c), (5, d), ("best", b),
                       ("v1.0-rc_2", a)]:  # fmt: skip
        assert story.log.find(which).seq == seq, which
    assert caplog.text == ""
    assert story.log.find(20).seq == c
    assert f"taking 20@{c}, not 20@{b}" in caplog.text


def test_find_what_is_not_there(story: Story) -> None:
    story.open(1)
    a, b = story.commit(1, 10), story.commit(1, 20)
    story.tag(1, "best", b)
    story.retire(1, [a])
    for which, kind, text in [
        (10, NotCommittedError, "step 10 is not committed .* newest committed steps are: 20"),
        ("10", NotCommittedError, "step 10 is not committed"),
        (f"10@{a}", NotCommittedError, "was removed"),
        (f"20@{a}", NotCommittedError, f"20@{a} is no checkpoint"),
        ("20@99", NotCommittedError, "20@99 is no checkpoint under s3://bucket/run1$"),
        ("worst", NotCommittedError, "the tag 'worst'; tags: best"),
        ("20@", UsageError, "names no checkpoint"),
        ("@2", UsageError, "names no checkpoint"),
        ("20@x", UsageError, "names no checkpoint"),
        ("-1", UsageError, "names no checkpoint"),
        ("", UsageError, "names no checkpoint"),
        ("²", UsageError, "names no checkpoint"),
        ("٢", UsageError, "names no checkpoint"),
        ("a b", UsageError, "names no checkpoint"),
        ("x" * 65, UsageError, "names no checkpoint"),
        (1.5, UsageError, "names no checkpoint"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=text):
            story.log.find(which)  # type: ignore[arg-type]


def test_the_newest_is_not_known_below_a_damaged_record(story: Story) -> None:
    story.open(1)
    a = story.commit(1, 1)
    story.log = story.log.extended([(story.log.next_seq, FormatError("broken"))])
    with pytest.raises(FormatError, match="record 2 cannot be read, and it may be the newest"):
        story.log.find(None)
    assert story.log.find(1).seq == a
    b = story.commit(1, 2)
    assert story.log.find(None).seq == b


# ---- descent -------------------------------------------------------------------------------------------------------


def test_an_abandoned_branch_is_not_in_the_lineage(story: Story) -> None:
    story.open(1)
    a = story.commit(1, 1)
    b = story.commit(1, 2, a)
    c = story.commit(1, 3, b)
    story.open(2)  # resumed from a
    d = story.commit(2, 2, a)
    assert story.log.lineage() == {a, d} and story.live == [a, b, c, d]
    story.retire(2, [d])
    assert story.log.lineage() == {a, b, c}  # the newest is c again


def test_lineage_goes_through_what_was_removed(story: Story) -> None:
    story.open(1)
    a = story.commit(1, 1)
    b = story.commit(1, 2, a)
    c = story.commit(1, 3, b)
    story.retire(1, [b])
    assert story.log.lineage() == {a, b, c}


@pytest.mark.parametrize("parent", [0, 1, 3, 99])
def test_lineage_ends_whatever_a_parent_says(story: Story, parent: int) -> None:
    story.open(1)
    a = story.commit(1, 1)
    b = story.commit(1, 2, parent)
    assert b in story.log.lineage() <= {a, b, parent}


# ---- growing -------------------------------------------------------------------------------------------------------


def test_records_in_any_order_make_one_log(story: Story) -> None:
    story.open(1)
    a = story.commit(1, 1)
    story.commit(1, 2, a)
    story.retire(1, [a])
    for records in itertools.permutations(story.log.records):
        log = Log(story.log.url).extended([(r.seq, r) for r in records])
        assert log == story.log and log.checkpoints == story.log.checkpoints


def test_capabilities_are_those_of_the_newest_session_that_knows(story: Story) -> None:
    for who, known in ((1, {"conditional_put": False, "x": 1}), (2, {"conditional_put": True}), (3, {}),
                       (4, {"conditional_put": None}), (5, {"conditional_put": "yes"})):  # fmt: skip
        story.add(Open, who, world_size=1, capabilities=known)
        assert story.log.keyed is (who == 1) and story.log.loose
    assert story.log.capabilities == {"conditional_put": True}
