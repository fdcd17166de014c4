"""The commit log: append, fold, fence.

Records lie at `log/<seq>.msgpack`, each created with `If-None-Match: *`. A lost answer and a lost race look alike (412
after a retry), so whoever gets anything but a plain success reads the slot and compares write ids. Only `append` repeats
such a PUT; no layer below does. A success is read back too: stores exist that ignore the header and answer 200 to all.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from objckpt import limits
from objckpt.errors import (
    AmbiguousWriteError,
    FormatError,
    IntegrityError,
    NotCommittedError,
    NotFoundError,
    ObjckptError,
    PreconditionFailedError,
    StoreError,
    WriterFencedError,
)
from objckpt.format import keys
from objckpt.format.records import Commit, Record, decode
from objckpt.store import Store

logger = logging.getLogger("objckpt")
_READERS = 16
_jitter = random.Random()  # of our own: the training's random numbers stay as they are
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Log:
    """The fold of a log. Immutable; `read_log(store, log)` gives a newer one."""

    url: str
    records: tuple[Record, ...] = ()
    damaged: tuple[tuple[int, ObjckptError], ...] = ()  # seq and why: records that are there but cannot be read
    next_seq: int = 0

    @property
    def epoch(self) -> int:
        """The highest epoch so far; 0 when nobody has written."""
        return max((r.epoch for r in self.records), default=0)

    @property
    def checkpoints(self) -> list[Commit]:
        """The live checkpoints in log order."""
        return [r for r in self.records if isinstance(r, Commit)]

    def newest(self) -> Commit:
        """The live checkpoint of the highest seq. NotCommittedError when there is none.

        A damaged record above it is an error: it may be the newest, and to resume from an older one in silence loses work.
        """
        found = self.checkpoints
        above = [(seq, why) for seq, why in self.damaged if not found or seq > found[-1].seq]
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
        return found[-1]

    def find(self, step: int | None) -> Commit:
        return self.newest() if step is None else self.at(step)

    def _with(self, read: Sequence[tuple[int, Record | ObjckptError]]) -> Log:
        records = [r for _, r in read if isinstance(r, Record)]
        damaged = [(seq, e) for seq, e in read if isinstance(e, ObjckptError)]
        return Log(
            self.url,
            (*self.records, *records),
            (*self.damaged, *damaged),
            max([self.next_seq - 1, *(seq for seq, _ in read)]) + 1,
        )


def read_log(store: Store, known: Log | None = None) -> Log:
    """The log as it is now. One LIST, and one small GET for each record that `known` lacks, in parallel.

    A failed LIST or GET raises: "cannot list" is never "no checkpoint". Records that are there but malformed, and gaps
    in the sequence, are kept in `damaged`, so that the others stay readable.
    """
    log = known or Log(store.url)
    after = keys.record(log.next_seq - 1) if log.next_seq else ""
    listed = (keys.record_seq(info.key) for info in store.list(keys.LOG, start_after=after))
    seqs = sorted(seq for seq in listed if seq is not None and seq >= log.next_seq)
    if not seqs:
        return log
    with ThreadPoolExecutor(min(_READERS, len(seqs)), "objckpt-log") as pool:
        read = list(pool.map(lambda seq: _read(store, seq), seqs))
    missing = sorted(set(range(log.next_seq, seqs[-1])) - set(seqs))
    gaps: list[tuple[int, Record | ObjckptError]] = [
        (seq, IntegrityError(f"{keys.record(seq)} is missing from {store.url}", key=keys.record(seq)))
        for seq in missing
    ]
    return log._with(sorted([*zip(seqs, read, strict=True), *gaps], key=lambda pair: pair[0]))


def _read(store: Store, seq: int) -> Record | ObjckptError:
    try:
        return decode(store.get(keys.record(seq), max_bytes=limits.MAX_RECORD_BYTES), seq)
    except (FormatError, IntegrityError) as err:
        return err


def append(store: Store, log: Log, make: Callable[[int, Log], R], *, deadline_s: float) -> tuple[R, Log]:
    """Append the record that `make(seq, log)` gives, at the first free slot. Blocks. Returns it and the log up to it.

    `make` is called anew for every slot, with the log up to that slot: it raises to refuse (`fence` does), and must keep
    the record's write id. After `deadline_s` seconds without a clear outcome AmbiguousWriteError is raised: the record
    may still appear.
    """
    end = time.monotonic() + deadline_s
    pause_s = 0.05
    while True:
        seq = log.next_seq
        record = make(seq, log)
        decode(record.encode(), seq)  # what no reader could read must not get into the log
        unclear: StoreError | None = None
        try:
            _create(store, keys.record(seq), record.encode())
        except (PreconditionFailedError, AmbiguousWriteError) as err:
            unclear = err
        try:
            there = _read(store, seq)
        except NotFoundError:
            there = None
        except StoreError as err:
            there, unclear = None, err
        if isinstance(there, Record) and there.write_id == record.write_id:
            return record, log._with([(seq, record)])
        if there is not None:
            log = log._with([(seq, there)])
            continue
        if time.monotonic() > end:
            raise AmbiguousWriteError(
                f"{keys.record(seq)}: no clear answer within {deadline_s:.0f} s; the record may or may not appear later",
                key=keys.record(seq),
            ) from unclear
        time.sleep(pause_s * _jitter.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, 5.0)


def _create(store: Store, key: str, data: bytes) -> None:
    try:
        store.put_if_absent(key, data)
    except StoreError as err:
        if err.context.get("code") != "NotImplemented":
            raise
        # A store without conditional writes: look first. Two writers at the same moment are told apart by the read-back.
        try:
            store.head(key)
        except NotFoundError:
            logger.warning("%s has no conditional writes: two jobs writing to it at once are not kept apart", store.url)
            store.put(key, data)


def fence(log: Log, epoch: int, session: str) -> None:
    """WriterFencedError when somebody has opened the log after the writer of `epoch` did."""
    for record in log.records:
        if record.epoch > epoch or (record.epoch == epoch and record.session != session):
            raise WriterFencedError(
                f"{log.url}: this writer (epoch {epoch}) was replaced by session {record.session} on host {record.host} "
                f"(epoch {record.epoch}); its checkpoint was not committed. Stop this job, or the other one",
                epoch=epoch,
                by=record.session,
            )
