"""What an earlier version wrote is read for ever, bit by bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.memory_store import MemoryStore

from objckpt import restore
from objckpt.errors import NotCommittedError
from objckpt.format import keys
from objckpt.log import read_log

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("make_golden", HERE / "make_golden.py")
assert spec is not None and spec.loader is not None
make_golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_golden)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def golden(name: str) -> MemoryStore:
    made = MemoryStore(url="s3://bucket/golden")
    root = HERE / "golden" / name
    for path in root.rglob("*"):
        if path.is_file():
            made.put(path.relative_to(root).as_posix(), path.read_bytes())
    return made


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return golden("v1")


@pytest.fixture(scope="module")
def keyed() -> MemoryStore:
    return golden("v1-keyed")


def test_the_log_reads_as_it_was_written(store: MemoryStore) -> None:
    log = read_log(store)
    assert not log.damaged
    records = [(r.seq, r.kind, r.epoch) for r in log.records]
    sessions = [(2 * n + i, kind, n + 1) for n in range(4) for i, kind in enumerate(("open", "commit"))]
    assert records == [*sessions, (8, "tag", 4), (9, "retire", 4)]
    assert [c.step for c in log.checkpoints] == [1, 2, 3] and log.retired == {1} and log.tags == {"best": 5}
    assert log.find("best").step == 2 and log.find("3@7") == log.newest()
    assert log.newest().meta == {"by": "make_golden"} and log.newest().world_size == 2
    assert log.capabilities["conditional_put"] is True and not log.keyed
    with pytest.raises(NotCommittedError, match="was removed"):
        log.find("0@1")


@pytest.mark.parametrize("step", [1, 2])
def test_the_state_is_the_one_that_was_saved(store: MemoryStore, step: int) -> None:
    checkpoint = restore.open_checkpoint(store, read_log(store).at(step))
    assert restore.verify(store, checkpoint) == []
    assert same(restore.load(store, checkpoint), make_golden.state())


def test_the_state_of_two_ranks_is_the_one_that_was_saved(store: MemoryStore) -> None:
    checkpoint = restore.open_checkpoint(store, read_log(store).at(3))
    assert restore.verify(store, checkpoint) == []
    assert same(restore.load(store, checkpoint), make_golden.state_of_ranks())
    shards = checkpoint.tensors["sharded"].shards
    assert [(s.index.rank, s.entry.offset, s.entry.shape) for s in shards] == [(0, (0, 0), (5, 6)), (1, (5, 0), (4, 6))]
    assert all(index.signature == checkpoint.commit.signature for index in checkpoint.indexes)


def test_zstd_is_really_in_the_golden_files(store: MemoryStore) -> None:
    index = restore.open_checkpoint(store, read_log(store).at(2)).indexes[0]
    assert "zstd" in {index.codecs[n] for n in index.chunks.codec.tolist()}


def test_a_keyed_log(keyed: MemoryStore) -> None:
    names = [keys.parse_record(info.key) for info in keyed.list(keys.LOG)]
    assert len(names) == 3 and all(name is not None and name.write_id is not None for name in names)
    log = read_log(keyed)
    assert log.keyed and not log.damaged and [r.kind for r in log.records] == ["open", "commit", "tag"]
    checkpoint = restore.open_checkpoint(keyed, log.find("best"))
    assert restore.verify(keyed, checkpoint) == []
    assert same(restore.load(keyed, checkpoint), make_golden.state())


@pytest.mark.parametrize("name", ["v1", "v1-keyed"])
def test_what_is_read_is_written_alike(name: str) -> None:
    """The bytes of records and indexes, made anew from what was read: an encoder that changes is a new version."""
    store = golden(name)
    log = read_log(store)
    for record in log.records:
        named = keys.RecordName(record.seq, record.epoch, record.write_id) if log.keyed else keys.RecordName(record.seq)
        assert store.get(named.key, max_bytes=1 << 20) == record.encode()
    for commit in log.checkpoints:
        for index in restore.open_checkpoint(store, commit).indexes:
            assert store.get(commit.index_key(index.rank), max_bytes=1 << 20) == index.encode()
