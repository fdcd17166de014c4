"""Bundles of records: written by the training's writer from time to time, read before anything else of the log.

A bundle is a mere copy. Without it, or when it is damaged, the records themselves are read.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from objckpt import limits
from objckpt.errors import FormatError, IntegrityError, NotFoundError, ObjckptError
from objckpt.format import bundle, keys
from objckpt.format.records import Record, decode
from objckpt.log.fold import Log
from objckpt.store import Store

logger = logging.getLogger("objckpt")


def read_bundles(store: Store) -> list[tuple[int, Record | ObjckptError]]:
    """The records of all bundles from the first slot on, up to the first that is missing or damaged. One LIST, few GETs."""
    named: dict[tuple[int, int], list[keys.BundleName]] = {}
    for info in store.list(keys.BUNDLES):
        if (name := keys.parse_bundle(info.key)) is not None:
            named.setdefault((name.first, name.last - name.first + 1), []).append(name)
    wanted: list[keys.BundleName] = []
    while True:
        start = wanted[-1].last + 1 if wanted else 0
        found = (named.get((start, size), []) for size in bundle.SIZES)
        # Two of the same slots: one of them is wrong, and the records will tell.
        if not (good := [names[0] for names in found if len(names) == 1]):
            break
        wanted.append(good[0])
    if not wanted:
        return []
    out: list[tuple[int, Record | ObjckptError]] = []
    with ThreadPoolExecutor(min(limits.READERS, len(wanted)), "objckpt-log") as pool:
        for name, records in zip(wanted, pool.map(lambda name: _read(store, name), wanted), strict=True):
            if records is None:
                break
            out.extend(enumerate(records, name.first))
    return out


def _read(store: Store, name: keys.BundleName) -> list[Record | ObjckptError] | None:
    try:
        raw = bundle.decode(store.get(name.key, max_bytes=bundle.MAX_BYTES), name)
        return [decode(data, seq) for seq, data in enumerate(raw, name.first)]
    except (FormatError, IntegrityError, NotFoundError) as err:
        logger.warning("%s is not used; the records are read one by one: %s", name.key, err)
        return None


def write_bundles(store: Store, log: Log) -> Log:
    """Write the bundles that are due. Blocks. Returns the log, which knows of them; a failure is logged and tried later.

    Never in a log whose older slots may still get records.
    """
    large, small = bundle.SIZES
    try:
        while not log.loose:
            first, left = log.bundled, log.next_seq - log.bundled
            count = large if left >= large and first % large == 0 else small
            if left < count or not _write(store, log, first, count):
                break
            log = replace(log, bundled=first + count)
            if count == small and log.bundled % large == 0:
                _write(store, log, log.bundled - large, large)
    except ObjckptError as err:
        logger.debug("a bundle of records could not be written: %s", err)
    return log


def _write(store: Store, log: Log, first: int, count: int) -> bool:
    """Whether there could be such a bundle."""
    records = [r for r in log.records if first <= r.seq < first + count]
    if len(records) < count:  # a damaged one: it stays where everybody sees that it is
        return False
    with ThreadPoolExecutor(limits.READERS, "objckpt-log") as pool:
        raw = list(pool.map(lambda record: _raw(store, record), records))
    made = bundle.encode(first, raw)
    if made is not None:
        store.put(*made)
    return made is not None


def _raw(store: Store, record: Record) -> bytes:
    """The record's bytes as they are: a newer objckpt may have written fields into it that this one does not know."""
    data = store.get(keys.record(record.seq), max_bytes=limits.MAX_RECORD_BYTES)
    if decode(data, record.seq) != record:
        raise IntegrityError(f"{keys.record(record.seq)} has changed", key=keys.record(record.seq))
    return data
