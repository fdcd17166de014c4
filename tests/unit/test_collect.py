"""Retention and collection: what goes, what never does, and that what cannot be read stops them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import pytest
from support.log_run import Run
from support.memory_store import MemoryBucket, MemoryStore, MemoryUploads

from objckpt import SaveOptions, collect
from objckpt.collect import Author, plan_collection, superseded
from objckpt.errors import (
    AccessError,
    ConnectError,
    IntegrityError,
    NotCommittedError,
    ObjckptError,
    StoreError,
    UsageError,
    WriterFencedError,
)
from objckpt.format import checksums, keys
from objckpt.format.records import Commit
from objckpt.log import Log, append, read_log
from objckpt.save.commit import index_object
from objckpt.store import ObjectInfo, UploadInfo

PERSON = Author(session="9" * 26)
NOW_S = 1_000_000.0


def keep(
    store: MemoryStore, keep_last: int | None, keep_every: int | None = None, resumed: int | None = None
) -> list[int]:
    """The steps that are left after retention."""
    log = read_log(store)
    gone = superseded(log, keep_last=keep_last, keep_every=keep_every, resumed=resumed)
    return [c.step for c in log.checkpoints if c.seq not in gone]


def there(store: MemoryStore) -> set[str]:
    """The attempts of which something is stored."""
    return {str(collect.attempt_of(info.key)) for info in store.list("data/")}


def clean(store: MemoryStore, **options: object) -> collect.Report:
    return collect.collect(store, author=PERSON, **options)[0]  # type: ignore[arg-type]


def remove(store: MemoryStore, *seqs: int, author: Author = PERSON) -> Log:
    def choose(log: Log) -> collect.Choice:
        return [c.seq for c in log.checkpoints if c.seq in seqs], []

    return collect.retire(store, read_log(store), choose, author=author, reason="test", deadline_s=5)[1]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryBucket(), "s3://bucket/run1")


# ---- retention -----------------------------------------------------------------------------------------------------


def test_e098_the_last_ones_in_log_order_stay_whatever_their_steps(store: MemoryStore) -> None:
    run = Run(store)
    parent = None
    for step in (900, 1000, 9000, 10000):
        parent = run.save(step, parent).seq
    assert keep(store, 2) == [9000, 10000]
    assert keep(store, 4) == keep(store, 5) == keep(store, None) == [900, 1000, 9000, 10000]
    again = Run(store, 1)
    again.save(950, parent)
    assert keep(store, 2, resumed=1) == [900, 10000, 950]


@pytest.mark.parametrize("wrong", [-1, 0, "3", 1.0, True])
@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_e101_values_that_mean_nothing_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=name):
        SaveOptions(**{"keep_last": 1} | {name: wrong})  # type: ignore[arg-type]


def test_keep_every_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="give keep_last, too"):
        SaveOptions(keep_every=10)


def test_keep_every_spares_the_steps_that_it_divides(store: MemoryStore) -> None:
    run, parent = Run(store), None
    for step in range(1, 10):
        parent = run.save(step, parent).seq
    assert keep(store, 1, 4) == [4, 8, 9]


def test_e100_tagged_ones_stay_also_those_tagged_in_the_last_moment(store: MemoryStore) -> None:
    run, parent, seqs = Run(store), None, {}
    for step in range(1, 10):
        parent = seqs[step] = run.save(step, parent).seq
    early = read_log(store)
    collect.tag(store, early, "best", seqs[3], author=PERSON, deadline_s=5)
    assert keep(store, 1) == [3, 9]
    record, log = collect.retire(
        store, early, lambda log: (superseded(log, keep_last=1), []), author=PERSON, reason="", deadline_s=5
    )
    assert record is not None and [c.step for c in log.checkpoints] == [3, 9]


def test_e103_a_run_started_anew_by_mistake_does_not_eat_the_one_before(store: MemoryStore) -> None:
    old, parent = Run(store), None
    for step in (500, 1000):
        parent = old.save(step, parent).seq
    new = Run(store, 1)
    first = new.save(10)
    assert keep(store, 1) == [500, 1000, 10]
    second = new.save(20, first.seq)
    assert keep(store, 1) == [500, 1000, 20]
    new.save(600, second.seq)
    assert keep(store, 1) == [1000, 600]
    assert read_log(store).newest().step == 600


def test_abandoned_checkpoints_of_the_same_run_count_like_others(store: MemoryStore) -> None:
    run = Run(store)
    first = run.save(100)
    run.save(300, run.save(200, first.seq).seq)
    again = Run(store, 1)
    again.save(150, first.seq)
    assert keep(store, 1, resumed=first.seq) == [100, 150]


def test_nothing_goes_when_a_record_cannot_be_read(store: MemoryStore) -> None:
    run = Run(store)
    last = run.save(2, run.save(1).seq)
    store.put(keys.record(last.seq), b"garbage")
    for call in (lambda: keep(store, 1), lambda: clean(store), lambda: clean(store, dry_run=True)):
        with pytest.raises(IntegrityError, match=f"record {last.seq} cannot be read"):
            call()
    assert len(there(store)) == 2


# ---- the record ----------------------------------------------------------------------------------------------------


def test_a_replaced_writer_retires_nothing(store: MemoryStore) -> None:
    run = Run(store)
    first = run.save(1)
    run.save(2, first.seq)
    Run(store, 1)
    with pytest.raises(WriterFencedError):
        remove(store, first.seq, author=Author(session=run.writer.session, epoch=run.writer.epoch))
    assert [c.step for c in read_log(store).checkpoints] == [1, 2]


def test_a_person_replaces_nobody(store: MemoryStore) -> None:
    run = Run(store)
    first = run.save(1)
    run.save(2, first.seq)
    remove(store, first.seq)
    collect.tag(store, read_log(store), "best", 2, author=PERSON, deadline_s=5)
    run.save(3, 2)
    assert [c.step for c in read_log(store).checkpoints] == [2, 3]


def test_nothing_to_retire_writes_nothing(store: MemoryStore) -> None:
    run = Run(store)
    run.save(1)
    before = len(store.list("log/"))
    record, log = collect.retire(store, read_log(store), lambda log: ([], []), author=PERSON, reason="", deadline_s=5)
    assert record is None and log.newest().step == 1 and len(store.list("log/")) == before


@pytest.mark.parametrize("name", ["", "5", "5@2", "-x", "a b", "a/b", "a" * 65, "ä"])
def test_names_that_are_none(store: MemoryStore, name: str) -> None:
    seq = Run(store).save(1).seq
    with pytest.raises(UsageError, match="not a tag"):
        collect.tag(store, read_log(store), name, seq, author=PERSON, deadline_s=5)


def test_tags_of_what_is_not_there(store: MemoryStore) -> None:
    run = Run(store)
    first = run.save(1)
    run.save(2, first.seq)
    old = read_log(store)
    remove(store, first.seq)
    with pytest.raises(NotCommittedError, match="not there any more"):
        collect.tag(store, old, "best", first.seq, author=PERSON, deadline_s=5)
    with pytest.raises(NotCommittedError, match="no tag 'best'"):
        collect.tag(store, old, "best", None, author=PERSON, deadline_s=5)


def test_e100_two_prune_at_once_and_nobody_fails(store: MemoryStore) -> None:
    """Never is there no checkpoint, and nobody trips over what the other has deleted."""
    run, parent = Run(store), None
    best = run.save(3).seq
    collect.tag(store, read_log(store), "best", best, author=PERSON, deadline_s=5)
    failures: list[BaseException] = []
    fewest = 99

    def prune(n: int) -> None:
        try:
            author = Author(session=f"{n:026d}")
            record, log = collect.retire(
                store, Log(store.url) if n else read_log(store), lambda log: (superseded(log, keep_last=1), []),
                author=author, reason="", deadline_s=20,
            )  # fmt: skip
            gone = record.seqs if record else []
            collect.delete_attempts(store, log, [c.attempt for c in log.commits if c.seq in gone])
            collect.collect(store, author=author)
        except BaseException as err:
            failures.append(err)

    for round_ in range(30):
        parent = run.save(10 + round_, parent).seq
        both = [threading.Thread(target=prune, args=(n,)) for n in (0, 1)]
        for thread in both:
            thread.start()
        while any(thread.is_alive() for thread in both):
            fewest = min(fewest, len(read_log(store).checkpoints))
        assert not failures
        log = read_log(store)
        assert [c.step for c in log.checkpoints] == [3, 10 + round_]
        assert there(store) == {c.attempt for c in log.checkpoints}
    assert fewest >= 1


# ---- what a collection takes ---------------------------------------------------------------------------------------


def plan(
    log: Log, objects: Iterable[ObjectInfo] = (), uploads: Iterable[UploadInfo] = (), **options: object
) -> collect.Plan:
    given = {"now_s": NOW_S, "grace_s": 100.0} | options
    return plan_collection(log, list(objects), list(uploads), **given)  # type: ignore[arg-type]


def pack(attempt: str, age_s: float = 0.0, n: int = 0) -> ObjectInfo:
    return ObjectInfo(keys.pack(attempt, 0, n), 10, NOW_S - age_s)


def upload(attempt: str, age_s: float = 0.0, upload_id: str = "u") -> UploadInfo:
    return UploadInfo(keys.pack(attempt, 0, 7), upload_id, NOW_S - age_s)


def test_live_data_is_never_taken_however_old(store: MemoryStore) -> None:
    live = Run(store).save(1).attempt
    Run(store, 1)
    found = plan(read_log(store), [pack(live, 1e6)], [upload(live, 99)])
    assert found == collect.Plan()


def test_an_upload_begun_twice_goes_when_it_is_old(store: MemoryStore) -> None:
    live = Run(store).save(1).attempt
    assert plan(read_log(store), [pack(live)], [upload(live, 101)]).uploads == [upload(live, 101)]


def test_retired_data_goes_at_once(store: MemoryStore) -> None:
    run = Run(store)
    first = run.save(1)
    run.save(2, first.seq)
    remove(store, first.seq)
    assert plan(read_log(store), [pack(first.attempt)], [upload(first.attempt)]) == collect.Plan(
        objects=[pack(first.attempt)], uploads=[upload(first.attempt)]
    )


def test_fenced_attempts_go_at_once_and_current_ones_by_their_age(store: MemoryStore) -> None:
    fenced = Run(store).upload(1).attempt
    live = Run(store, 1)
    young, old = live.upload(2).attempt, live.upload(3).attempt
    objects = [pack(fenced), pack(young, 99), pack(old, 101)]
    found = plan(read_log(store), objects)
    assert found == collect.Plan(objects=[pack(fenced), pack(old, 101)], abort=[old], waiting=[young])
    spared = plan(read_log(store), objects, spare=live.writer.session)
    assert spared == collect.Plan(objects=[pack(fenced)], waiting=[young, old])


def test_any_part_of_an_attempt_is_a_sign_of_life(store: MemoryStore) -> None:
    at_work = Run(store).upload(1).attempt
    objects = [pack(at_work, 5000), pack(at_work, 50, n=1)]
    assert plan(read_log(store), objects).waiting == [at_work]
    assert plan(read_log(store), objects[:1], [upload(at_work, 50)]).waiting == [at_work]
    unknown_time = UploadInfo(keys.pack(at_work, 0, 7), "u", 0.0)
    assert plan(read_log(store), objects[:1], [unknown_time]).waiting == [at_work]
    assert plan(read_log(store), objects[:1], [upload(at_work, 500)]).abort == [at_work]


def test_what_the_log_does_not_explain_stays(store: MemoryStore) -> None:
    Run(store).save(1)
    stranger = keys.attempt(1, "Z" * 26, 1)
    names = ["data/readme.txt", "data/sub/x", keys.attempt_prefix(stranger) + "notes"]
    objects = [pack(stranger, 1e6), *(ObjectInfo(name, 1, 0.0) for name in names)]
    found = plan(read_log(store), objects, [upload(stranger, 1e6)])
    assert sorted(found.unknown) == sorted([*names, pack(stranger).key, upload(stranger).key])
    assert not found.objects and not found.uploads and not found.abort


def test_what_a_probe_left_behind_goes_by_its_age(store: MemoryStore) -> None:
    Run(store).save(1)
    young, old = (ObjectInfo(f"probe/x/{age}", 1, NOW_S - age) for age in (99, 101))
    stale = UploadInfo("probe/x/y", "u", NOW_S - 101)
    assert plan(read_log(store), [young, old], [stale]) == collect.Plan(objects=[old], uploads=[stale])
    store.put("probe/x/y", b"")
    assert [info.key for info in clean(store, grace_s=-1.0).deleted] == ["probe/x/y"]


def test_packs_that_a_later_checkpoint_refers_to_stay(store: MemoryStore) -> None:
    run = Run(store)
    first = run.save(1)
    shared = keys.pack(first.attempt, 0, 0)
    index = run.upload(2)

    def make(seq: int, log: Log) -> Commit:
        _, data = index_object(index)
        return Commit(
            seq=seq, write_id=write_id, epoch=1, session=run.writer.session, time_s=0.0, host="h", step=2,
            attempt=index.attempt, parent=first.seq, world_size=1, raw_bytes=0, stored_bytes=0, tensors=0,
            ranks=[(checksums.digest_hex(data), len(data))], signature=index.signature,
            foreign_packs=[shared],
        )  # fmt: skip

    write_id = os.urandom(16)
    append(store, read_log(store), make, deadline_s=5)
    remove(store, first.seq)
    clean(store)
    assert [info.key for info in store.list(keys.attempt_prefix(first.attempt))] == [shared]
    collect.delete_attempts(store, read_log(store), [first.attempt, index.attempt])
    assert shared in {info.key for info in store.list("data/")} and there(store) == {first.attempt, index.attempt}
    remove(store, read_log(store).newest().seq)
    clean(store)
    assert not there(store)


def test_where_writers_are_not_kept_apart_fenced_attempts_have_to_be_old() -> None:
    """There a commit may turn up late in a slot before the open record that fences it."""
    store = MemoryStore(MemoryBucket(conditional=False), "s3://bucket/run1")
    fenced = Run(store, conditional=False)
    first = fenced.save(1)
    lost = fenced.upload(2).attempt
    second = Run(store, 1, conditional=False).save(3, first.seq)
    remove(store, first.seq)
    retired = first.attempt
    log = read_log(store)
    assert log.keyed
    young = plan(log, [pack(lost, 99), pack(retired)])
    assert young == collect.Plan(objects=[pack(retired)], waiting=[lost])
    assert plan(log, [pack(lost, 101)]) == collect.Plan(objects=[pack(lost, 101)])
    clean(store)
    assert there(store) == {lost, second.attempt}
    clean(store, grace_s=-1.0)
    assert there(store) == {second.attempt}


@pytest.mark.parametrize("_", range(6))  # whose record sorts first is chance
def test_retiring_where_writers_are_not_kept_apart_deletes_what_it_retired(_: int) -> None:
    """Two retire records in one slot: each one's author goes on to delete what its own names."""
    store = MemoryStore(MemoryBucket(conditional=False), "s3://bucket/run1")
    run, parent = Run(store, conditional=False), None
    for step in (1, 2, 3):
        parent = run.save(step, parent).seq
    known = read_log(store)
    choose = lambda log: (superseded(log, keep_last=1), [])  # noqa: E731
    original, others = MemoryStore.put, []

    def put(self: MemoryStore, key: str, data: bytes) -> None:
        if key.startswith("log/") and not others:
            others.append(None)
            others.append(collect.retire(store, known, choose, author=PERSON, reason="", deadline_s=5)[0])
        original(self, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "put", put)
        author = Author(session=run.writer.session, epoch=run.writer.epoch)
        record, log = collect.retire(store, known, choose, author=author, reason="", deadline_s=5)
    assert record is not None and others[1] is not None and record.seq == others[1].seq
    assert record.seqs == others[1].seqs and [c.step for c in log.checkpoints] == [3]


# ---- and how -------------------------------------------------------------------------------------------------------


def test_collect_leaves_exactly_what_is_needed_and_says_what_it_did(store: MemoryStore) -> None:
    one = Run(store)
    first = one.save(1)
    one.upload(2)
    two = Run(store, 1)
    two.save(3, first.seq)
    remove(store, first.seq)
    pending = two.upload(4).attempt
    dry = clean(store, dry_run=True)
    assert len(there(store)) == 4 and not dry.deleted and len(dry.plan.objects) == 4
    report = clean(store)
    assert {i.key for i in report.deleted} == {i.key for i in dry.plan.objects} and report.plan.waiting == [pending]
    assert there(store) == {read_log(store).newest().attempt, pending}


def test_an_old_attempt_is_aborted_in_the_log_before_its_data_goes(store: MemoryStore) -> None:
    run = Run(store)
    run.save(1)
    slow = run.upload(2)
    seen: list[tuple[str, str]] = []
    store.bucket.hook = lambda phase, operation, key: seen.append((operation, key))
    report = clean(store, grace_s=-1.0)
    store.bucket.hook = lambda phase, operation, key: None
    assert report.plan.abort == [slow.attempt] and slow.attempt in read_log(store).aborted
    operations = [operation for operation, _ in seen]
    assert operations.index("put_if_absent") < operations.index("delete")
    with pytest.raises(ObjckptError, match=r"abort|given up"):
        run.commit(slow, 1)
    assert [c.step for c in read_log(store).checkpoints] == [1]


def test_an_attempt_that_commits_in_the_last_moment_is_spared(store: MemoryStore) -> None:
    run = Run(store)
    run.save(1)
    slow = run.upload(2)

    def hook(phase: str, operation: str, key: str) -> None:
        if operation == "put_if_absent" and phase == "before":
            store.bucket.hook = lambda phase, operation, key: None
            run.commit(slow, 1)

    store.bucket.hook = hook
    report = clean(store, grace_s=-1.0)
    assert not report.deleted and [c.step for c in read_log(store).checkpoints] == [1, 2]
    assert slow.attempt in there(store) and not read_log(store).aborted


def test_a_session_that_opens_in_the_middle_is_no_riddle(store: MemoryStore) -> None:
    Run(store).save(1)

    def hook(phase: str, operation: str, key: str) -> None:
        if operation == "list_uploads" and phase == "before":
            store.bucket.hook = lambda phase, operation, key: None
            Run(store, 1).upload(2)

    store.bucket.hook = hook
    report = clean(store)
    assert report.plan == collect.Plan() and len(there(store)) == 2


@pytest.mark.parametrize("operation", ["list", "list_uploads", "get"])
def test_what_cannot_be_read_stops_it_before_anything_goes(store: MemoryStore, operation: str) -> None:
    Run(store).upload(1)
    Run(store, 1).save(2)

    def hook(phase: str, what: str, key: str) -> None:
        if what == operation and phase == "before":
            raise ConnectError("the store is away")

    store.bucket.hook = hook
    with pytest.raises(ConnectError):
        clean(store)
    store.bucket.hook = lambda phase, operation, key: None
    assert len(there(store)) == 2
    assert len(clean(store).deleted) == 2


class Locked(MemoryStore):
    """Refuses to delete packs: each by itself, or the whole request."""

    whole = False

    def delete(self, keys_: Iterable[str]) -> list[tuple[str, StoreError]]:
        names = list(keys_)
        if self.whole:
            raise AccessError("AccessDenied", code="AccessDenied", status=403)
        locked = [key for key in names if keys.is_pack(key)]
        super().delete(key for key in names if key not in locked)
        return [(key, AccessError("locked", code="AccessDenied", status=403)) for key in locked]

    def abort_upload(self, key: str, upload_id: str) -> None:
        raise StoreError("held", status=409)


@pytest.mark.parametrize("whole", [False, True])
def test_what_the_store_refuses_to_delete_is_for_later(whole: bool) -> None:
    store = Locked(MemoryBucket(), "s3://bucket/run1")
    store.whole = whole
    stale = Run(store).upload(1).attempt
    Run(store, 1).save(2)
    store.bucket.uploads["u"] = ("run1/" + keys.pack(stale, 0, 1), time.time(), {})
    report = clean(store)
    assert [info.key.rsplit(".")[-1] for info in report.deleted] == ([] if whole else ["index"])
    assert {key for key, _ in report.later} >= {keys.pack(stale, 0, 0), keys.pack(stale, 0, 1)}
    assert stale in there(store)
    open_store = MemoryStore(store.bucket, "s3://bucket/run1")
    clean(open_store)
    assert stale not in there(open_store) and not store.bucket.uploads


@pytest.mark.parametrize("status", [403, 501])
def test_without_a_listing_of_uploads_what_is_dead_goes_and_nothing_is_given_up(status: int) -> None:
    class Closed(MemoryStore):
        def list_uploads(self, prefix: str = "") -> list[UploadInfo]:
            raise StoreError("no ListMultipartUploads for you", status=status)

    store = Closed(MemoryBucket(), "s3://bucket/run1")
    Run(store).upload(1)
    run = Run(store, 1)
    first = run.save(2)
    at_work = run.upload(3).attempt
    report = clean(store, grace_s=-1.0)
    assert report.unlisted is not None and report.plan.waiting == [at_work]
    assert there(store) == {first.attempt, at_work}
    assert not collect.delete_attempts(store, read_log(store), [at_work]).later and there(store) == {first.attempt}


def test_another_failure_of_a_delete_is_raised_and_the_next_one_goes_on(store: MemoryStore) -> None:
    Run(store).upload(1)
    Run(store, 1).save(2)

    def hook(phase: str, operation: str, key: str) -> None:
        if operation == "delete":
            raise ConnectError("the store is away")

    store.bucket.hook = hook
    with pytest.raises(ConnectError):
        clean(store)
    store.bucket.hook = lambda phase, operation, key: None
    assert len(clean(store).deleted) == 2


def test_a_neighbour_with_a_longer_name_is_another_place() -> None:
    bucket = MemoryBucket()
    mine, other = MemoryStore(bucket, "s3://bucket/run1"), MemoryStore(bucket, "s3://bucket/run10")
    for store in (mine, other):
        Run(store).upload(1)
        run = Run(store, 1)
        run.save(3, run.save(2).seq)
    before = {k: v for k, v in bucket.objects.items() if k.startswith("run10/")}
    remove(mine, 2)
    clean(mine)
    assert {k: v for k, v in bucket.objects.items() if k.startswith("run10/")} == before
    assert len(there(mine)) == 1 and len(there(other)) == 3


def test_only_the_named_attempt_goes(store: MemoryStore) -> None:
    """`…-0001` is a prefix of `…-00010` and of nothing that may be touched."""
    run = Run(store)
    run.saves = 999
    first = run.upload(1).attempt
    run.saves = 9999
    longer = run.upload(1).attempt
    assert longer.startswith(first)
    foreign = keys.attempt_prefix(first) + "notes.txt"
    store.put(foreign, b"somebody else's")
    collect.delete_attempts(store, read_log(store), [first])
    assert there(store) == {longer, "None"} and store.head(foreign)


def test_uploads_of_dead_attempts_are_aborted(store: MemoryStore) -> None:
    import asyncio

    dead = Run(store).upload(1).attempt
    asyncio.run(MemoryUploads(store.bucket, store.url).create(keys.pack(dead, 0, 1)))
    Run(store, 1)
    assert [u.key for u in clean(store).aborted] == [keys.pack(dead, 0, 1)]
    assert not store.bucket.uploads and not there(store)


def test_listings_that_lag_behind_do_no_harm() -> None:
    """With any lag only what is dead goes; with none at the end everything that is dead."""
    for lag in range(0, 40, 3):
        store = MemoryStore(MemoryBucket(), "s3://bucket/run1")
        one = Run(store)
        first = one.save(1)
        one.upload(2)
        two = Run(store, 1)
        second = two.save(3, first.seq)
        early = read_log(store)
        store.bucket.list_lag = lag
        collect.retire(store, early, lambda log, seq=first.seq: ([seq], []), author=PERSON, reason="", deadline_s=5)
        two.save(4, second.seq)
        clean(store)
        assert there(store) >= {c.attempt for c in read_log(store).checkpoints}
        store.bucket.list_lag = 0
        clean(store)
        assert there(store) == {c.attempt for c in read_log(store).checkpoints} and len(there(store)) == 2
