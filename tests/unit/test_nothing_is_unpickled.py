"""Reading a checkpoint runs no code of it: pickle bytes in any place are an error, and few modules know pickle at all."""

from __future__ import annotations

import ast
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.written import only_pack, write

import objckpt
from objckpt.errors import FormatError, IntegrityError, ObjckptError
from objckpt.format import checksums, keys
from objckpt.format.index import Index
from objckpt.log import read_log
from objckpt.restore import load, open_checkpoint, verify

PACKAGE = Path(objckpt.__file__).parent
KNOW_PICKLE = {"state/flatten.py", "state/unflatten.py"}  # both behind `pickle=True`
FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def payload(tmp_path):
    """Pickle bytes that make a folder when they are loaded; at the end it must not be there."""
    marker = tmp_path / "ran"
    yield pickle.dumps(Bomb(marker))
    assert not marker.exists()


def test_the_payload_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_e094_few_modules_know_pickle():
    know = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if FORBIDDEN & {name.split(".")[0] for name in names}:
                know.add(path.relative_to(PACKAGE).as_posix())
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "np.load", "numpy.load", "eval", "exec"), path
    assert know == KNOW_PICKLE


def test_e094_as_a_record(payload):
    store, _ = write({"w": torch.ones(3)})
    store.put(keys.record(0), payload)
    log = read_log(store)
    assert [seq for seq, _ in log.damaged] == [0]
    with pytest.raises(FormatError):
        log.newest()


def test_e094_as_an_index(payload):
    store, checkpoint = write({"w": torch.ones(3)})
    commit = replace(checkpoint.commit, ranks=[(checksums.digest_hex(payload), len(payload))])
    store.put(commit.index_key(0), payload)
    with pytest.raises(FormatError):
        open_checkpoint(store, commit)


def test_e094_as_the_tree(payload):
    store, checkpoint = write({"w": torch.ones(3)})
    data = replace(checkpoint.indexes[0], tree=payload).encode()
    commit = replace(checkpoint.commit, ranks=[(checksums.digest_hex(data), len(data))])
    store.put(commit.index_key(0), data)
    assert Index.decode(data).tree == payload
    with pytest.raises(FormatError):
        open_checkpoint(store, commit)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_e094_as_a_chunk(payload, codec):
    store, checkpoint = write({"w": torch.zeros(1 << 14)}, codec=codec)
    pack = only_pack(store)
    size = store.head(pack).size
    store.put(pack, (payload * (size // len(payload) + 1))[:size])
    with pytest.raises(IntegrityError):
        load(store, checkpoint)
    assert verify(store, checkpoint)


def test_e094_as_a_value(payload, tmp_path):
    store, checkpoint = write({"v": Bomb(tmp_path / "ran")}, pickle=True)
    assert payload in checkpoint.indexes[0].tree
    with pytest.raises(ObjckptError, match="pickle=True"):
        load(store, checkpoint)
