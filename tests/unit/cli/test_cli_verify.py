"""`objckpt verify --all`: every checkpoint is read, shared bytes once, and a damaged one does not stop the rest."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from support.handmade import put_checkpoint

from objckpt.errors import AccessError
from objckpt.format import checksums, keys
from objckpt.format.index import Index
from objckpt.format.records import Commit

URL = "s3://bucket/run1"
STATE = {"w": np.arange(12, dtype=np.float32), "v": np.ones(3), "epoch": 3}


def put_reference(store, commit: Commit, seq: int) -> Commit:
    """A checkpoint whose every tensor is in the pack of `commit`."""
    index = Index.decode(store.get(commit.index_key(0), max_bytes=2**20))
    attempt = keys.attempt(commit.step + 1, commit.session, seq)
    data = replace(index, step=commit.step + 1, attempt=attempt).encode()
    made = replace(
        commit, seq=seq, write_id=os.urandom(16), step=commit.step + 1, attempt=attempt,
        ranks=[(checksums.digest_hex(data), len(data))], foreign_packs=[key for key, _ in index.packs],
    )  # fmt: skip
    store.put(made.index_key(0), data)
    store.put(keys.record(seq), made.encode())
    return made


def pack_of(bucket, commit):
    (found,) = [key for key in bucket.objects if commit.attempt in key and key.endswith(".pack")]
    return found


def damage(bucket, commit):
    data, when = bucket.objects[pack_of(bucket, commit)]
    bucket.objects[pack_of(bucket, commit)] = (data[:4] + b"!" + data[5:], when)


def test_all_are_right(cli, store):
    for seq in range(3):
        put_checkpoint(store, seq + 5, STATE, seq=seq)
    code, out, err = cli("verify", URL, "--all")
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert lines == [f"step {n + 5}@{n}: 2 tensors, 72 B: every byte is as recorded" for n in range(3)]
    assert last == "3 checkpoints: 3 as recorded, 0 damaged"
    document = json.loads(cli("verify", URL, "--all", "--json")[1])
    assert document["ok"] and [(row["step"], row["seq"], row["ok"]) for row in document["checkpoints"]] == [
        (5, 0, True), (6, 1, True), (7, 2, True)
    ]  # fmt: skip


def test_damaged_ones_do_not_stop_the_rest(cli, store, bucket):
    commits = [put_checkpoint(store, n, STATE, seq=n) for n in range(5)]
    damage(bucket, commits[0])
    del bucket.objects[pack_of(bucket, commits[1])]
    store.put(commits[2].index_key(0), b"garbage")
    store.put(keys.record(5), b"garbage")
    code, out, err = cli("verify", URL, "--all")
    assert (code, err) == (5, "")
    for said in ("step 0@0: corrupt: w: ", "step 1@1: missing: v: ", "step 2@2: integrity: ", "step 4@4: 2 tensors"):
        assert f"\n{said}" in f"\n{out}"
    assert "log record 5 cannot be read" in out
    assert out.endswith("\n5 checkpoints: 2 as recorded, 3 damaged; 1 log records cannot be read\n")
    code, out, err = cli("verify", URL, "--all", "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (5, False)
    assert [row["ok"] for row in document["checkpoints"]] == [False, False, False, True, True]
    assert [row["seq"] for row in document["damaged_records"]] == [5]
    del bucket.objects["run1/" + keys.record(5)]
    assert cli("verify", URL, "--all")[0] == 5


def test_a_damaged_record_alone_is_damage(cli, store):
    put_checkpoint(store, 1, STATE, seq=0)
    store.put(keys.record(1), b"garbage")
    assert cli("verify", URL, "--all")[0] == 5


def test_shared_bytes_are_read_once(cli, store, bucket):
    first = put_checkpoint(store, 1, STATE, seq=0)
    put_reference(store, first, 1)
    put_reference(store, put_checkpoint(store, 7, {"x": np.ones(4)}, seq=2), 3)
    bucket.operations.clear()
    assert cli("verify", URL, "--all")[1].endswith("4 checkpoints: 4 as recorded, 0 damaged\n")
    ranges = [key for operation, key in bucket.operations if operation == "get_into"]
    assert sorted(ranges) == sorted({*ranges}) and len(ranges) == 2


def test_damage_in_shared_bytes_is_told_of_each_checkpoint(cli, store, bucket):
    first = put_checkpoint(store, 1, STATE, seq=0)
    put_reference(store, first, 1)
    damage(bucket, first)
    code, out, _ = cli("verify", URL, "--all")
    assert code == 5 and "step 1@0: corrupt: w: " in out and "step 2@1: corrupt: w: " in out
    assert "v: " not in out


def test_the_same_chunks_with_another_digest_are_not_taken_as_known(cli, store):
    first = put_checkpoint(store, 1, STATE, seq=0)
    second = put_reference(store, first, 1)
    index = Index.decode(store.get(second.index_key(0), max_bytes=2**20))
    shards = [replace(index.shards[0], digest=index.shards[0].digest ^ 1), *index.shards[1:]]
    data = replace(index, shards=shards).encode()
    third = replace(second, ranks=[(checksums.digest_hex(data), len(data))])
    store.put(third.index_key(0), data)
    store.put(keys.record(1), third.encode())
    code, out, _ = cli("verify", URL, "--all")
    assert code == 5 and "step 2@1: corrupt: w: " in out and "step 1@0: 2 tensors" in out


def test_one_that_was_removed_meanwhile_is_no_damage(cli, store, bucket, monkeypatch):
    put_checkpoint(store, 1, STATE, seq=0)
    gone = put_checkpoint(store, 2, STATE, seq=1)
    del bucket.objects["run1/" + gone.index_key(0)]
    monkeypatch.setattr("objckpt.cli.verify._Verifier.is_live", lambda self, commit, log: commit.seq != gone.seq)
    code, out, err = cli("verify", URL, "--all")
    assert (code, err) == (0, "objckpt: step 2@1 was removed meanwhile\n")
    assert out.endswith("1 checkpoints: 1 as recorded, 0 damaged\n")


@pytest.mark.parametrize("arguments", [["--all", "--step", "1"], ["--step", "-1"]])
def test_usage(cli, store, arguments):
    put_checkpoint(store, 1, STATE)
    assert cli("verify", URL, *arguments)[:2] == (2, "")


def test_nothing_there_is_an_error(cli, bucket):
    code, out, err = cli("verify", URL, "--all")
    assert (code, out) == (4, "") and "no committed checkpoint" in err


def test_a_store_that_cannot_be_read_says_nothing_about_the_bytes(cli, store, bucket):
    put_checkpoint(store, 1, STATE)

    def denied(phase, operation, key):
        if operation == "get_into":
            raise AccessError("denied", key=key)

    bucket.hook = denied
    code, out, err = cli("verify", URL, "--all")
    assert (code, out) == (AccessError.exit_code, "") and "denied" in err
