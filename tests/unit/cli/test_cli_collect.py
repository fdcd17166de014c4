"""`rm`, `tag` and `gc` over an in-memory store: what they do, print and refuse."""

from __future__ import annotations

import io
import json
import re

import pytest
from support.log_run import Run
from support.memory_store import MemoryStore

from objckpt import collect
from objckpt.cli.gc import seconds
from objckpt.errors import ConnectError, UsageError
from objckpt.format import keys
from objckpt.log import read_log

URL = "s3://bucket/run1"


@pytest.fixture
def run(store) -> Run:
    """A session with the checkpoints 1 to 4."""
    made = Run(store)
    parent = None
    for step in (1, 2, 3, 4):
        parent = made.save(step, parent).seq
    return made


def steps(store: MemoryStore) -> list[int]:
    return [c.step for c in read_log(store).checkpoints]


def stored(store: MemoryStore) -> set[int]:
    """The steps of which there are objects."""
    return {int(str(collect.attempt_of(info.key))[1:13]) for info in store.list("data/")}


def test_rm(cli, store, run):
    code, out, err = cli("rm", URL, "1", "3", "--yes")
    assert (code, err) == (0, "") and re.fullmatch(r"removed step 1@1, .*\nremoved step 3@3, .*\n", out)
    assert steps(store) == [2, 4] and stored(store) == {2, 4}
    code, out, err = cli("rm", URL, "1", "--yes")
    assert (code, out) == (4, "") and "step 1" in err


def test_rm_json(cli, store, run):
    code, out, err = cli("rm", URL, "2", "--yes", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [c["step"] for c in found["removed"]] == [2] and found["deleted_objects"] == 2 and found["later"] == []


def test_rm_takes_all_or_none(cli, store, run):
    for wrong, code in (("9", 4), ("4", 2), ("nope", 4), ("2@9", 4)):
        assert cli("rm", URL, "1", wrong, "--yes")[0] == code, wrong
    assert steps(store) == [1, 2, 3, 4] and stored(store) == {1, 2, 3, 4}


def test_rm_of_the_newest_and_of_tagged_ones_wants_force(cli, store, run):
    cli("tag", URL, "2", "best")
    for name, why in (("4", "newest"), ("2", "2@2 is tagged 'best'")):
        code, out, err = cli("rm", URL, name, "--yes")
        assert (code, out) == (2, "") and why in err and "--force" in err
    assert cli("rm", URL, "best", "--yes")[0] == 0 and steps(store) == [1, 3, 4]
    assert cli("rm", URL, "1", "3", "4", "--yes", "--force")[0] == 0
    assert steps(store) == [] and stored(store) == set()
    assert cli("ls", URL)[0] == 0


def test_rm_of_a_step_that_was_committed_twice_wants_the_seq(cli, store, run):
    run.save(3, 4)
    run.save(5, 5)
    code, out, err = cli("rm", URL, "3", "--yes")
    assert (code, out) == (2, "") and "3@3, 3@5" in err
    assert cli("rm", URL, "3@3", "--yes")[0] == 0 and steps(store) == [1, 2, 4, 3, 5]


def test_rm_asks(cli, store, run, monkeypatch, capsys):
    code, out, err = cli("rm", URL, "1")  # no terminal
    assert (code, out) == (2, "") and "--yes" in err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    code, out, err = cli("rm", URL, "1")
    assert (code, out) == (1, "") and "remove 1@1" in err and "nothing was removed" in err
    assert steps(store) == [1, 2, 3, 4]
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert cli("rm", URL, "1")[0] == 0 and steps(store) == [2, 3, 4]


def test_rm_that_cannot_delete_says_what_to_do(cli, store, run, bucket):
    def hook(phase, operation, key):
        if operation == "delete":
            raise ConnectError("the store is away")

    bucket.hook = hook
    code, out, err = cli("rm", URL, "1", "--yes")
    assert (code, out) == (10, "") and f"objckpt gc {URL}" in err
    assert steps(store) == [2, 3, 4] and stored(store) == {1, 2, 3, 4}
    bucket.hook = lambda phase, operation, key: None
    assert cli("gc", URL)[0] == 0 and stored(store) == {2, 3, 4}


def test_a_checkpoint_that_becomes_the_newest_meanwhile_is_refused(cli, store, run, bucket):
    def hook(phase, operation, key):
        if operation == "put_if_absent" and phase == "before":
            bucket.hook = lambda phase, operation, key: None
            collect.retire(
                store, read_log(store), lambda log: ([4], []), author=collect.Author(session="8" * 26), reason="",
                deadline_s=5,
            )  # fmt: skip

    bucket.hook = hook
    code, _, err = cli("rm", URL, "3", "--yes")
    assert code == 2 and "newest" in err and steps(store) == [1, 2, 3]


def test_tag(cli, store, run):
    assert cli("tag", URL, "2", "best") == (0, "best: step 2@2\n", "")
    assert cli("tag", URL, "3", "best") == (0, "best: step 3@3, was 2@2\n", "")
    assert read_log(store).tags == {"best": 3}
    found = json.loads(cli("tag", URL, "best", "release-1.0", "--json")[1])
    assert (found["tag"], found["step"], found["seq"], found["was_seq"]) == ("release-1.0", 3, 3, None)
    assert cli("tag", URL, "--delete", "best")[0] == 0
    assert read_log(store).tags == {"release-1.0": 3}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["2"], 2),
        (["2", "7"], 2),
        (["2", "a/b"], 2),
        (["2", "best", "--delete", "best"], 2),
        ([], 2),
        (["9", "best"], 4),
        (["--delete", "nope"], 4),
    ],
)
def test_tag_refuses(cli, store, run, arguments, code):
    before = len(store.list("log/"))
    found, out, err = cli("tag", URL, *arguments)
    assert (found, out) == (code, "") and re.fullmatch(r"objckpt: error: [^\n]+\n", err)
    assert len(store.list("log/")) == before


def test_gc(cli, store, run):
    lost = run.upload(5).attempt
    after = Run(store, 1)
    after.save(6, 4)
    pending = after.upload(7).attempt
    cli("rm", URL, "1", "--yes")
    code, out, err = cli("gc", URL, "--dry-run")
    assert (code, err) == (0, "") and out.startswith("would delete 2 objects") and pending in out
    assert stored(store) == {2, 3, 4, 5, 6, 7}
    dry = json.loads(cli("gc", URL, "--dry-run", "--json")[1])
    done = json.loads(cli("gc", URL, "--json")[1])
    assert dry["objects"] == done["objects"] and all(key.startswith(f"data/{lost}/") for key in done["objects"])
    assert (dry["dry_run"], done["dry_run"], done["waiting"], done["given_up"]) == (True, False, [pending], [])
    assert stored(store) == {2, 3, 4, 6, 7}
    assert cli("gc", URL)[1].startswith("deleted 0 objects")


def test_gc_gives_up_what_is_older_than_the_grace(cli, store, run, bucket):
    pending = run.upload(5).attempt
    assert cli("gc", URL, "--grace", "1d")[0] == 0 and stored(store) == {1, 2, 3, 4, 5}
    for key, (data, when) in list(bucket.objects.items()):
        bucket.objects[key] = (data, when - 7200)
    code, out, _ = cli("gc", URL, "--grace", "1h", "--dry-run")
    assert code == 0 and "would give up 1 unfinished saves" in out and stored(store) == {1, 2, 3, 4, 5}
    code, out, _ = cli("gc", URL, "--grace", "1h")
    assert code == 0 and pending in out and stored(store) == {1, 2, 3, 4} and pending in read_log(store).aborted


def test_gc_leaves_what_it_does_not_know_and_says_so(cli, store, run):
    store.put("data/note\x1b.txt", b"x")
    code, _, err = cli("gc", URL, "--grace", "0")
    assert code == 0 and "data/note" in err and "\x1b" not in err
    assert any(info.key.startswith("data/note") for info in store.list("data/"))


def test_gc_of_a_damaged_log_deletes_nothing(cli, store, run):
    cli("rm", URL, "1", "--yes")
    run.upload(9)
    Run(store, 1)
    store.put(keys.record(2), b"garbage")
    for verb in (["gc"], ["gc", "--dry-run"], ["rm", "3", "--yes"]):
        code, out, err = cli(verb[0], URL, *verb[1:])
        assert (code, out) == (5, "") and "record 2" in err
    assert 9 in stored(store)


@pytest.mark.parametrize(("text", "wanted"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604_800), ("0", 0)])
def test_times(text, wanted):
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1w", "1e9h", "nan", "٣h"])
def test_times_that_are_none(text):
    with pytest.raises(UsageError, match="--grace"):
        seconds(text)


def test_a_run_is_not_its_neighbour(cli, bucket):
    other = MemoryStore(bucket, "s3://bucket/run10")
    run = Run(other)
    run.save(2, run.save(1).seq)
    run.upload(3)
    mine = MemoryStore(bucket, URL)
    Run(mine).upload(1)
    Run(mine, 1).save(2)
    assert cli("gc", URL, "--grace", "0")[0] == 0
    assert stored(mine) == {2} and stored(other) == {1, 2, 3}
    assert cli("rm", URL, "2", "--yes", "--force")[0] == 0
    assert steps(other) == [1, 2] and stored(other) == {1, 2, 3}
