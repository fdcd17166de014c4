"""The fold of the log: which checkpoints are live, what they are called, and what descends from what. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from objckpt.errors import FormatError, NotCommittedError, ObjckptError, UsageError
from objckpt.format import keys
from objckpt.format.records import Commit, Open, Record, Retire, Tag, is_tag

logger = logging.getLogger("objckpt")


@dataclass(frozen=True)
class Log:
    """The fold of a log. Immutable; `read_log(store, log)` gives a newer one."""

    url: str
    records: tuple[Record, ...] = ()
    damaged: tuple[tuple[int, ObjckptError], ...] = ()  # seq and why: records that are missing or cannot be read
    next_seq: int = 0
    bundled: int = 0  # slots below it have bundles

    # ---- what the records say ---------------------------------------------------------------------------------------

    @cached_property
    def epoch(self) -> int:
        """The highest epoch so far; 0 when nobody has written."""
        return max((r.epoch for r in self.records), default=0)

    @cached_property
    def opens(self) -> list[Open]:
        """The sessions that have written, in log order."""
        return [r for r in self.records if isinstance(r, Open)]

    @cached_property
    def capabilities(self) -> dict[str, Any]:
        """Of the store, as the newest session has recorded them that knows whether conditional PUT works; or empty."""
        known = (r.capabilities for r in reversed(self.opens) if type(r.capabilities.get("conditional_put")) is bool)
        return next(known, {})

    @property
    def keyed(self) -> bool:
        """Whether records have keys of their own, as the store does not keep writers apart: slots may have several."""
        return self.capabilities.get("conditional_put") is False

    @cached_property
    def loose(self) -> bool:
        """Whether older slots may still get records: `keyed`, now or formerly."""
        return any(r.capabilities.get("conditional_put") is False for r in self.opens)

    @cached_property
    def aborted(self) -> frozenset[str]:
        """Attempts that may never commit."""
        return frozenset(a for r in self.records if isinstance(r, Retire) for a in r.attempts)

    def why_aborted(self, attempt: str) -> str:
        """The reason that the record gives which ended the attempt."""
        return next(r.reason for r in self.records if isinstance(r, Retire) and attempt in r.attempts)

    @cached_property
    def retired(self) -> frozenset[int]:
        """Seqs of the checkpoints that are no longer live."""
        return frozenset(s for r in self.records if isinstance(r, Retire) for s in r.seqs)

    @cached_property
    def _valid(self) -> tuple[list[Commit], list[Commit]]:
        """Commits, and those that came too late: after a newer writer's open record, or after their attempt's end.

        Where the store keeps writers apart the second list stays empty, since `append` refuses; elsewhere the fold does.
        """
        valid: list[Commit] = []
        late: list[Commit] = []
        epoch, aborted = 0, set[str]()
        for record in self.records:
            if isinstance(record, Open):
                epoch = max(epoch, record.epoch)
            elif isinstance(record, Retire):
                aborted.update(record.attempts)
            elif isinstance(record, Commit):
                (late if record.epoch < epoch or record.attempt in aborted else valid).append(record)
        return valid, late

    @property
    def commits(self) -> list[Commit]:
        """All checkpoints in log order, those that are no longer live too."""
        return self._valid[0]

    @property
    def fenced(self) -> list[Commit]:
        """Commit records that never counted: their writer had been replaced, or their attempt given up."""
        return self._valid[1]

    @cached_property
    def checkpoints(self) -> list[Commit]:
        """The live checkpoints in log order."""
        return [c for c in self.commits if c.seq not in self.retired]

    @cached_property
    def tags(self) -> dict[str, int]:
        """Name to seq, of live checkpoints."""
        live = {c.seq for c in self.checkpoints}
        names: dict[str, int | None] = {r.name: r.target for r in self.records if isinstance(r, Tag)}
        return {name: seq for name, seq in names.items() if seq is not None and seq in live}

    def lineage(self) -> frozenset[int]:
        """Seqs of the newest checkpoint and of all that it descends from. A live one that is not in it is abandoned."""
        if not self.checkpoints:
            return frozenset()
        parents = {c.seq: c.parent for c in self.commits}
        out: set[int] = set()
        seq: int | None = self.checkpoints[-1].seq
        while seq is not None and seq not in out:
            out.add(seq)
            seq = parents.get(seq)
        return frozenset(out)

    # ---- choosing one -----------------------------------------------------------------------------------------------

    def newest(self) -> Commit:
        """The live checkpoint of the highest seq. NotCommittedError when there is none.

        A damaged record above it is an error: it may be the newest, and to resume from an older one in silence loses work.
        """
        found = self.checkpoints
        above = [(seq, why) for seq, why in self.damaged if not found or seq >= found[-1].seq]
        if above:
            seq, why = above[-1]
            raise FormatError(
                f"{self.url}: log record {seq} cannot be read, and it may be the newest checkpoint ({why}); "
                "name a step to restore an older one",
                key=keys.record(seq),
            ) from why
        if not found:
            raise NotCommittedError(f"no committed checkpoint under {self.url}", url=self.url)
        return found[-1]

    def at(self, step: int) -> Commit:
        """The newest live checkpoint of that step. NotCommittedError when there is none."""
        found = [c for c in self.checkpoints if c.step == step]
        if not found:
            have = ", ".join(str(c.step) for c in self.checkpoints[-10:]) or "none"
            raise NotCommittedError(
                f"step {step} is not committed under {self.url}; the newest committed steps are: {have}",
                url=self.url,
                step=step,
            )
        if len(found) > 1:
            others = ", ".join(f"{c.step}@{c.seq}" for c in found[:-1])
            logger.warning("step %d was saved %d times: taking %d@%d, not %s",
                           step, len(found), step, found[-1].seq, others)  # fmt: skip
        return found[-1]

    def find(self, which: int | str | None) -> Commit:
        """The live checkpoint that is meant. NotCommittedError when there is none.

        Args:
            which: None: the newest. A step, as a number or as text. "step@seq": one exactly. Else a tag.
        """
        if which is None:
            return self.newest()
        if type(which) is int:
            return self.at(which)
        text = str(which)
        step, at, seq = text.partition("@")
        if step.isascii() and step.isdigit() and not at:
            return self.at(int(step))
        if step.isascii() and step.isdigit() and seq.isascii() and seq.isdigit():
            found = [c for c in self.checkpoints if (c.step, c.seq) == (int(step), int(seq))]
            if not found:
                gone = " (it was removed)" if int(seq) in self.retired else ""
                raise NotCommittedError(f"{text} is no checkpoint under {self.url}{gone}", url=self.url)
            return found[0]
        if not is_tag(text):
            raise UsageError(f"{text[:80]!r} names no checkpoint: give a step, step@seq, or a tag")
        if text not in self.tags:
            have = ", ".join(sorted(self.tags)) or "none"
            raise NotCommittedError(f"no checkpoint under {self.url} has the tag {text!r}; tags: {have}", url=self.url)
        return next(c for c in self.checkpoints if c.seq == self.tags[text])

    # ---- growing ----------------------------------------------------------------------------------------------------

    def extended(self, read: Sequence[tuple[int, Record | ObjckptError]]) -> Log:
        """The log with more slots, each with its record or the reason why it cannot be read."""
        records = [r for _, r in read if isinstance(r, Record)]
        joined = (*self.records, *sorted(records, key=place))
        if self.records and records and place(joined[len(self.records)]) < place(self.records[-1]):
            joined = tuple(sorted(joined, key=place))
        damaged = [(seq, e) for seq, e in read if isinstance(e, ObjckptError)]
        return replace(
            self,
            records=joined,
            damaged=tuple(sorted((*self.damaged, *damaged), key=lambda pair: pair[0])),
            next_seq=max([self.next_seq - 1, *(seq for seq, _ in read)]) + 1,
        )

    def before(self, record: Record) -> Log:
        """The log up to a record."""
        records = tuple(r for r in self.records if place(r) < place(record))
        return Log(self.url, records, tuple(pair for pair in self.damaged if pair[0] < record.seq), record.seq)


def place(record: Record) -> tuple[int, bool, int, bytes]:
    """What the log is sorted by. In a slot with several records those that retire come first: a commit of an attempt that
    is given up in the same slot does not count, as the attempt's data may be gone already.
    """
    return record.seq, not isinstance(record, Retire), record.epoch, record.write_id
