"""What an earlier version wrote is read for ever, bit by bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.memory_store import MemoryStore

from objckpt import restore
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
    return type(a) is type(b) and a == b


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    made = MemoryStore(url="s3://bucket/golden")
    root = HERE / "golden" / "v1"
    for path in root.rglob("*"):
        if path.is_file():
            made.put(path.relative_to(root).as_posix(), path.read_bytes())
    return made


def test_the_log_reads_as_it_was_written(store: MemoryStore) -> None:
    log = read_log(store)
    assert not log.damaged
    assert [(r.seq, r.kind, r.epoch) for r in log.records] == [
        (0, "open", 1),
        (1, "commit", 1),
        (2, "open", 2),
        (3, "commit", 2),
    ]
    assert log.newest().meta == {"by": "make_golden"}


@pytest.mark.parametrize("step", [1, 2])
def test_the_state_is_the_one_that_was_saved(store: MemoryStore, step: int) -> None:
    checkpoint = restore.open_checkpoint(store, read_log(store).at(step))
    assert restore.verify(store, checkpoint) == []
    assert same(restore.load(store, checkpoint), make_golden.state())


def test_zstd_is_really_in_the_golden_files(store: MemoryStore) -> None:
    index = restore.open_checkpoint(store, read_log(store).at(2)).indexes[0]
    assert "zstd" in {index.codecs[n] for n in index.chunks.codec.tolist()}
