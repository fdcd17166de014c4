"""Reading once for all ranks: ranks are threads here, and any boxes of any sharding come out right."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.memory_store import MemoryStore
from support.written import ATTEMPT, damage, write_shards

from objckpt import geometry, resume
from objckpt.errors import ConnectError, IntegrityError
from objckpt.events import ignore
from objckpt.format import checksums, keys
from objckpt.format.index import Index
from objckpt.format.tables import TensorEntry
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box, Boxes, Layout, whole
from objckpt.restore import share
from objckpt.restore.open import StoredTensor, open_checkpoint
from objckpt.restore.place import Filler
from objckpt.restore.plan import overlaps
from objckpt.restore.share import Sharing

WAIT_S = 30.0


class Job:
    """What the ranks of a job have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.values: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], torch.Tensor] = {}

    def run(self, work: Callable[[Rank], Any]) -> list[Any]:
        """`work` on every rank; results or exceptions."""
        out: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                out[rank] = work(Rank(self, rank))
            except Exception as err:
                out[rank] = err

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        return out


class Rank:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.size = job, rank, job.size

    def gather(self, value: Any) -> list[Any]:
        self.job.values[self.rank] = value
        self.job.barrier.wait()
        out = list(self.job.values)
        self.job.barrier.wait()
        return out

    def together(self, work: Callable[[], Any]) -> Any:
        error, result = None, None
        try:
            result = work()
        except Exception as err:
            error = err
        failed = [e for e in self.gather(error) if e is not None]
        if failed:
            raise error or RuntimeError(f"a peer failed: {failed[0]}")
        return result

    def exchange(self, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        for to, buffer in out.items():
            self.job.mail[self.rank, to] = buffer
        self.job.barrier.wait()
        for source, buffer in into.items():
            buffer.copy_(self.job.mail.pop((source, self.rank)))  # the sizes must be equal
        self.job.barrier.wait()
        assert not any(to == self.rank for _, to in self.job.mail), "sent and not expected"
        self.job.barrier.wait()


class Counting(MemoryStore):
    """Counts the bytes that are got."""

    got = 0

    def get_into(self, key: str, start: int, buffers: Any, **options: Any) -> None:
        Counting.got += sum(memoryview(b).nbytes for b in buffers)
        super().get_into(key, start, buffers, **options)


def restored(
    array: np.ndarray[Any, Any], shards: list[Box], wanted: list[list[Box]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[torch.Tensor]], int]:
    """The boxes that each rank wants, by sharing; and the bytes read from the store."""
    store, checkpoint = write_shards({"w": (array, shards)}, ranks=3, chunk_bytes=64)
    boxes: dict[int, Box] = {}
    targets = []
    for mine in wanted:
        targets.append([torch.full(box.shape, -1, dtype=torch.int64) for box in mine])
        boxes |= {id(target): box for target, box in zip(targets[-1], mine, strict=True)}
    monkeypatch.setattr(share, "parts_of", lambda target, fqn: [(target, boxes[id(target)])])
    Counting.got = 0

    def work(rank: Rank) -> None:
        mine = Counting(store.bucket, store.url, store.options)
        sharing = Sharing(rank, mine, checkpoint)
        rest = sharing.take([(target, TensorLeaf("w")) for target in targets[rank.rank]])
        filler = Filler(mine, checkpoint, ignore)
        for target, _ in rest:
            filler.add_box(checkpoint.tensors["w"], target, boxes[id(target)])
        filler.run()
        sharing.run(checkpoint)

    assert Job(len(wanted)).run(work) == [None] * len(wanted)
    return targets, Counting.got


def rows(n: int, columns: int, parts: int) -> list[Box]:
    return [Box((i * n // parts, 0), ((i + 1) * n // parts - i * n // parts, columns)) for i in range(parts)]


def columns(n: int, width: int, parts: int) -> list[Box]:
    return [Box((0, box.offset[0]), (n, box.shape[0])) for box in rows(width, n, parts)]


@pytest.mark.parametrize("unit_bytes", [1 << 20, 100, 8])
@pytest.mark.parametrize(
    "wanted",
    [
        [[box] for box in columns(12, 10, 4)],
        [[whole((12, 10))]] * 4,
        [[box] for box in rows(12, 10, 2)] * 2,
        [[], [whole((12, 10))], [Box((3, 2), (5, 5))], [Box((0, 0), (1, 10)), Box((11, 0), (1, 10))]],
        [[Box((2, 3), (4, 4)), Box((2, 3), (4, 4))], [whole((12, 10))]],
    ],
    ids=["columns", "replicas", "two and two", "unlike", "twice"],
)
def test_every_rank_gets_its_boxes(wanted: list[list[Box]], unit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(share, "_LEAST_UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(share, "ROUND_BYTES", 2 * unit_bytes)
    array = np.arange(120).reshape(12, 10)
    found, got = restored(array, rows(12, 10, 3), wanted, monkeypatch)
    for boxes, tensors in zip(wanted, found, strict=True):
        for box, tensor in zip(boxes, tensors, strict=True):
            part = array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            np.testing.assert_array_equal(tensor.numpy(), part)
    if unit_bytes == 1 << 20:
        assert got == array.nbytes, "each byte once"


def test_a_rank_reads_what_its_like_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tensors each rank needs the indexes of few ranks, and all read about as much."""
    arrays = {f"w{n}": (np.arange(480).reshape(48, 10) + n, rows(48, 10, 6)) for n in range(8)}
    _, checkpoint = write_shards(arrays, ranks=6, chunk_bytes=64)
    monkeypatch.setattr(share, "parts_of", lambda target, fqn: [(target, whole((48, 10)))])

    def work(rank: Rank) -> tuple[set[int], int]:
        sharing = Sharing(rank, None, checkpoint)  # type: ignore[arg-type]
        assert sharing.take([(torch.zeros(48, 10, dtype=torch.int64), TensorLeaf(fqn)) for fqn in arrays]) == []
        boxes = [(checkpoint.tensors[fqn], box) for fqn, found in sharing.wanted().items() for box in found]
        read = sum(box.elements * stored.itemsize for stored, box in boxes)
        return {s.index.rank for stored, box in boxes for s, _ in overlaps(stored, box)}, read

    found = Job(3).run(work)
    assert [ranks for ranks, _ in found] == [{0, 1}, {2, 3}, {4, 5}]
    assert [read for _, read in found] == [8 * 480 * 8 // 3] * 3


@pytest.mark.parametrize("wanted", [[whole((48, 10))] * 4, columns(48, 10, 4)], ids=["replicas", "columns"])
def test_a_round_is_bounded_by_what_one_rank_takes(wanted: list[Box], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "ROUND_BYTES", 960)
    monkeypatch.setattr(share, "_LEAST_UNIT_BYTES", 80)
    taken, rooms = [], []
    room = Sharing._room

    def noted(self: Sharing, this: Any) -> Any:
        taken.extend(self._taking[n].common[row].elements * 8 for _, n, row, _ in this.taken.tolist())
        found = room(self, this)
        rooms.append(sum(buffer.numel() for buffer in found[0].values()))
        return found

    monkeypatch.setattr(Sharing, "_room", noted)
    array = np.arange(480).reshape(48, 10)
    restored(array, rows(48, 10, 6), [[box] for box in wanted], monkeypatch)
    assert sum(taken) == sum(box.elements * 8 for box in wanted)
    assert max(rooms) <= 960 + 80 * 4  # and no more than a unit of each reader


def test_columns_of_single_rows_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of one row is one run of few bytes; but its chunk, the whole row, would be fetched by every rank."""
    array = np.arange(120).reshape(12, 10)
    _, got = restored(array, rows(12, 10, 12), [[box] for box in columns(12, 10, 5)], monkeypatch)
    assert got == array.nbytes


def test_an_unchanged_layout_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "exchange", lambda *_: pytest.fail("nothing has to be sent"))
    array = np.arange(120).reshape(12, 10)
    found, got = restored(array, rows(12, 10, 3), [[box] for box in rows(12, 10, 3)], monkeypatch)
    assert np.array_equal(np.concatenate([t[0].numpy() for t in found]), array) and got == array.nbytes


def test_a_reader_that_fails_fails_all_and_nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(120).reshape(12, 10)
    store, checkpoint = write_shards({"w": (array, rows(12, 10, 3))}, ranks=3, chunk_bytes=64)
    monkeypatch.setattr(share, "parts_of", lambda target, fqn: [(target, whole((12, 10)))])

    def work(rank: Rank) -> None:
        mine = MemoryStore(store.bucket, store.url, store.options)
        if rank.rank == 1:

            def fail(*_: Any, **__: Any) -> None:
                raise ConnectError("no route")

            mine.get_into = fail  # type: ignore[method-assign]
        sharing = Sharing(rank, mine, checkpoint)
        assert sharing.take([(torch.zeros(12, 10, dtype=torch.int64), TensorLeaf("w"))]) == []
        sharing.run(checkpoint)

    found = Job(3).run(work)
    assert isinstance(found[1], ConnectError)
    assert all("a peer failed: no route" in str(err) for err in (found[0], found[2]))


def test_an_error_of_one_rank_alone_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides what is shared, alone."""
    array = np.arange(120).reshape(12, 10)
    store, checkpoint = write_shards({"w": (array, rows(12, 10, 3))}, ranks=3, chunk_bytes=64)
    monkeypatch.setattr(share, "parts_of", lambda target, fqn: [(target, whole((12, 10)))])

    def work(rank: Rank) -> None:
        sharing = Sharing(rank, store, checkpoint)
        if rank.rank == 0:

            def fail() -> list[str]:
                raise ConnectError("only here")

            sharing._all_worth = fail  # type: ignore[method-assign]
        sharing.take([(torch.zeros(12, 10, dtype=torch.int64), TensorLeaf("w"))])

    found = Job(3).run(work)
    assert isinstance(found[0], ConnectError)
    assert all("a peer failed: only here" in str(err) for err in found[1:])


def test_a_failure_between_rounds_says_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "ROUND_BYTES", 1024)
    monkeypatch.setattr(share, "_LEAST_UNIT_BYTES", 512)
    array = np.arange(96 * 4).reshape(96, 4) + 1
    store, checkpoint = write_shards({"w": (array, rows(96, 4, 3))}, ranks=3, chunk_bytes=64)
    damage(store, "rank-00001-0000.pack", 1000)
    targets = [torch.zeros(96, 4, dtype=torch.int64) for _ in range(3)]

    def work(rank: Rank) -> None:
        sharing = Sharing(rank, store, checkpoint)
        sharing.take([(targets[rank.rank], TensorLeaf("w"))])
        sharing.run(checkpoint)

    found = Job(3).run(work)
    assert sum(isinstance(err, IntegrityError) for err in found) == 1
    assert all("mixture of old and new bytes" in err.__notes__[0] for err in found)
    assert all(0 < int((t != 0).sum()) < t.numel() for t in targets)


def test_a_layout_that_only_some_ranks_see_divides_nobody() -> None:
    """Of an index that is not rank 0's: the others do not read it."""
    array = np.arange(96 * 4).reshape(96, 4)
    store, checkpoint = write_shards({"w": (array, rows(96, 4, 8))}, ranks=8, chunk_bytes=64)
    old, layout = checkpoint.indexes[1], Layout(tuple(range(8)), (8,), ((0, 1),))
    entry = TensorEntry(("w",), "int64", (96, 4), layout)
    index = Index(7, ATTEMPT, 1, 8, old.packs, list(old.shards), old.chunks, old.codecs, tensors=[entry])
    data = index.encode()
    digest = checksums.digest_hex(data)
    store.put(keys.index(ATTEMPT, 1, digest, index.signature), data)
    listed = [(digest, len(data)) if rank == 1 else each for rank, each in enumerate(checkpoint.commit.ranks)]
    commit = replace(checkpoint.commit, ranks=listed)

    def work(rank: Rank) -> torch.Tensor:
        target = torch.zeros(96, 4, dtype=torch.int64)
        sharing = Sharing(rank, store, open_checkpoint(store, commit, ranks={rank.rank}))
        assert sharing.take([(target, TensorLeaf("w"))]) == []
        sharing.run(sharing.checkpoint)
        return target

    for target in Job(3).run(work):
        assert np.array_equal(target, array)


def test_each_index_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no layouts tell who holds what, as of a checkpoint that DCP wrote."""
    monkeypatch.setattr(resume, "can_exchange", lambda: True)
    array = np.arange(96 * 4).reshape(96, 4)
    store, checkpoint = write_shards({"w": (array, rows(96, 4, 8))}, ranks=8, chunk_bytes=64)

    class Noting(MemoryStore):
        def get(self, key: str, **options: Any) -> bytes:
            self.asked.append(key)
            return super().get(key, **options)

    def work(rank: Rank) -> tuple[collections.Counter[str], Any]:
        mine = Noting(store.bucket, store.url, store.options)
        mine.asked = []
        into = {"w": torch.zeros(96, 4, dtype=torch.int64)}
        resume.restore_together(
            mine, rank, checkpoint.commit, into, None,  # type: ignore[arg-type]
            strict=True, only=None, cast=False, pickle=False, sharing="auto", progress=ignore,
        )  # fmt: skip
        return collections.Counter(mine.asked), into["w"]

    for asked, target in Job(3).run(work):
        assert len(asked) == 8 and set(asked.values()) == {1}
        assert np.array_equal(target, array)
    assert geometry._boxes.cache_info().currsize == geometry._ranges.cache_info().currsize == 0, "memory is given back"


def test_parts_of_their_own_are_nothing_to_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank has tensors that no other has; and what belongs to it alone."""
    monkeypatch.setattr(resume, "can_exchange", lambda: False)
    array = np.arange(96 * 4).reshape(96, 4)
    tensors = {name: (array, [whole((96, 4))]) for name in ("a", "b", "c")}
    store, checkpoint = write_shards(tensors, ranks=3, chunk_bytes=64)

    def work(rank: Rank) -> torch.Tensor:
        into = {"abc"[rank.rank]: torch.zeros(96, 4, dtype=torch.int64)}
        resume.restore_together(
            store, rank, checkpoint.commit, into, None,  # type: ignore[arg-type]
            strict=False, only=None, cast=False, pickle=False, sharing="auto", progress=ignore,
        )  # fmt: skip
        (target,) = into.values()
        return target

    assert all(np.array_equal(target, array) for target in Job(3).run(work))
    assert caplog.records == []


@pytest.mark.parametrize("ranks", [3, 8], ids=["replicas", "of more ranks"])
def test_ranks_that_cannot_share_are_told_what_would_help(
    ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resume, "can_exchange", lambda: False)
    array = np.arange(96 * 4).reshape(96, 4)
    store, checkpoint = write_shards({"w": (array, rows(96, 4, ranks))}, ranks=ranks, chunk_bytes=64)

    def work(rank: Rank) -> torch.Tensor:
        into = {"w": torch.zeros(96, 4, dtype=torch.int64)}
        for sharing in ("off", "auto"):
            resume.restore_together(
                store, rank, checkpoint.commit, into, None,  # type: ignore[arg-type]
                strict=True, only=None, cast=False, pickle=False, sharing=sharing, progress=ignore,
            )  # fmt: skip
        return into["w"]

    assert all(np.array_equal(target, array) for target in Job(3).run(work))
    assert [r.getMessage() for r in caplog.records if "cpu:gloo,cuda:nccl" in r.getMessage()] != []
    assert len(caplog.records) == 1


class Alike(Rank):
    """One rank of a job whose others say what it says."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def together(self, work: Callable[[], Any]) -> Any:
        return work()


@pytest.mark.parametrize(("size", "tensors"), [(8, 6), (8, 64), (64, 16), (256, 32), (1024, 64), (1024, 3)])
def test_replicas_of_any_number_take_and_send_bounded_rounds(size: int, tensors: int) -> None:
    """Tensors of 128 MiB, written by 64 ranks; only planned."""
    layout = Layout(tuple(range(64)), (64,), ((0, 1),))
    entries = [TensorEntry((f"w{n:03}",), "bfloat16", (8192, 8192), layout) for n in range(tensors)]
    stored = {e.fqn: StoredTensor(e, e.fqn, Boxes.of([], 2), np.zeros((0, 2), np.int64), []) for e in entries}
    checkpoint: Any = type("Checkpoint", (), {"tensors": stored, "complete": False})
    sharing = Sharing(Alike(0, size), None, checkpoint)  # type: ignore[arg-type]
    target = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    assert sharing.take([(target, TensorLeaf(fqn)) for fqn in stored]) == []
    taken = [int(each.taken[:, 3].sum()) for each in sharing._rounds]
    assert sum(taken) == tensors * target.nbytes
    assert max(taken) <= share.ROUND_BYTES
    assert min(taken[:-1], default=taken[-1]) >= share.ROUND_BYTES // 2, "and no smaller than needed"
    for each in sharing._rounds:
        sends = sharing._sends(each.reads)
        assert sends.nbytes == sum(unit.box.elements * 2 for unit in each.reads), "one copy for all"
        assert not each.reads or len(sends.segments) == size
