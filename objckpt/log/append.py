"""Appending to the log, and the fencing of writers that were replaced.

Records lie at `log/<seq>.msgpack`, each created with `If-None-Match: *`. A lost answer and a lost race look alike (412
after a retry), so whoever gets anything but a plain success reads the slot and compares write ids. Only `append` repeats
such a PUT; no layer below does. A success is read back too: stores exist that ignore the header and answer 200 to all.
"""

from __future__ import annotations

import logging
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
from objckpt.log.read import read_record
from objckpt.store import Store

logger = logging.getLogger("objckpt")
_jitter = random.Random()  # of our own: the training's random numbers stay as they are
R = TypeVar("R", bound=Record)


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
            there = read_record(store, seq)
        except NotFoundError:
            there = None
        except StoreError as err:
            there, unclear = None, err
        if isinstance(there, Record) and there.write_id == record.write_id:
            return record, log.extended([(seq, record)])
        if there is not None:
            log = log.extended([(seq, there)])
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
        if not isinstance(record, (Open, Commit)):
            continue  # of the command line: it removes and names checkpoints beside a running job
        if record.epoch > epoch or (record.epoch == epoch and record.session != session):
            raise WriterFencedError(
                f"{log.url}: this writer (epoch {epoch}) was replaced by session {record.session} on host {record.host} "
                f"(epoch {record.epoch}); its checkpoint was not committed. Stop this job, or the other one",
                epoch=epoch,
                by=record.session,
            )
