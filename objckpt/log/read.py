"""Reading the log: one listing, and the records that are not known yet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from objckpt import limits
from objckpt.errors import FormatError, IntegrityError, ObjckptError
from objckpt.format import keys
from objckpt.format.records import Record, decode
from objckpt.log.fold import Log
from objckpt.store import Store

_READERS = 16


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
        read = list(pool.map(lambda seq: read_record(store, seq), seqs))
    missing = sorted(set(range(log.next_seq, seqs[-1])) - set(seqs))
    gaps: list[tuple[int, Record | ObjckptError]] = [
        (seq, IntegrityError(f"{keys.record(seq)} is missing from {store.url}", key=keys.record(seq)))
        for seq in missing
    ]
    return log.extended(sorted([*zip(seqs, read, strict=True), *gaps], key=lambda pair: pair[0]))


def read_record(store: Store, seq: int) -> Record | ObjckptError:
    try:
        return decode(store.get(keys.record(seq), max_bytes=limits.MAX_RECORD_BYTES), seq)
    except (FormatError, IntegrityError) as err:
        return err
