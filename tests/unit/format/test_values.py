"""Values come back equal and of the same type, or are refused by path; bad bytes are FormatErrors."""

from __future__ import annotations

import datetime as dt
import enum
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, namedtuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objckpt.errors import FormatError, UnsupportedTypeError
from objckpt.format import values, wire

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=("Cs",))),
    st.binary(),
    st.builds(np.float32, st.floats(width=32, allow_nan=False)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.builds(np.bool_, st.booleans()),
    st.datetimes(timezones=st.just(dt.UTC) | st.none()),
    st.dates(),
    st.timedeltas(),
)
keys = st.one_of(st.text(st.characters(exclude_categories=("Cs",))), st.integers(), st.booleans(), st.none())
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.frozensets(st.integers() | st.text(st.characters(exclude_categories=("Cs",))), max_size=4),
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    """Equal and of the same types throughout; NaN equals NaN, 0.0 differs from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex() or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(trees)
def test_any_tree_comes_back_equal_with_the_same_types(tree: object) -> None:
    assert same(values.unpack(values.pack(tree), "tree"), tree)


class Mode(enum.IntEnum):
    A = 1


class Text(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [Mode.A, Text("x"), Point(1, 2), defaultdict(list), object(), lambda: 0, {1, (2, frozenset())}.__class__, print],
)
def test_types_that_msgpack_would_change_in_silence_are_refused_with_their_path(value: object) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"cfg/obj"):
        values.pack({"cfg": {"obj": value}})


def test_arrays_and_paths() -> None:
    tree = {"a": np.array(["2020-01-01"], "datetime64[D]"), "b": np.arange(3, dtype=">i4"), "p": pathlib.Path("/x")}
    back = values.unpack(values.pack(tree), "tree")
    assert back["a"].dtype == tree["a"].dtype and (back["a"] == tree["a"]).all()
    assert back["b"].dtype.str == ">i4" and back["p"] == tree["p"]


def test_metadata_of_an_ordered_dict_is_kept() -> None:
    state = OrderedDict(w=1)
    state._metadata = OrderedDict({"": {"version": 2}})
    assert values.unpack(values.pack(state), "tree")._metadata == state._metadata


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 2000 + b"\x90",
        b"\x01\x02",
        wire.pack({"a": msgpack.ExtType(99, b"")}),
        wire.pack(msgpack.ExtType(values.NPARRAY, wire.pack(["<f8", [2**40, 2**40], b""]))),
        wire.pack(msgpack.ExtType(values.NPARRAY, wire.pack(["|O8", [1], b"12345678"]))),
        wire.pack(msgpack.ExtType(values.TSIZE, wire.pack([-1]))),
        wire.pack(msgpack.ExtType(values.LEAF, wire.pack(["x", False, "float99", 0, [], []]))),
        wire.pack(msgpack.ExtType(values.MAP, wire.pack([[1, 2], [1, 3]]))),
        b"\x82\xa1a\x01\xa1a\x02",
    ],
)
def test_bad_bytes_are_one_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="manifest"):
        values.unpack(data, "manifest")


@given(st.binary(max_size=200))
def test_noise_is_a_value_or_a_format_error(data: bytes) -> None:
    try:
        values.unpack(data, "noise")
    except FormatError:
        pass


def test_a_nest_of_extensions_is_bounded() -> None:
    data = wire.pack([])
    for _ in range(3000):
        data = wire.pack(msgpack.ExtType(values.TUPLE, data))
    with pytest.raises(FormatError):
        values.unpack(data, "nest")


def test_pickle_bytes_stay_opaque() -> None:
    assert values.unpack(values.pack(values.Pickled(b"cos\nsystem\n")), "x") == values.Pickled(b"cos\nsystem\n")
