"""The verbs over an in-memory store: what they print, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.handmade import put_checkpoint
from support.memory_store import MemoryStore

from objckpt.format import keys
from objckpt.format.values import TensorLeaf, ViewSpec

URL = "s3://bucket/run1"
STATE = {
    "model": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "layers.0.b": np.arange(5)},
    "optim": {"state": {0: {"step": 7}}},
    "epoch": 3,
}


def test_ls(cli, store):
    for seq, step in enumerate([900, 1000, 9000, 10000, 9500]):
        put_checkpoint(store, step, STATE, seq=seq)
    code, out, err = cli("ls", URL)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [line[0] for line in lines] == ["STEP", "900", "1000", "9000", "10000", "9500"]
    assert [line[-1] == "newest" for line in lines] == [False] * 5 + [True]  # the last commit, not the highest step


def test_ls_json(cli, store):
    put_checkpoint(store, 5, STATE)
    code, out, err = cli("ls", URL, "--json")
    (found,) = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["step"], found["newest"], found["tensors"], found["raw_bytes"]) == (5, True, 2, 88)


def test_nothing_there(cli, bucket, tmp_path):
    assert cli("ls", URL)[:2] == (0, "")
    assert cli("ls", URL, "--json") == (0, "[]\n", "")
    for verb in (["show"], ["verify"], ["restore", "--out", str(tmp_path / "x.pt")]):
        code, out, err = cli(*verb, URL)
        assert (code, out, err) == (4, "", f"objckpt: error: no committed checkpoint under {URL}\n")
    assert os.listdir(tmp_path) == []


def test_what_lies_near_an_empty_place_is_named(cli, bucket):
    for name in ("run42", *(f"z{n}" for n in range(10))):
        put_checkpoint(MemoryStore(bucket, f"s3://bucket/exp/{name}"), 5, STATE)
    bucket.objects["exp/run43/a\x1b/log/x"] = (b"", 0.0)
    none = "objckpt: no committed checkpoint under"
    assert cli("ls", "s3://bucket/exp/run4") == (
        0, "", f"{none} s3://bucket/exp/run4; beside it are s3://bucket/exp/run42, s3://bucket/exp/run43, "
        + ", ".join(f"s3://bucket/exp/z{n}" for n in range(6)) + " and 4 more\n",
    )  # fmt: skip
    assert cli("ls", "s3://bucket") == (0, "", f"{none} s3://bucket; below it are s3://bucket/exp\n")
    assert cli("ls", "s3://bucket/exp/run43") == (
        0, "", f"{none} s3://bucket/exp/run43; below it are s3://bucket/exp/run43/a\\x1b\n",
    )  # fmt: skip
    bucket.objects.clear()
    assert cli("ls", "s3://bucket/exp/run4") == (0, "", f"{none} s3://bucket/exp/run4\n")


def test_damaged_records_are_told_and_nothing_is_called_newest(cli, store):
    put_checkpoint(store, 1, STATE, seq=0)
    store.put(keys.record(1), b"garbage")
    for form in ([], ["--json"]):
        code, out, err = cli("ls", URL, *form)
        assert code == 0
        assert re.fullmatch(r"objckpt: warning: log record 1 cannot be read: .*\n", err)
    good, bad = json.loads(out)
    assert (good["step"], good["newest"], good["damaged"]) == (1, False, None)
    assert (bad["step"], bad["seq"], bad["newest"]) == (None, 1, False) and bad["damaged"]
    assert good.keys() == bad.keys()
    code, out, err = cli("verify", URL)
    assert code == 5 and "log record 1" in err


def test_show(cli, store):
    put_checkpoint(store, 1, STATE, seq=0, meta={"loss": 0.5})
    put_checkpoint(store, 2, {"other": np.zeros(0, np.int8)}, seq=1)
    code, out, err = cli("show", URL, "--step", "1")
    assert (code, err) == (0, "")
    assert re.search(r"^model/w +float32 +3×4 +48 B$", out, re.MULTILINE)
    assert re.search(r"^model/layers.0.b +int64 +5 +40 B$", out, re.MULTILINE)
    assert re.search(r"^optim/state/%\(0\)/step +7$", out, re.MULTILINE)
    assert '"loss": 0.5' in out
    document = json.loads(cli("show", URL, "--json")[1])
    assert document["step"] == 2 and document["value_list"] == []
    assert document["tensor_list"] == [{"fqn": "other", "dtype": "int8", "shape": [0], "bytes": 0, "shares": None}]


def test_hostile_texts_are_never_printed_raw(cli, store):
    evil = "x\x1b]0;owned\x07\u202e\nfake: line"
    state = {evil: {evil: np.ones(1), "v": evil}, "list": [evil]}
    put_checkpoint(store, 1, state, host=evil, meta={evil: evil})
    for arguments in (["ls"], ["ls", "--json"], ["show"], ["show", "--json"], ["verify"]):
        code, out, err = cli(*arguments, URL)
        assert code == 0, err
        assert all(c.isprintable() or c == "\n" for c in out + err), arguments
        assert not re.search(r"^fake: line", out, re.MULTILINE)


def test_verify(cli, store, bucket):
    commit = put_checkpoint(store, 1, STATE)
    assert cli("verify", URL)[0] == 0
    pack = next(k for k in bucket.objects if k.endswith(".pack"))
    data, when = bucket.objects[pack]
    bucket.objects[pack] = (data[:4] + b"!" + data[5:], when)
    code, out, err = cli("verify", URL)
    assert (code, err) == (5, "")
    assert re.fullmatch(r"step 1: corrupt: model/w: .*\n", out)
    code, out, err = cli("verify", URL, "--json")
    problems = json.loads(out)["problems"]
    assert code == 5 and [p["fqn"] for p in problems] == ["model/w"]
    del bucket.objects[pack]
    assert cli("verify", URL)[0] == 5
    del bucket.objects["run1/" + commit.index_key(0)]
    code, out, err = cli("verify", URL)
    assert (code, err) == (5, "") and commit.index_key(0) in out


def test_restore_pt(cli, store, tmp_path):
    put_checkpoint(store, 1, STATE)
    out = tmp_path / "state.pt"
    code, text, err = cli("restore", URL, "--out", str(out))
    assert (code, err) == (0, "") and str(out) in text
    state = torch.load(out)
    assert torch.equal(state["model"]["w"], torch.arange(12, dtype=torch.float32).reshape(3, 4))
    assert state["epoch"] == 3 and state["optim"] == {"state": {0: {"step": 7}}}
    assert os.listdir(tmp_path) == ["state.pt"]


def test_restore_safetensors(cli, store, tmp_path):
    put_checkpoint(store, 1, STATE)
    out = tmp_path / "state.safetensors"
    code, _, err = cli("restore", URL, "--out", str(out))
    assert code == 0
    assert err == "objckpt: not written, as they are not tensors: optim/state/%(0)/step, epoch\n"
    assert set(load_file(out)) == {"model/w", "model/layers.0.b"}
    assert torch.equal(load_file(out)["model/layers.0.b"], torch.arange(5))


def test_restore_safetensors_says_what_it_cannot_hold(cli, store, tmp_path):
    put_checkpoint(store, 1, {"c": np.ones(2, np.complex128), "ok": np.ones(1)})
    code, _, err = cli("restore", URL, "--out", str(tmp_path / "a.safetensors"))
    assert code == 2 and "c (torch.complex128)" in err
    assert os.listdir(tmp_path) == []
    assert cli("restore", URL, "--out", str(tmp_path / "a.safetensors"), "--only", "ok")[0] == 0


def test_restore_safetensors_of_tied_and_viewed_tensors(cli, store, tmp_path):
    base = np.arange(12, dtype=np.float32)
    leaf = TensorLeaf("w", view=ViewSpec("float32", 8, (2, 3), (1, 2)))
    put_checkpoint(store, 1, {"w": base, "tied": TensorLeaf("w"), "view": leaf})
    assert "shares w" in cli("show", URL)[1]
    assert cli("restore", URL, "--out", str(tmp_path / "a.safetensors"))[0] == 0
    found = load_file(tmp_path / "a.safetensors")
    assert torch.equal(found["tied"], torch.from_numpy(base)) and torch.equal(found["w"], found["tied"])
    assert found["view"].tolist() == [[2, 4, 6], [3, 5, 7]]


def test_restore_safetensors_without_the_package(cli, store, tmp_path, monkeypatch):
    put_checkpoint(store, 1, STATE)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    code, _, err = cli("restore", URL, "--out", str(tmp_path / "a.safetensors"))
    assert code == 2 and "objckpt[safetensors]" in err
    assert os.listdir(tmp_path) == []


def test_restore_folder(cli, store, tmp_path):
    put_checkpoint(store, 1, STATE)
    code, text, err = cli("restore", URL, "--out", f"{tmp_path}/new/", "--json")
    assert (code, err) == (0, "")
    assert [os.path.basename(f["path"]) for f in json.loads(text)["files"]] == ["model.pt", "optim.pt", "epoch.pt"]
    assert sorted(os.listdir(tmp_path / "new")) == ["epoch.pt", "model.pt", "optim.pt"]
    assert torch.load(tmp_path / "new" / "epoch.pt") == 3


def test_restore_only(cli, store, tmp_path):
    put_checkpoint(store, 1, STATE)
    (tmp_path / "epoch.pt").write_text("mine")
    assert cli("restore", URL, "--out", str(tmp_path), "--only", "model.*")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["epoch.pt", "model.pt"]
    code, _, err = cli("restore", URL, "--out", str(tmp_path / "x.pt"), "--only", "nothing/*")
    assert code == 3 and "nothing/*" in err


def test_restore_does_not_overwrite(cli, store, tmp_path):
    put_checkpoint(store, 1, STATE)
    for target in (tmp_path / "a.pt", tmp_path / "a.safetensors", tmp_path / "d" / "model.pt"):
        target.parent.mkdir(exist_ok=True)
        target.write_text("mine")
        out = str(target if target.parent == tmp_path else target.parent)
        code, _, err = cli("restore", URL, "--out", out)
        assert (code, err) == (2, f"objckpt: error: {target} exists; --force replaces it\n")
        assert target.read_text() == "mine"
        assert cli("restore", URL, "--out", out, "--force")[0] == 0
        assert target.read_bytes() != b"mine"


def test_a_failed_restore_leaves_nothing(cli, store, bucket, tmp_path):
    put_checkpoint(store, 1, STATE)
    pack = next(k for k in bucket.objects if k.endswith(".pack"))
    data, when = bucket.objects[pack]
    bucket.objects[pack] = (bytes(len(data)), when)
    for name in ("a.pt", "a.safetensors", "folder/"):
        code, out, err = cli("restore", URL, "--out", f"{tmp_path}/{name}")
        assert (code, out) == (5, "") and "model/w" in err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("out", ["missing/x.pt", "missing/x.safetensors", "x.bin", "."])
def test_bad_targets(cli, store, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    put_checkpoint(store, 1, {"no/name": 1})
    assert cli("restore", URL, "--out", out)[0] in (2, 5)
    assert os.listdir(tmp_path) == []


HOSTILE = ["../../x", "/etc/y", "a/../../b", "C:\\z", "nul\0byte", "n" * 3000, "..", ".", "", ".hidden", "a\nb", 0]


@pytest.mark.parametrize("key", HOSTILE, ids=lambda key: ascii(key)[:20])
@pytest.mark.parametrize("exists", [True, False])
def test_hostile_names_create_nothing(cli, store, tmp_path, key, exists):
    target = tmp_path / "a" / "b" / "target"
    target.parent.mkdir(parents=True)
    if exists:
        target.mkdir()
    put_checkpoint(store, 1, {"good": np.ones(3), key: {"w": np.ones(3)}})
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli("restore", URL, "--out", f"{target}/")
    assert code == 5 and out == "", err
    assert err.startswith("objckpt: error: ") and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_too_long_for_the_format_is_an_error(cli, store, tmp_path):
    put_checkpoint(store, 1, {"n" * 5000: np.ones(3)})
    assert cli("restore", URL, "--out", f"{tmp_path}/new/")[0] == 5
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["nope"],
        ["ls", URL, "--nope"],
        ["show", URL, "--step", "1@x"],
        ["show", URL, "--step", "-1"],
        ["restore", URL],
        ["ls", URL, "--addressing", "x"],
        ["ls", URL, "--endpoint-url", "host:9000"],
        ["ls", URL, "--ca-bundle", "/nope.pem"],
    ],
)
def test_wrong_usage_is_one_line_and_2(cli, bucket, arguments):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"objckpt: error: [^\n]+\n", err)


@pytest.mark.parametrize(
    "url",
    ["s3://b/p?versionId=x", "s3:/b/p", "b/p", "S3://B/p", "s3:///p", "s3://b/p ", "https://host/b/p"],
)
def test_urls_that_are_none(cli, url, tmp_path):
    for verb in (["ls"], ["show"], ["verify"], ["restore", "--out", str(tmp_path / "x.pt")]):
        code, out, err = cli(*verb, url)
        assert (code, out) == (2, "") and "not a valid s3:// URI" in err


def test_a_password_in_the_url_is_not_repeated(cli):
    code, out, err = cli("ls", "s3://user:pa55word@bucket/p")
    assert (code, out) == (2, "") and "pa55word" not in err


def test_tracebacks_only_on_request(cli, monkeypatch, store):
    def broken(*args, **kwargs):
        raise RuntimeError("oops\x1b")

    monkeypatch.setattr("objckpt.log.read_log", broken)
    code, out, err = cli("ls", URL)
    assert (code, out) == (1, "") and err.count("\n") == 1 and "Traceback" not in err and "\x1b" not in err
    assert "Traceback" in cli("ls", URL, "--debug")[2]
    monkeypatch.setenv("OBJCKPT_DEBUG", "1")
    assert "Traceback" in cli("ls", URL)[2]


def test_interrupt(cli, monkeypatch, store):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("objckpt.log.read_log", interrupted)
    code, _, err = cli("ls", URL)
    assert code == 130 and "Traceback" not in err


def test_help_and_version(cli):
    assert cli("--version")[0] == 0
    assert "restore" in cli()[1]
    assert "objckpt[local]" in cli("local", "--help")[1]
