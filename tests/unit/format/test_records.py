"""Records of the log: what is written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objckpt import limits
from objckpt.errors import FormatError
from objckpt.format import keys, records, values, wire

SESSION = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ATTEMPT = keys.attempt(7, SESSION, 3)
HEAD: dict[str, Any] = {
    "write_id": bytes(range(16)),
    "epoch": 2,
    "session": SESSION,
    "time_s": 1.5,
    "host": "node-1",
}
OPEN = records.Open(seq=4, **HEAD, world_size=8, capabilities={"conditional_put": True})
COMMIT = records.Commit(
    signature="5" * 16,
    seq=4,
    **HEAD,
    step=7,
    attempt=ATTEMPT,
    parent=None,
    world_size=2,
    raw_bytes=100,
    stored_bytes=90,
    tensors=3,
    ranks=[("0" * 32, 10), ("f" * 32, 0)],
    foreign_packs=[keys.pack(ATTEMPT, 0, 1)],
    meta={"loss": np.float32(0.5), "tags": ("a", 1), "n": None},
)
RETIRE = records.Retire(seq=4, **HEAD, seqs=[1, 3], attempts=[ATTEMPT], reason="retention")
TAG = records.Tag(seq=4, **HEAD, name="best", target=3)


def changed(record: records.Record, **fields: Any) -> bytes:
    """The record with other fields; None as a type drops one."""
    body = wire.unseal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, record.encode(), "test")
    body.update(fields)
    return wire.seal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, body)


@pytest.mark.parametrize(
    "record",
    [
        OPEN,
        COMMIT,
        dataclasses.replace(COMMIT, parent=3, foreign_packs=[], meta=None),
        RETIRE,
        dataclasses.replace(RETIRE, seqs=[], attempts=[], reason=""),
        TAG,
        dataclasses.replace(TAG, name="A" + "-" * 63, target=None),
    ],
)
def test_round_trip(record: records.Record) -> None:
    back = records.decode(record.encode(), 4)
    assert back == record and type(back) is type(record)


def test_the_meta_of_a_user_keeps_its_types() -> None:
    back = records.decode(COMMIT.encode(), 4)
    assert isinstance(back, records.Commit)
    assert type(back.meta["loss"]) is np.float32 and type(back.meta["tags"]) is tuple


def test_the_seq_is_that_of_the_key() -> None:
    assert records.decode(OPEN.encode(), 99).seq == 99
    assert OPEN.encode() == dataclasses.replace(OPEN, seq=99).encode()


def test_equal_records_have_equal_bytes() -> None:
    assert COMMIT.encode() == records.decode(COMMIT.encode(), 4).encode()


def test_index_keys() -> None:
    assert COMMIT.index_key(1) == f"data/{ATTEMPT}/rank-00001.{'f' * 32}.{'5' * 16}.index"
    assert keys.parse_index(COMMIT.index_key(1)) == keys.IndexName(ATTEMPT, 1, "f" * 32, "5" * 16)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, limits.MAX_STEP),
    st.integers(1, 2**63 - 1),
    st.lists(st.tuples(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(0, 2**30)), min_size=1),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=50),
    st.floats(allow_nan=False),
)
def test_round_trip_of_any_commit(
    step: int, epoch: int, ranks: list[tuple[str, int]], host: str, time_s: float
) -> None:
    commit = dataclasses.replace(
        COMMIT, step=step, epoch=epoch, ranks=ranks, world_size=len(ranks), host=host, time_s=time_s
    )
    assert records.decode(commit.encode(), 4) == commit


def test_unknown_fields_are_ignored() -> None:
    assert records.decode(changed(COMMIT, colour="red"), 4) == COMMIT


@pytest.mark.parametrize("kind", ["drop", "", "x" * 5000])
def test_a_record_of_unknown_kind_is_an_error(kind: str) -> None:
    with pytest.raises(FormatError, match=r"unknown kind|longer than"):
        records.decode(changed(OPEN, kind=kind), 4)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(records.Commit) if f.name != "seq"])
@pytest.mark.parametrize("value", [..., {}, b"", 1.25, "text", True, 2**64 - 1, -1])
def test_missing_fields_and_other_types_name_slot_and_field(name: str, value: Any) -> None:
    """True is no int, an int no float; a host may be any text."""
    body = wire.unseal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, COMMIT.encode(), "test")
    if value is ...:
        del body[name]
    else:
        body[name] = value
    if (name, value) in (("host", "text"), ("time_s", 1.25)):
        records.decode(changed(COMMIT, **{name: value}), 4)
        return
    with pytest.raises(FormatError, match=r"log/0{19}4\.msgpack"):
        records.decode(wire.seal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, body), 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"write_id": bytes(15)},
        {"epoch": 0},
        {"session": SESSION.lower()},
        {"session": SESSION + "0"},
        {"step": limits.MAX_STEP + 1},
        {"attempt": "../../other"},
        {"attempt": ATTEMPT + "/.."},
        {"world_size": 3},
        {"world_size": 0, "ranks": []},
        {"ranks": [["0" * 32, 10]]},
        {"ranks": [["0" * 31, 10], ["f" * 32, 0]]},
        {"ranks": [["F" * 32, 10], ["f" * 32, 0]]},
        {"ranks": [["0" * 32, -1], ["f" * 32, 0]]},
        {"ranks": [["0" * 32, limits.MAX_INDEX_BYTES + 1], ["f" * 32, 0]]},
        {"ranks": [["0" * 32], ["f" * 32, 0]]},
        {"ranks": [["0" * 32, 10.0], ["f" * 32, 0]]},
        {"foreign_packs": ["/etc/passwd"]},
        {"foreign_packs": [3]},
        {"foreign_packs": [f"data/{ATTEMPT}/../x/rank-00000-0000.pack"]},
        {"meta": b"\xc1"},
        {"meta": values.pack(1) + b"\0"},
    ],
)
def test_values_out_of_bounds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"log/0{19}4\.msgpack"):
        records.decode(changed(COMMIT, **fields), 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"seqs": [4]},
        {"seqs": [-1]},
        {"seqs": [True]},
        {"seqs": ["1"]},
        {"seqs": None},
        {"attempts": [ATTEMPT + "/"]},
        {"attempts": [1]},
        {"attempts": ATTEMPT},
        {"reason": None},
        {"reason": "x" * 5000},
    ],
)
def test_a_malformed_retire_record_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"log/0{19}4\.msgpack"):
        records.decode(changed(RETIRE, **fields), 4)


@pytest.mark.parametrize(
    "fields",
    [{"target": -1}, {"target": "3"}, {"target": True}]
    + [{"name": name} for name in ("", "1", "123", "1@2", "-a", "a b", "a/b", "a@1", "ä", "x" * 65, "a\n", None, 3)],
)
def test_a_malformed_tag_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"log/0{19}4\.msgpack"):
        records.decode(changed(TAG, **fields), 4)


def test_a_record_has_the_name_that_its_key_says() -> None:
    name = keys.RecordName(4, 2, bytes(range(16)))
    assert name.key == "log/00000000000000000004.000002.000102030405060708090a0b0c0d0e0f.msgpack"
    assert records.decode(TAG.encode(), 4, name) == TAG
    for other in (keys.RecordName(4, 3, name.write_id), keys.RecordName(4, 2, bytes(16))):
        with pytest.raises(FormatError, match=r"log/0{19}4\.00000[23]\.[0-9a-f]{32}\.msgpack: .*another name"):
            records.decode(TAG.encode(), 4, other)


def test_too_long_a_record_is_refused() -> None:
    with pytest.raises(FormatError, match="longer than"):
        records.decode(bytes(limits.MAX_RECORD_BYTES + 1), 4)


def test_another_version_asks_for_an_upgrade() -> None:
    data = bytearray(OPEN.encode())
    data[9] += 1
    with pytest.raises(FormatError, match="upgrade"):
        records.decode(bytes(data), 4)


@pytest.mark.parametrize("cut", [0, 1, 9, 10, 11, -1])
def test_truncated_records_are_refused(cut: int) -> None:
    with pytest.raises(FormatError):
        records.decode(COMMIT.encode()[:cut], 4)
    with pytest.raises(FormatError):
        records.decode(COMMIT.encode() + b"\0", 4)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5),
    st.sampled_from([OPEN, COMMIT, RETIRE, TAG]),
)
def test_mutated_records_raise_format_errors_only(changes: list[tuple[int, int]], record: records.Record) -> None:
    data = bytearray(record.encode())
    for at, value in changes:
        data[at % len(data)] = value
    try:
        records.decode(bytes(data), 4)
    except FormatError:
        pass
