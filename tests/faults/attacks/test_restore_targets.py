"""`objckpt restore` of a hostile checkpoint into a hostile folder: nothing outside it is written, and no code runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.handmade import put_checkpoint
from support.memory_store import MemoryBucket, MemoryStore
from support.written import write

import objckpt.store
from objckpt.cli.main import run
from objckpt.cli.restore import file_name
from objckpt.errors import FormatError, UsageError
from objckpt.format import keys, values
from objckpt.restore import lazy, load, restore_into
from objckpt.store import parse_url

URL = "s3://bucket/run1"
STATE = {"model": {"w": np.ones(3, np.float32)}, "optim": {"n": np.zeros(2)}}


@pytest.fixture
def bucket(monkeypatch):
    made = MemoryBucket()
    monkeypatch.setattr(objckpt.store, "open_store", lambda url, options=None: MemoryStore(made, parse_url(url).url))
    return made


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def victim(tmp_path):
    """A file elsewhere; at the end it must be as it was."""
    file = tmp_path / "victim"
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious" and not file.is_symlink()


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("form", ["parts", "file.pt", "file.safetensors"])
@pytest.mark.parametrize("kind", ["link to a file", "dangling link", "hard link"])
def test_links_in_the_folder_are_never_written_through(bucket, out, victim, form, kind, force):
    put_checkpoint(MemoryStore(bucket, URL), 1, STATE)
    target = out / ("model.pt" if form == "parts" else form)
    elsewhere = victim.parent / "not there"
    if kind == "hard link":
        os.link(victim, target)
    else:
        target.symlink_to(victim if kind == "link to a file" else elsewhere)
    where = f"{out}/" if form == "parts" else str(target)
    code = run(["restore", URL, "--out", where, *(["--force"] if force else [])])
    assert not elsewhere.exists()
    assert not [p for p in tree(out) if p.suffix == ".tmp"]
    if force:
        assert code == 0 and target.is_file() and not target.is_symlink() and target.stat().st_size > 100
    else:
        assert code == 2 and tree(out) == [target] and (kind == "hard link") != target.is_symlink()


@pytest.mark.parametrize("form", ["parts/", "model.pt/", "x.pt"])
def test_folders_in_the_way(bucket, out, form):
    put_checkpoint(MemoryStore(bucket, URL), 1, STATE)
    (out / "parts" / "model.pt").mkdir(parents=True)
    (out / "x.pt").mkdir()
    before = tree(out)
    code = run(["restore", URL, "--out", f"{out}/{form}", "--force"])
    assert code in (0, 2)
    assert all(path in tree(out) for path in before) and (out / "parts" / "model.pt").is_dir()


def test_temporary_names_cannot_be_foreseen(bucket, out, victim):
    """Links at every name that a careless program would use."""
    put_checkpoint(MemoryStore(bucket, URL), 1, STATE)
    for name in ("model.pt.tmp", ".model.pt.tmp", f"model.pt.{os.getpid()}", "optim.pt.tmp", ".tmp", "tmp"):
        (out / name).symlink_to(victim)
    assert run(["restore", URL, "--out", f"{out}/"]) == 0
    assert (out / "model.pt").is_file() and not (out / "model.pt").is_symlink()


HOSTILE = [
    "../x", "/x", "a/b", "a\\b", "..", ".", "", ".ssh", "-rf", "a\0b", "a\nb", "a\x1b[2J", "\u202etxt.exe", "x" * 300, "é" * 101,
    "C:x",    "con:", "a*", "a?b", 'a"b', "a|b", "<a", 0, 1.5, None, True, b"x", ("a",), "\ud7ff\ue000",
]  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE, ids=lambda key: ascii(key)[:20])
def test_names_that_lead_elsewhere(key):
    with pytest.raises(FormatError, match="not a safe file name"):
        file_name(key)


def test_names_that_differ_only_in_their_type_do_not_meet(bucket, out):
    put_checkpoint(MemoryStore(bucket, URL), 1, {"1": {"w": np.ones(1)}, 1: {"w": np.zeros(1)}})
    assert run(["restore", URL, "--out", f"{out}/"]) == 5 and tree(out) == []


@pytest.mark.parametrize("key", ["", "a//b", "../x", "a/../b", "/a", "a/.", ".", "x" * 1100])
def test_no_key_leaves_the_prefix(key):
    with pytest.raises(UsageError):
        parse_url("s3://bucket/prefix").full(key)


@pytest.mark.parametrize(
    "key",
    [f"log/{number}.msgpack" for number in ("\u0660" * 20, "0" * 21, "0" * 19, "-" + "0" * 19)]
    + [f"log/{'0' * 20}.msgpack\n", f"xlog/{'0' * 20}.msgpack"],
)  # fmt: skip
def test_listed_names_that_only_look_like_records(key):
    assert keys.parse_record(key) is None


# ---- pickle ----------------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def armed(tmp_path, monkeypatch):
    """A checkpoint with a pickled leaf; whoever unpickles it makes a folder, and is told at the end."""
    marker = tmp_path / "ran"
    store, checkpoint = write({"v": Bomb(str(marker)), "w": torch.ones(2)}, pickle=True)
    tried: list[object] = []
    for name in ("loads", "load", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *args, **kwargs: tried.append(args))
    yield store, checkpoint
    assert not tried and not marker.exists()


def test_the_bomb_works(tmp_path):
    store, checkpoint = write({"v": Bomb(str(tmp_path / "ran"))}, pickle=True)
    load(store, checkpoint, pickle=True)
    assert (tmp_path / "ran").is_dir()


def test_a_pickled_leaf_is_refused_by_load_and_restore(armed):
    store, checkpoint = armed
    with pytest.raises(UsageError, match="pickle=True"):
        load(store, checkpoint)
    into = {"v": None, "w": torch.zeros(2)}
    with pytest.raises(UsageError, match="pickle=True"):
        restore_into(store, checkpoint, into)
    assert into["v"] is None and into["w"].sum() == 0  # refused before anything was touched


def test_a_pickled_leaf_stays_opaque_in_the_lazy_mapping(armed):
    store, checkpoint = armed
    try:
        found = lazy(store, checkpoint)["v"]
    except UsageError:
        return
    assert type(found) is values.Pickled


@pytest.mark.parametrize("name", ["a.pt", "parts/"])
@pytest.mark.parametrize("verb", ["restore", "show", "verify", "ls"])
def test_a_pickled_leaf_is_refused_by_the_command_line(armed, bucket, out, name, verb):
    store, checkpoint = armed
    bucket.objects.update({k.replace("run/", "run1/", 1): v for k, v in store.bucket.objects.items()})
    MemoryStore(bucket, URL).put(keys.record(1), checkpoint.commit.encode())
    MemoryStore(bucket, URL).put(keys.record(0), _open(checkpoint))
    code = run([verb, URL, *(["--out", f"{out}/{name}"] if verb == "restore" else [])])
    assert code == (2 if verb == "restore" else 0)
    assert tree(out) == []


def _open(checkpoint) -> bytes:
    from objckpt.format.records import Open

    commit = checkpoint.commit
    return Open(write_id=b"o" * 16, epoch=1, session=commit.session, time_s=0.0, host="h", world_size=1).encode()
