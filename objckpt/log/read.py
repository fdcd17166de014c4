"""Reading the log: one listing, and the records that are not known yet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from objckpt import limits
from objckpt.errors import FormatError, IntegrityError, ObjckptError
from objckpt.format import keys
from objckpt.format.records import Record, decode
from objckpt.log.bundles import read_bundles
from objckpt.log.fold import Log
from objckpt.store import Store


def read_log(store: Store, known: Log | None = None) -> Log:
    """The log as it is now. One LIST, and one small GET for each record that `known` lacks, in parallel. Without `known`
    first another LIST, and a GET for each bundle of records.

    A failed LIST or GET raises: "cannot list" is never "no checkpoint". Records that are there but malformed, and gaps
    in the sequence, are kept in `damaged`, so that the others stay readable.
    """
    log = known or Log(store.url)
    if not log.next_seq and (copied := read_bundles(store)):
        log = known = replace(log.extended(copied), bundled=len(copied))
    if log.loose:  # a late record may lie in any slot: all names are listed, and what was damaged is read again
        start, log = 0, replace(log, damaged=())
    else:
        start = log.next_seq
    after = keys.record(start - 1) if start else ""
    listed = [keys.parse_record(info.key) for info in store.list(keys.LOG, start_after=after)]
    slots = {r.seq for r in log.records}
    have = {(r.seq, r.write_id) for r in log.records}

    def is_new(name: keys.RecordName) -> bool:
        known = name.seq in slots if name.write_id is None else (name.seq, name.write_id) in have
        return name.seq >= start and not known

    names = [name for name in listed if name is not None and is_new(name)]
    slots.update(name.seq for name in names)
    missing = set(range(start, max(slots, default=-1) + 1)) - slots
    if not names and not missing:
        return known if known is not None and known.damaged == log.damaged else log
    gaps: list[tuple[int, Record | ObjckptError]] = [
        (seq, IntegrityError(f"{keys.record(seq)} is missing from {store.url}", key=keys.record(seq)))
        for seq in sorted(missing)
    ]
    with ThreadPoolExecutor(max(1, min(limits.READERS, len(names))), "objckpt-log") as pool:
        read = list(pool.map(lambda name: read_record(store, name), names))
    return log.extended([*zip((name.seq for name in names), read, strict=True), *gaps])


def read_record(store: Store, name: keys.RecordName) -> Record | ObjckptError:
    try:
        return decode(store.get(name.key, max_bytes=limits.MAX_RECORD_BYTES), name.seq, name)
    except (FormatError, IntegrityError) as err:
        return err
