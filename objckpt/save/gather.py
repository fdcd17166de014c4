"""A checkpoint of many ranks, without a collective: rank 0 sees by listing who has finished, the others by the log how it ended.

Every rank uploads its index last, under a name that carries its digest. A listed name is proof; a missing one only means
wait. Whoever waits too long gives the attempt up in the log: then it can never commit, and all ranks learn the same.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator

from objckpt import log as commit_log
from objckpt.errors import IntegrityError, ObjckptError, SaveError, StoreError, WriterFencedError
from objckpt.format import keys
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.limits import MAX_INDEX_BYTES
from objckpt.save.commit import LogWriter
from objckpt.store import Store

logger = logging.getLogger("objckpt")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.01, 2.0, 1.15
# Of all ranks together. S3 promises 5,500 reads a second of one prefix ("Optimizing Amazon S3 performance").
_LOOKS_PER_S = 2000
_SHOWN = 8
_jitter = random.Random()


def wait_for_ranks(store: Store, index: Index, deadline_s: float) -> tuple[list[tuple[str, int]], int]:
    """Block until every rank's index is listed. Returns digest and size of each, and the bytes of all packs.

    Raises:
        SaveError: a rank has failed, or has other values than rank 0 (named), or ranks are missing after `deadline_s`.
    """
    end = time.monotonic() + deadline_s
    for pause_s in _pauses(1):
        found: dict[int, tuple[keys.IndexName, int]] = {}
        packs = 0
        for info in store.list(keys.attempt_prefix(index.attempt)):
            if (rank := keys.parse_failed(info.key)) is not None:
                why = store.get(info.key, max_bytes=1 << 20).decode(errors="replace")
                raise SaveError(f"rank {rank} could not save its part: {why}", rank=rank)
            name = keys.parse_index(info.key)
            if name is None:
                packs += info.size if keys.is_pack(info.key) else 0
                continue
            if name.rank >= index.world_size or name.rank in found:
                raise SaveError(
                    f"{info.key}: an index of rank {name.rank} that this job of {index.world_size} ranks did not write: "
                    "two jobs save under this URL as one; give each its own",
                    rank=name.rank,
                )
            found[name.rank] = (name, info.size)
            if name.signature != index.signature:
                raise SaveError(_difference(store, index, info.key, name.rank, info.size), rank=name.rank)
        if len(found) == index.world_size:
            return [(found[rank][0].digest, found[rank][1]) for rank in range(index.world_size)], packs
        if time.monotonic() > end:
            late = [rank for rank in range(index.world_size) if rank not in found]
            raise SaveError(_overdue(late, index.world_size, deadline_s), ranks=late)
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def wait_for_outcome(writer: LogWriter, attempt: str, deadline_s: float, *, rank: int) -> Commit:
    """Block until rank 0 has committed the attempt; called on the other ranks.

    Raises:
        SaveError: rank 0, or another rank, has given the attempt up; or `deadline_s` is over, and this rank gives it up.
        WriterFencedError: another job has opened the log meanwhile.
    """
    end = time.monotonic() + deadline_s
    for pause_s in _pauses(writer.world_size):
        try:
            writer.log = log = commit_log.read_log(writer.store, writer.log)
        except StoreError as err:  # rank 0 may commit all the same: look again
            if time.monotonic() > end:
                raise SaveError(f"whether rank 0 has committed is not known: {err}") from err
            time.sleep(pause_s)
            continue
        found = next((c for c in log.commits if c.attempt == attempt), None)
        if found is not None:
            return found
        if attempt in log.aborted:
            raise SaveError(f"the ranks gave the attempt up: {log.why_aborted(attempt)}")
        mine = [r.epoch for r in log.opens if r.session == writer.session]
        if mine:
            writer.epoch = mine[-1]
            commit_log.fence(log, writer.epoch, writer.session)
        if time.monotonic() > end:
            return _give_up(writer, attempt, _why_late(writer, attempt, deadline_s), rank)
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def _why_late(writer: LogWriter, attempt: str, deadline_s: float) -> str:
    """Whom a rank other than 0 has waited for in vain."""
    try:
        listed = [keys.parse_index(info.key) for info in writer.store.list(keys.attempt_prefix(attempt))]
    except ObjckptError:
        listed = []
    finished = {name.rank for name in listed if name is not None}
    late = [rank for rank in range(writer.world_size) if rank not in finished]
    if finished and late:
        return _overdue(late, writer.world_size, deadline_s)
    return f"rank 0 did not commit within {deadline_s:g} s"


def _give_up(writer: LogWriter, attempt: str, reason: str, rank: int) -> Commit:
    """End the attempt in the log, unless it has committed just now.

    Where the log does not keep writers apart a late record could undo a commit that rank 0 has told already; and before
    rank 0 has opened the log there is no epoch to write with. Then rank 0 is asked to give up by an object that it lists.
    """
    if not writer.epoch or writer.log.loose:
        with contextlib.suppress(ObjckptError):
            writer.store.put(keys.failed(attempt, rank), reason.encode()[:100_000])
        raise SaveError(reason)
    try:
        writer.retire([], [attempt], reason)
    except WriterFencedError:
        raise
    except ObjckptError as err:
        raise SaveError(f"{reason}; giving it up in the log failed too: {err}") from err
    found = next((c for c in writer.log.commits if c.attempt == attempt), None)
    if found is not None:
        return found
    raise SaveError(reason)


def abandon(writer: LogWriter, attempt: str, reason: str, rank: int, world_size: int) -> None:
    """Tell the other ranks that this one has failed: rank 0 by the log, another by an object that rank 0 lists."""
    if world_size == 1:
        return
    try:
        if rank == 0 and writer.epoch:
            writer.retire([], [attempt], reason[:2000])
        elif rank:
            writer.store.put(keys.failed(attempt, rank), reason.encode()[:100_000])
    except ObjckptError as err:
        logger.warning("the other ranks could not be told of the failure, and will wait for their deadline: %s", err)


def _difference(store: Store, index: Index, key: str, rank: int, size: int) -> str:
    try:
        other = Index.decode(store.get(key, max_bytes=min(size, MAX_INDEX_BYTES)), key).alike()
    except (ObjckptError, IntegrityError) as err:
        return f"rank {rank} has other values than rank 0 ({key} cannot be read: {err})"
    mine = index.alike()
    names = sorted({n for n in mine.keys() | other.keys() if mine.get(n) != other.get(n)})
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"rank {rank} and rank 0 differ in {shown}: what is not sharded, and how tensors are sharded, must be the same on "
        "all ranks; pass what belongs to a rank as per_rank={…}"
    )


def _overdue(late: list[int], world_size: int, deadline_s: float) -> str:
    shown = ", ".join(map(str, late[:_SHOWN])) + (f" and {len(late) - _SHOWN} more" if len(late) > _SHOWN else "")
    return (
        f"{'rank' if len(late) == 1 else 'ranks'} {shown} of {world_size} did not finish within {deadline_s:g} s of the "
        "others: dead, failed in save(), or slower than SaveOptions.rank_deadline_s allows"
    )


def _pauses(waiting: int) -> Iterator[float]:
    """Seconds to wait before each further look, without end, for one of the `waiting` ranks that look like this.

    About a seventh of the wait so far: what has taken long is not looked at often, and is seen soon after its end.
    """
    least_s = waiting / _LOOKS_PER_S
    pause_s = max(_FIRST_PAUSE_S, least_s)
    while True:
        yield pause_s * _jitter.uniform(0.5, 1.5)
        pause_s = min(pause_s * _GROWTH, max(_LONGEST_PAUSE_S, least_s))
