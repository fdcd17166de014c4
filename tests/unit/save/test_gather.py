"""How the ranks of a save learn of each other: by listing and by the log, in every order of events."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.memory_store import MemoryBucket, MemoryStore

from objckpt.errors import ConnectError, SaveError, StoreError, WriterFencedError
from objckpt.format import checksums, keys, wire
from objckpt.format.index import Index
from objckpt.format.tables import ChunkTable
from objckpt.log import read_log
from objckpt.save import gather
from objckpt.save.commit import LogWriter, Sizes, index_object

SESSION, OTHER = f"{1:026d}", f"{2:026d}"
ATTEMPT = keys.attempt(7, SESSION, 1)
SAME = [("model/w", 1), ("step", 7)]
LONG_S = 60.0


def index(rank: int, replicated: list[tuple[str, int]] = SAME, size: int = 3) -> Index:
    packs = [(keys.pack(ATTEMPT, rank, 0), 100 + rank)]
    return Index(
        7,
        ATTEMPT,
        rank,
        size,
        packs,
        [],
        ChunkTable.from_rows([]),
        ["raw"],
        b"\x80" if not rank else None,
        wire.pack([list(row) for row in replicated]),
    )


def upload(store: MemoryStore, of: Index) -> tuple[str, int]:
    """A rank's part, the index last; its digest and size."""
    for key, size in of.packs:
        store.put(key, bytes(size))
    key, data = index_object(of)
    store.put(key, data)
    return checksums.digest_hex(data), len(data)


def writer(store: MemoryStore, session: str = SESSION) -> LogWriter:
    return LogWriter(store, session, 3, 5.0)


def commit(by: LogWriter, of: Index) -> object:
    ranks = [("0" * 32, 10)] * of.world_size
    return by.commit(of, ranks, None, None, Sizes(64, 64, 1))


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


def test_rank_0_waits_until_the_last_rank_is_listed() -> None:
    bucket = MemoryBucket()
    store, listings = MemoryStore(bucket), []
    expected = [upload(store, index(rank)) for rank in (0, 1)]

    def hook(phase: str, operation: str, key: str) -> None:
        if (phase, operation) == ("before", "list"):
            listings.append(key)
            if len(listings) == 3:
                expected.append(upload(store, index(2)))

    bucket.hook = hook
    found, packs = gather.wait_for_ranks(store, index(0), LONG_S)
    assert (found, packs) == (expected, 100 + 101 + 102)
    assert len(listings) >= 3


def test_rank_0_names_the_ranks_that_are_late() -> None:
    store = MemoryStore()
    upload(store, index(0))
    with pytest.raises(SaveError, match=r"^ranks 1, 2 of 3 did not finish within 0.1 s") as caught:
        gather.wait_for_ranks(store, index(0), 0.1)
    assert caught.value.context["ranks"] == [1, 2]
    upload(store, index(1))
    with pytest.raises(SaveError, match=r"^rank 2 of 3 did not finish within 0.1 s.*rank_deadline_s"):
        gather.wait_for_ranks(store, index(0), 0.1)


def test_a_list_of_late_ranks_stays_short() -> None:
    store = MemoryStore()
    upload(store, index(0, size=5000))
    with pytest.raises(SaveError, match=r"^ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4991 more of 5000") as caught:
        gather.wait_for_ranks(store, index(0, size=5000), 0.01)
    assert len(caught.value.message) < 300


def test_a_failed_rank_is_named_with_its_reason_at_once() -> None:
    store = MemoryStore()
    upload(store, index(0))
    gather.abandon(writer(store), ATTEMPT, "the disk is full", 2, 3)
    with pytest.raises(SaveError, match=r"^rank 2 could not save its part: the disk is full$") as caught:
        gather.wait_for_ranks(store, index(0), LONG_S)
    assert caught.value.context["rank"] == 2


def test_what_differs_is_named_at_once_though_others_are_late() -> None:
    store = MemoryStore()
    upload(store, index(0))
    upload(store, index(2, [("model/w", 1), ("step", 8), ("extra", 0)]))
    with pytest.raises(SaveError, match=r"^rank 2 and rank 0 differ in extra, step: .* per_rank=\{…\}$"):
        gather.wait_for_ranks(store, index(0), LONG_S)


def test_many_differences_are_counted() -> None:
    store = MemoryStore()
    upload(store, index(1, [(f"w{i:03d}", 1) for i in range(100)]))
    with pytest.raises(SaveError, match=r"differ in model/w, step, w000, w001, w002, w003, w004, w005 and 94 more:"):
        gather.wait_for_ranks(store, index(0), LONG_S)


def test_a_differing_index_that_cannot_be_read_is_told_all_the_same() -> None:
    store = MemoryStore()
    key, data = index_object(index(1, [("step", 8)]))
    store.put(key, data[:-3])
    with pytest.raises(SaveError, match=r"rank 1 has other values than rank 0 .*rank-00001.*cannot be read"):
        gather.wait_for_ranks(store, index(0), LONG_S)


@pytest.mark.parametrize("foreign", [index(5), replace(index(1), packs=[])], ids=["rank", "twice"])
def test_an_index_that_no_rank_of_this_job_wrote(foreign: Index) -> None:
    store = MemoryStore()
    for rank in range(2):
        upload(store, index(rank))
    upload(store, foreign)
    with pytest.raises(SaveError, match=rf"an index of rank {foreign.rank} that this job of 3 ranks did not write"):
        gather.wait_for_ranks(store, index(0), LONG_S)


def test_a_listing_that_fails_is_an_error_not_a_missing_rank() -> None:
    def hook(phase: str, operation: str, key: str) -> None:
        if operation == "list":
            raise ConnectError("no route")

    with pytest.raises(ConnectError):
        gather.wait_for_ranks(MemoryStore(MemoryBucket(hook)), index(0), LONG_S)


# ---- the other ranks -------------------------------------------------------------------------------------------------


def test_other_ranks_see_the_commit() -> None:
    store = MemoryStore()
    first = writer(store)
    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(gather.wait_for_outcome, writer(store), ATTEMPT, LONG_S, rank=1) for _ in range(2)]
        first.open({"conditional_put": True})
        record = commit(first, index(0))
        assert [outcome.result(20) for outcome in outcomes] == [record, record]
    assert read_log(store).aborted == frozenset()


def test_other_ranks_learn_why_rank_0_gave_up() -> None:
    store = MemoryStore()
    first = writer(store)
    first.open({"conditional_put": True})
    gather.abandon(first, ATTEMPT, "rank 2 of 3 did not finish", 0, 3)
    with pytest.raises(SaveError, match=r"^the ranks gave the attempt up: rank 2 of 3 did not finish$"):
        gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1)


def test_an_attempt_given_up_by_a_rank_can_never_commit() -> None:
    store = MemoryStore()
    first = writer(store)
    first.open({"conditional_put": True})
    upload(store, index(0))
    upload(store, index(1))
    upload(store, index(2))
    with pytest.raises(SaveError, match=r"^rank 0 did not commit within 0.1 s$"):
        gather.wait_for_outcome(writer(store), ATTEMPT, 0.1, rank=1)
    assert read_log(store).aborted == {ATTEMPT}
    with pytest.raises(SaveError, match=r"was given up: rank 0 did not commit within 0.1 s"):
        commit(first, index(0))  # it does not know yet
    with pytest.raises(SaveError, match="gave the attempt up"):
        gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1)  # and the third rank
    assert read_log(store).checkpoints == []
    later = index(0)
    later.attempt = keys.attempt(7, SESSION, 2)
    commit(first, later)
    assert [c.attempt for c in read_log(store).checkpoints] == [later.attempt]


def test_other_ranks_name_the_rank_that_is_late_too() -> None:
    """Their deadline may be over before rank 0's, which would tell."""
    store = MemoryStore()
    writer(store).open({"conditional_put": True})
    upload(store, index(0))
    upload(store, index(1))
    with pytest.raises(SaveError, match=r"^rank 2 of 3 did not finish within 0.1 s"):
        gather.wait_for_outcome(writer(store), ATTEMPT, 0.1, rank=1)


def test_a_rank_0_that_never_came() -> None:
    store = MemoryStore()
    upload(store, index(1))
    with pytest.raises(SaveError, match=r"^ranks 0, 2 of 3 did not finish within 0.1 s"):
        gather.wait_for_outcome(writer(store), ATTEMPT, 0.1, rank=1)
    assert store.list("log/") == []


@pytest.mark.parametrize("wins", ["commit", "abort"])
def test_commit_and_deadline_at_the_same_moment_end_alike_for_all(wins: str) -> None:
    """Both write to the same slot of the log: whoever comes second reads what the first one wrote."""
    bucket = MemoryBucket()
    store = MemoryStore(bucket)
    first, other = writer(store), writer(store)
    first.open({"conditional_put": True})
    both_there, done = threading.Barrier(2), threading.Event()
    seen = set()

    def hook(phase: str, operation: str, key: str) -> None:
        me = threading.current_thread().name
        if (phase, operation) == ("before", "put_if_absent") and me not in seen:
            seen.add(me)
            both_there.wait(20)
            if me != wins:
                assert done.wait(20)
        if (phase, operation) == ("after", "put_if_absent") and me == wins:
            done.set()

    results: dict[str, object] = {}

    def run(name: str, work: object) -> None:
        try:
            results[name] = work()
        except SaveError as err:
            results[name] = err

    bucket.hook = hook
    threads = [
        threading.Thread(target=run, args=(n, w), name=n)
        for n, w in [
            ("commit", lambda: commit(first, index(0))),
            ("abort", lambda: gather.wait_for_outcome(other, ATTEMPT, 0.0, rank=1)),
        ]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    bucket.hook = lambda *_: None
    live = read_log(store).checkpoints
    if wins == "commit":
        assert len(live) == 1 and results["commit"] == results["abort"] == live[0]
    else:
        assert live == [] and all(isinstance(result, SaveError) for result in results.values())
    # Who looks later finds the same.
    if wins == "commit":
        assert gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1) == live[0]
    else:
        with pytest.raises(SaveError, match="gave the attempt up"):
            gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1)


def test_a_commit_whose_attempt_is_given_up_later_stays_live() -> None:
    store = MemoryStore()
    first, other = writer(store), writer(store)
    first.open({"conditional_put": True})
    other.log, other.epoch = read_log(store), first.epoch
    record = commit(first, index(0))
    assert gather._give_up(other, ATTEMPT, "too late", 1) == record
    assert read_log(store).checkpoints == [record]
    assert gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1) == record


def test_when_rank_0_is_fenced_the_others_are_too() -> None:
    store = MemoryStore()
    first = writer(store)
    first.open({"conditional_put": True})
    writer(store, OTHER).open({"conditional_put": True})
    with pytest.raises(WriterFencedError):
        commit(first, index(0))
    with pytest.raises(WriterFencedError, match="was replaced by session"):
        gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1)


def test_a_commit_before_the_fence_counts() -> None:
    store = MemoryStore()
    first = writer(store)
    first.open({"conditional_put": True})
    record = commit(first, index(0))
    writer(store, OTHER).open({"conditional_put": True})
    assert gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1) == record


def test_a_word_that_cannot_be_given_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def hook(phase: str, operation: str, key: str) -> None:
        raise ConnectError("no route")

    gather.abandon(writer(MemoryStore(MemoryBucket(hook))), ATTEMPT, "why", 1, 3)
    assert "could not be told of the failure" in caplog.text


def test_one_rank_tells_nobody() -> None:
    store = MemoryStore()
    gather.abandon(writer(store), ATTEMPT, "why", 0, 1)
    assert store.list() == []


def test_an_outage_of_the_store_is_no_failure_of_rank_0() -> None:
    bucket = MemoryBucket()
    store, first = MemoryStore(bucket), writer(MemoryStore(bucket))
    first.open({"conditional_put": True})
    commit(first, index(0))
    failures = iter([True, True])

    def hook(phase: str, operation: str, key: str) -> None:
        if phase == "before" and operation == "list" and next(failures, False):
            raise StoreError("the network is down")

    bucket.hook = hook
    assert gather.wait_for_outcome(writer(store), ATTEMPT, LONG_S, rank=1).attempt == ATTEMPT
    bucket.hook = lambda phase, operation, key: hook("before", "list", "")
    failures = itertools.repeat(True)
    with pytest.raises(SaveError, match="whether rank 0 has committed is not known: the network is down"):
        gather.wait_for_outcome(writer(store), ATTEMPT, 0.1, rank=1)


def test_where_the_log_keeps_nobody_apart_a_late_rank_asks_rank_0() -> None:
    """A late record could take the slot before that of a commit that was told already."""
    bucket = MemoryBucket(conditional=False)
    store, first = MemoryStore(bucket), writer(MemoryStore(bucket))
    first.open({"conditional_put": False})
    with pytest.raises(SaveError, match="rank 0 did not commit"):
        gather.wait_for_outcome(writer(store), ATTEMPT, 0.1, rank=1)
    assert ATTEMPT not in read_log(store).aborted
    with pytest.raises(SaveError, match=r"^rank 1 could not save its part: rank 0 did not commit"):
        gather.wait_for_ranks(store, index(0), LONG_S)


# ---- how often they look


def mean_pauses(ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(gather._jitter, "uniform", lambda low, high: (low + high) / 2)
    return list(itertools.islice(gather._pauses(ranks), 60))


@pytest.mark.parametrize("ranks", [1, 4, 1024, 8192, 100_000])
def test_all_ranks_together_look_a_bounded_number_of_times_a_second(ranks, monkeypatch) -> None:
    pauses = mean_pauses(ranks, monkeypatch)
    assert pauses == sorted(pauses)
    assert ranks / pauses[0] <= 2000.01
    assert pauses[-1] == max(2.0, ranks / 2000)


def test_the_end_is_seen_soon_after_it(monkeypatch) -> None:
    waited_s = 0.0
    for pause_s in mean_pauses(4, monkeypatch):
        assert pause_s <= 0.01 + waited_s / 6
        waited_s += pause_s
