"""Retention and collection: which checkpoints go, and which objects nobody needs any more.

A checkpoint goes in two steps: a `retire` record takes it out of the log, then its objects are deleted. What is deleted
rests only on facts that no later record can undo, so that neither a stale listing nor a second collector can do harm:

* a checkpoint named by a retire record is not live, and never will be again;
* an attempt named by a retire record can never commit;
* an attempt of a session of a lower epoch than the log's can never commit: the fold ignores it.

Any other attempt may still commit. It has to be old, and is aborted in the log before its data goes. In a log whose store
does not keep writers apart (`Log.loose`) the last fact does not hold: a record may turn up late, before the open record
that fences it. There such attempts have to be old, too.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from objckpt import limits
from objckpt.errors import IntegrityError, NotCommittedError, StoreError, UsageError
from objckpt.format import keys
from objckpt.format.records import WRITE_ID_BYTES, Commit, Retire, Tag, is_tag
from objckpt.log import Log, append, fence, read_log
from objckpt.store import ObjectInfo, Store, UploadInfo
from objckpt.store.probe import PROBES

DAY_S = 86_400.0
_REFUSED = (403, 405, 409, 423)  # of one object, for now: no permission, or a lock on it
_NO_LISTING = (403, 405, 501)  # of uploads: it takes a permission of its own, and some servers do not know it

Choice = tuple[Sequence[int], Sequence[str]]  # seqs and attempts to retire


# ---- retention -----------------------------------------------------------------------------------------------------


def superseded(
    log: Log, *, keep_last: int | None, keep_every: int | None = None, resumed: int | None = None
) -> list[int]:
    """Pure: the seqs of the live checkpoints that retention takes away. In log order only; steps order nothing.

    The newest `keep_last` stay, and beside them every step that `keep_every` divides, what has a tag, the checkpoint of
    seq `resumed`, and higher steps of another run: a training that was started again from nothing, by mistake perhaps,
    does not eat the one before it until it has come as far.

    Raises IntegrityError for a log with damaged records: they may hold tags, and what is the newest is not certain.
    """
    require_sound(log)
    live = log.checkpoints
    if keep_last is None or len(live) <= keep_last:
        return []
    newest, root = live[-1], _roots(log.commits)
    kept = {c.seq for c in live[-keep_last:]} | {newest.seq, resumed} | set(log.tags.values())

    def stays(c: Commit) -> bool:
        other_run = root[c.seq] != root[newest.seq]
        every = keep_every is not None and c.step % keep_every == 0
        return c.seq in kept or every or (other_run and c.step > newest.step)

    return [c.seq for c in live if not stays(c)]


def _roots(commits: Iterable[Commit]) -> dict[int, int]:
    """For each commit the first one of its run: the end of the chain of parents."""
    root: dict[int, int] = {}
    for c in commits:
        root[c.seq] = c.seq if c.parent is None else root.get(c.parent, c.seq)
    return root


def require_sound(log: Log) -> None:
    """IntegrityError when a record cannot be read: nothing may be deleted then, it may say that the data is needed."""
    if log.damaged:
        seq, why = log.damaged[-1]
        raise IntegrityError(
            f"{log.url}: nothing is removed, as log record {seq} cannot be read and may name what is needed: {why}",
            key=keys.record(seq),
        ) from why


# ---- the record ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Author:
    """Who retires. `epoch`: of a training's writer, which may have been replaced; None: a person, whom nobody replaces."""

    session: str
    epoch: int | None = None


def retire(
    store: Store, log: Log, choose: Callable[[Log], Choice], *, author: Author, reason: str, deadline_s: float
) -> tuple[Retire | None, Log]:
    """Append a retire record of what `choose(log)` names; none, and None, when that is nothing. Blocks.

    `choose` is asked again with a newer log when somebody else was faster; it may raise to refuse. Raises as `append`
    does; WriterFencedError for a replaced writer.
    """
    stamp = _stamp(author)
    made: dict[int, Retire] = {}

    def make(seq: int, log: Log) -> Retire:
        if seq in made:  # it may be there already, and it holds then, whatever has turned up beside it
            return made[seq]
        if author.epoch is not None:
            fence(log, author.epoch, author.session)
        seqs, attempts = choose(log)
        if not seqs and not attempts:
            raise _NothingToDo(log)
        made[seq] = Retire(
            seq=seq,
            epoch=author.epoch or max(1, log.epoch),
            seqs=list(seqs),
            attempts=list(attempts),
            reason=reason,
            **stamp,
        )
        return made[seq]

    try:
        return append(store, log, make, deadline_s=deadline_s)
    except _NothingToDo as nothing:
        return None, nothing.log


def tag(store: Store, log: Log, name: str, target: int | None, *, author: Author, deadline_s: float) -> tuple[Tag, Log]:
    """Append a tag record: `name` is the checkpoint of seq `target` from now on; None takes the name away. Blocks.

    Raises as `append` does; UsageError for a text that is no name; NotCommittedError when the checkpoint, or the name to
    be taken away, is not there at that moment.
    """
    if not is_tag(name):
        raise UsageError(f"not a tag: {name!r} (a letter, then at most 63 letters, digits, '.', '_' and '-')")
    stamp = _stamp(author)

    def make(seq: int, log: Log) -> Tag:
        if target is None and name not in log.tags:
            raise NotCommittedError(f"there is no tag {name!r} under {log.url}", url=log.url)
        if target is not None and all(c.seq != target for c in log.checkpoints):
            raise NotCommittedError(
                f"the checkpoint of seq {target} is not there any more under {log.url}", url=log.url
            )
        return Tag(seq=seq, epoch=author.epoch or max(1, log.epoch), name=name, target=target, **stamp)

    return append(store, log, make, deadline_s=deadline_s)


def _stamp(author: Author) -> dict[str, Any]:
    """What a record has that does not depend on its slot."""
    write_id = os.urandom(WRITE_ID_BYTES)
    return {"write_id": write_id, "session": author.session, "time_s": time.time(), "host": socket.gethostname()}


def new_session() -> str:
    """A ULID (github.com/ulid/spec): 48 bits of milliseconds, 80 random bits, in Crockford's base 32."""
    number = int(time.time() * 1000) << 80 | secrets.randbits(80)
    return "".join("0123456789ABCDEFGHJKMNPQRSTVWXYZ"[number >> shift & 31] for shift in range(125, -5, -5))


class _NothingToDo(Exception):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log


# ---- collection ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a collection does, and what it leaves. Attempts that are needed are not mentioned."""

    objects: list[ObjectInfo] = field(default_factory=list)  # to be deleted
    uploads: list[UploadInfo] = field(default_factory=list)  # to be aborted
    abort: list[str] = field(default_factory=list)  # attempts to be aborted in the log before their data goes
    waiting: list[str] = field(default_factory=list)  # attempts that may still commit
    unknown: list[str] = field(default_factory=list)  # keys that nothing in the log explains: they stay


@dataclass(frozen=True)
class Report:
    """What a collection did. `later`: keys whose deletion the store refused, each with the refusal."""

    plan: Plan
    deleted: list[ObjectInfo] = field(default_factory=list)
    aborted: list[UploadInfo] = field(default_factory=list)
    later: list[tuple[str, StoreError]] = field(default_factory=list)
    unlisted: StoreError | None = None  # why unfinished uploads could not be listed: then none was aborted


def plan_collection(
    log: Log,
    objects: Iterable[ObjectInfo],
    uploads: Iterable[UploadInfo] | None,
    *,
    now_s: float,
    grace_s: float,
    spare: str | None = None,
) -> Plan:
    """Pure: what to do with the objects and unfinished uploads there, by a log that is not older than they are.

    `grace_s`: age, in seconds, above which an attempt that may still commit is given up; those of session `spare` never
    are. Without a listing of uploads (None) nobody knows whether an attempt is at work, and none is given up.

    Raises IntegrityError for a log with damaged records.
    """
    require_sound(log)
    plan = Plan()
    attempts: dict[str, tuple[list[ObjectInfo], list[UploadInfo]]] = defaultdict(lambda: ([], []))
    for info in objects:
        if (name := attempt_of(info.key)) is not None:
            attempts[name][0].append(info)
        elif not info.key.startswith(PROBES):
            plan.unknown.append(info.key)
        elif now_s - info.modified_s > grace_s:
            plan.objects.append(info)
    for upload in uploads or ():
        if (name := attempt_of(upload.key)) is not None:
            attempts[name][1].append(upload)
        elif not upload.key.startswith(PROBES):
            plan.unknown.append(upload.key)
        elif now_s - (upload.started_s or now_s) > grace_s:
            plan.uploads.append(upload)
    needed, packs = _needed(log)
    dead = log.aborted | {c.attempt for c in log.commits if c.seq in log.retired}
    epochs: dict[str, int] = {}
    for opened in log.opens:
        epochs[opened.session] = max(opened.epoch, epochs.get(opened.session, 0))
    for name, (found, unfinished) in sorted(attempts.items()):
        session = session_of(name)
        old = now_s - _last_sign(found, unfinished) > grace_s
        if name in needed:  # an upload beside its packs was begun twice, as the first answer was lost
            plan.uploads.extend(u for u in unfinished if now_s - (u.started_s or now_s) > grace_s)
            continue
        fenced = epochs.get(session, log.epoch) < log.epoch
        if name in dead or (fenced and (old or not log.loose)):
            pass
        elif session not in epochs:
            plan.unknown.extend([*(o.key for o in found), *(u.key for u in unfinished)])
            continue
        elif old and not fenced and session != spare and uploads is not None:
            plan.abort.append(name)
        else:
            plan.waiting.append(name)
            continue
        plan.objects.extend(info for info in found if info.key not in packs)
        plan.uploads.extend(unfinished)
    return plan


def _needed(log: Log) -> tuple[set[str], set[str]]:
    """The attempts of the live checkpoints, and the packs of other attempts that they refer to."""
    return {c.attempt for c in log.checkpoints}, {key for c in log.checkpoints for key in c.foreign_packs}


def _last_sign(objects: Iterable[ObjectInfo], uploads: Iterable[UploadInfo]) -> float:
    """When the attempt last gave a sign of life, by the store's clock; the end of time when an upload has no time."""
    return max([*(o.modified_s for o in objects), *(u.started_s or float("inf") for u in uploads)])


def collect(
    store: Store,
    log: Log | None = None,
    *,
    author: Author,
    grace_s: float = DAY_S,
    dry_run: bool = False,
    deadline_s: float | None = None,
) -> tuple[Report, Log]:
    """Delete what no live checkpoint needs and no attempt may need. Blocks. Returns what was done, and the log.

    `log`: what is known of it, to be read on from. A training's writer spares its own attempts, whatever their age.
    Anything that cannot be read raises before anything is deleted. Deletions that the store refuses are in the report;
    when it fails otherwise, that is raised, and the next collection goes on.
    """
    # First the listings: each attempt in them has its session's open record in the log that is read after them.
    objects = [*store.list(keys.DATA), *store.list(PROBES)]
    uploads, unlisted = _uploads(store, keys.DATA, PROBES)
    log = read_log(store, log)
    spare = author.session if author.epoch is not None else None
    plan = plan_collection(log, objects, uploads, now_s=time.time(), grace_s=grace_s, spare=spare)
    report = Report(plan, unlisted=unlisted)
    if dry_run:
        return report, log
    if plan.abort:

        def choose(log: Log) -> Choice:
            require_sound(log)
            committed = {c.attempt for c in log.commits}
            return [], [a for a in plan.abort if a not in committed and a not in log.aborted]

        deadline_s = deadline_s or store.options.retry_deadline_s
        _, log = retire(store, log, choose, author=author, reason="collected", deadline_s=deadline_s)
    live = {c.attempt for c in log.checkpoints}  # some may have committed meanwhile
    spared = {name for name in plan.abort if name in live or name not in log.aborted}
    _delete(store, report, plan.objects, plan.uploads, spared)
    return report, log


def _uploads(store: Store, *prefixes: str) -> tuple[list[UploadInfo] | None, StoreError | None]:
    """The unfinished uploads there; or None, and why they cannot be listed."""
    try:
        return [upload for prefix in prefixes for upload in store.list_uploads(prefix)], None
    except StoreError as err:
        if err.context.get("status") not in _NO_LISTING and err.context.get("code") != "NotImplemented":
            raise
        return None, err


def delete_attempts(store: Store, log: Log, attempts: Iterable[str]) -> Report:
    """Delete the data of attempts that are retired, or of which the caller knows that they cannot commit. Blocks.

    Never what a live checkpoint of `log` needs. Raises as `collect` does.
    """
    require_sound(log)
    needed, packs = _needed(log)
    report = Report(Plan())
    for name in attempts:
        if name in needed:
            continue
        prefix = keys.attempt_prefix(name)
        found = [info for info in store.list(prefix) if attempt_of(info.key) == name and info.key not in packs]
        unfinished = [u for u in _uploads(store, prefix)[0] or () if attempt_of(u.key) == name]
        report.plan.objects.extend(found)
        report.plan.uploads.extend(unfinished)
        _delete(store, report, found, unfinished)
    return report


def _delete(
    store: Store,
    report: Report,
    objects: Iterable[ObjectInfo],
    uploads: Iterable[UploadInfo],
    spared: Collection[str | None] = (),
) -> None:
    """Uploads first: one that is completed meanwhile leaves an object, which the next collection finds."""
    for upload in uploads:
        if attempt_of(upload.key) in spared:
            continue
        try:
            store.abort_upload(upload.key, upload.upload_id)
            report.aborted.append(upload)
        except StoreError as err:
            report.later.append((upload.key, _only_refused(err)))
    doomed = {info.key: info for info in objects if attempt_of(info.key) not in spared}
    order = list(doomed)
    for start in range(0, len(order), limits.MAX_DELETE_KEYS):
        batch = order[start : start + limits.MAX_DELETE_KEYS]
        try:
            refused = dict(store.delete(batch))
        except StoreError as err:  # some servers refuse the whole request where others name each key
            refused = dict.fromkeys(batch, _only_refused(err))
        report.later.extend(refused.items())
        report.deleted.extend(doomed[key] for key in batch if key not in refused)


def _only_refused(err: StoreError) -> StoreError:
    """The error of a store that refuses, which is no reason to stop; others are raised."""
    if err.context.get("status") not in _REFUSED:
        raise err
    return err


def attempt_of(key: str) -> str | None:
    """The attempt that has written an object of this key; None for keys of any other form."""
    ours = keys.is_pack(key) or keys.parse_index(key) is not None or keys.parse_failed(key) is not None
    return key.split("/")[1] if ours else None


def session_of(attempt: str) -> str:
    """The session in the name of an attempt."""
    return attempt.split("-")[1]
