"""Appending to the log, and the fencing of writers that were replaced.

Records lie at `log/<seq>.msgpack`, each created with `If-None-Match: *`. A lost answer and a lost race look alike (412
after a retry), so whoever gets anything but a plain success reads the slot and compares write ids. Only `append` repeats
such a PUT; no layer below does. A success is read back too: stores exist that ignore the header and answer 200 to all.

Where the store is known to do that (`Log.keyed`), epoch and write id are part of the key: nothing is ever overwritten, and
all readers see the same order. But two writers that append at the same moment learn of each other only by reading again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from objckpt.errors import (
    AmbiguousWriteError,
    NotFoundError,
    PreconditionFailedError,
    StoreError,
    WriterFencedError,
)
from objckpt.format import keys
from objckpt.format.records import Commit, Open, Record, decode
from objckpt.log.fold import Log
from objckpt.log.read import read_log, read_record
from objckpt.store import Store

_jitter = random.Random()  # of our own: the training's random numbers stay as they are
R = TypeVar("R", bound=Record)


def append(
    store: Store, log: Log, make: Callable[[int, Log], R], *, deadline_s: float, keyed: bool | None = None
) -> tuple[R, Log]:
    """Append the record that `make(seq, log)` gives, at the first free slot. Blocks. Returns it and the log with it.

    `make` is called anew for every slot, with the log up to that slot: it raises to refuse (`fence` does), and must keep
    the record's write id. After `deadline_s` seconds without a clear outcome AmbiguousWriteError is raised: the record
    may still appear.

    Args:
        keyed: the store does not keep writers apart. None: as the log says.
    """
    if log.keyed if keyed is None else keyed:
        return _append_keyed(store, log, make, deadline_s)
    end = time.monotonic() + deadline_s
    pause_s = 0.05
    while True:
        seq = log.next_seq
        name = keys.RecordName(seq)
        record = make(seq, log)
        decode(record.encode(), seq, name)  # what no reader could read must not get into the log
        unclear: StoreError | None = None
        try:
            store.put_if_absent(name.key, record.encode())
        except (PreconditionFailedError, AmbiguousWriteError) as err:
            unclear = err
        try:
            there = read_record(store, name)
        except NotFoundError:
            there = None
        except StoreError as err:
            there, unclear = None, err
        if isinstance(there, Record) and there.write_id == record.write_id:
            return record, log.extended([(seq, record)])
        if there is not None:
            log = log.extended([(seq, there)])
            continue
        pause_s = _pause(pause_s, end, deadline_s, name, unclear)


def _append_keyed(store: Store, log: Log, make: Callable[[int, Log], R], deadline_s: float) -> tuple[R, Log]:
    """The name is nobody else's, so nothing can be overwritten, and the PUT may be repeated. But others may have written
    to the same slot, and also to earlier ones: the log is read again, and `make` may refuse what it did not know before.
    """
    end = time.monotonic() + deadline_s
    log = read_log(store, log)
    seq = log.next_seq
    record = make(seq, log)
    name = keys.RecordName(seq, record.epoch, record.write_id)
    decode(record.encode(), seq, name)
    unclear: StoreError | None = None
    try:
        store.put(name.key, record.encode())
    except StoreError as err:
        if 400 <= (err.context.get("status") or 0) < 500:
            raise
        unclear = err
    pause_s = 0.05
    while True:
        try:
            log = read_log(store, log)
        except StoreError as err:
            unclear = err
        else:
            if any(r.seq == seq and r.write_id == record.write_id for r in log.records):
                make(seq, log.before(record))
                return record, log
        pause_s = _pause(pause_s, end, deadline_s, name, unclear)


def _pause(pause_s: float, end: float, deadline_s: float, name: keys.RecordName, unclear: StoreError | None) -> float:
    """Sleep before the next try; returns the pause after that. AmbiguousWriteError when the time is over."""
    if time.monotonic() > end:
        raise AmbiguousWriteError(
            f"{name.key}: no clear answer within {deadline_s:.0f} s; the record may or may not appear later",
            key=name.key,
        ) from unclear
    time.sleep(pause_s * _jitter.uniform(0.5, 1.5))
    return min(pause_s * 2, 5.0)


def fence(log: Log, epoch: int, session: str) -> None:
    """WriterFencedError when somebody has opened the log after the writer of `epoch` did."""
    for record in log.records:
        if not isinstance(record, (Open, Commit)):
            continue  # of the command line: it removes and names checkpoints beside a running job
        if record.epoch > epoch or (record.epoch == epoch and record.session != session):
            raise WriterFencedError(
                f"{log.url}: this writer (epoch {epoch}) was replaced by session {record.session} on host {record.host} "
                f"(epoch {record.epoch}); its checkpoint was not committed. Stop this job, or the other one",
                epoch=epoch,
                by=record.session,
            )
