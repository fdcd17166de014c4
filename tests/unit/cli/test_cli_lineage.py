"""`ls` and `show` over a log with branches, tags, removed checkpoints and a replaced writer; names of checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from support.handmade import SESSION, put_checkpoint

from objckpt.format import keys
from objckpt.format.records import Open, Retire, Tag

URL = "s3://bucket/run1"
OTHER = "1" * 26


def put(store, kind, seq, *, epoch=1, session=SESSION, **fields):
    """A record that is no commit."""
    record = kind(
        seq=seq, write_id=os.urandom(16), epoch=epoch, session=session, time_s=1_800_000_000.0, host="host", **fields
    )
    store.put(keys.record(seq), record.encode())


def commit(store, step, seq, parent=None, **options):
    made = put_checkpoint(store, step, {"w": np.full(3, step), "step": step}, seq=seq, **options)
    store.put(keys.record(seq), replace(made, parent=parent).encode())
    return made


@pytest.fixture
def history(store):
    """100, then 200 (abandoned: training went on from 100), a late commit of the old writer, 150, 160; 100 is removed."""
    put(store, Open, 0, world_size=1, capabilities={"conditional_put": True, "multipart_min_bytes": 5242880})
    removed = commit(store, 100, 1)
    commit(store, 200, 2, parent=1)
    put(store, Open, 3, epoch=2, session=OTHER, world_size=1, capabilities={"conditional_put": True})
    commit(store, 300, 4, parent=2)  # of epoch 1
    commit(store, 150, 5, parent=1, epoch=2)
    commit(store, 160, 6, parent=5, epoch=2)
    put(store, Tag, 7, epoch=2, session="2" * 26, name="best", target=5)
    put(store, Tag, 8, epoch=2, session="2" * 26, name="a-first", target=5)
    put(store, Retire, 9, epoch=2, session="2" * 26, seqs=[1], attempts=[], reason="rm")
    store.delete([removed.index_key(0)])


def test_ls(cli, history):
    code, out, err = cli("ls", URL)
    assert (code, err) == (0, "")
    rows = {tuple(line.split()[:2]): " ".join(line.split()[9:]) for line in out.splitlines()[1:]}
    assert rows == {("200", "2"): "abandoned", ("150", "5"): "[a-first] [best]", ("160", "6"): "newest"}


def test_ls_all(cli, history):
    code, out, err = cli("ls", URL, "--all")
    assert (code, err) == (0, "")
    rows = [(line.split()[1], " ".join(line.split()[9:])) for line in out.splitlines()[1:]]
    assert rows == [
        ("1", "retired"), ("2", "abandoned"), ("4", "fenced"), ("5", "[a-first] [best]"), ("6", "newest")
    ]  # fmt: skip


def test_ls_json(cli, history):
    rows = json.loads(cli("ls", URL, "--all", "--json")[1])
    assert [(row["seq"], row["state"], row["abandoned"], row["tags"], row["parent"]) for row in rows] == [
        (1, "retired", False, [], None),
        (2, "live", True, [], 1),
        (4, "fenced", False, [], 2),
        (5, "live", False, ["a-first", "best"], 1),
        (6, "live", False, [], 5),
    ]
    assert [row["newest"] for row in rows] == [False] * 4 + [True]
    assert [row["seq"] for row in json.loads(cli("ls", URL, "--json")[1])] == [2, 5, 6]


def test_a_damaged_last_record_leaves_the_line_open(cli, store, history):
    store.put(keys.record(10), b"garbage")
    code, out, _ = cli("ls", URL, "--json")
    *rows, bad = json.loads(out)
    assert code == 0 and bad["damaged"] and rows[0].keys() == bad.keys()
    assert not any(row["newest"] or row["abandoned"] for row in rows)


def test_show(cli, history):
    code, out, err = cli("show", URL, "--step", "best")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.partition("\n\n")[0].splitlines())
    assert lines["step:"] == "150 [a-first] [best]"
    assert lines["log:"] == "seq 5, epoch 2, parent step 100@1"
    lines = cli("show", URL, "--step", "200")[1].splitlines()
    assert "step:       200 abandoned" in lines
    assert "store:      conditional_put true, multipart_min_bytes 5242880" in lines
    document = json.loads(cli("show", URL, "--step", "200", "--json")[1])
    assert (document["abandoned"], document["parent"], document["tags"]) == (True, 1, [])
    assert document["capabilities"] == {"conditional_put": True, "multipart_min_bytes": 5242880}


def test_show_one_that_was_removed(cli, history):
    code, out, err = cli("show", URL, "--step", "100@1")
    assert code == 0 and "100 retired" in out and "TENSOR" not in out
    assert "\nremoved:    2027-01-15 08:00:00 UTC by host: rm\n" in out
    assert err == "objckpt: its data is deleted: tensors and values are not known any more\n"
    code, out, err = cli("show", URL, "--step", "300@4")
    assert code == 0 and "300 fenced" in out and "TENSOR" in out  # nobody has collected it yet
    assert cli("show", URL, "--step", "100")[0] == 4
    assert cli("verify", URL, "--step", "100@1")[0] == 4


@pytest.mark.parametrize("verb", [["show"], ["verify"], ["restore", "--force", "--out"], ["diff"]], ids=lambda v: v[0])
@pytest.mark.parametrize(
    ("which", "code"),
    [
        ("150", 0), ("150@5", 0), ("best", 0), ("150@2", 4), ("151", 4), ("nobody", 4), ("300", 4), ("100", 4),
        ("", 2), ("-1", 2), ("1.5", 2), ("150@", 2), ("@5", 2), ("best@5", 2), ("a b", 2), ("x" * 65, 2), ("1_0", 2),
    ],
)  # fmt: skip
def test_names(cli, history, tmp_path, verb, which, code):
    out = [str(tmp_path / "x.pt")] if "--out" in verb else []
    arguments = [*verb, *out, URL, "--", which, "best"] if verb == ["diff"] else [*verb, *out, URL, f"--step={which}"]
    found, text, err = cli(*arguments)
    assert found == code, err
    if code:
        assert text == "" and err.count("\n") == 1 and (which in err or not which)
        assert os.listdir(tmp_path) == []


def test_a_store_that_keeps_no_writers_apart(cli, store, history):
    assert cli("ls", URL)[2] == ""
    put(store, Open, 10, epoch=3, session=OTHER, world_size=1, capabilities={"conditional_put": False})
    code, out, err = cli("ls", URL)
    assert code == 0 and "newest" in out and "not kept apart" in err
    put(store, Open, 11, epoch=4, session=OTHER, world_size=1)  # not probed anew
    assert "not kept apart" in cli("ls", URL)[2]


def test_several_of_one_step(cli, store):
    commit(store, 5, 0)
    commit(store, 5, 1, parent=0)
    code, out, err = cli("show", URL, "--step", "5", "--json")
    assert (code, json.loads(out)["seq"]) == (0, 1)
    assert err == "objckpt: warning: step 5 was saved 2 times: taking 5@1, not 5@0\n"
    code, out, err = cli("show", URL, "--step", "5@0", "--json")
    assert (code, json.loads(out)["seq"], err) == (0, 0, "")


def test_reading_one_that_is_removed_meanwhile(cli, store, bucket, tmp_path):
    """Retired and deleted between the reading of the log and that of the index: no damage, and not "a bug"."""
    first = commit(store, 1, 0)
    commit(store, 2, 1, parent=0)

    def overtaken(phase: str, operation: str, key: str) -> None:
        if (phase, key) == ("before", first.index_key(0)):
            bucket.hook = lambda *_: None
            store.delete([key])
            put(store, Retire, 2, seqs=[0], attempts=[], reason="rm")

    for verb in (["show"], ["verify"], ["restore", "--out", str(tmp_path / "x.pt")], ["diff", "1"]):
        bucket.hook = overtaken
        code, out, err = cli(verb[0], URL, *verb[1:], *(() if verb[0] == "diff" else ("--step", "1")))
        assert (code, out) == (4, "") and "step 1@0 was removed" in err, (verb, err)
        store.delete([keys.record(2)])
        commit(store, 1, 0)
