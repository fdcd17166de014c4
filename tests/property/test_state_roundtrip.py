"""Any nested state goes through flatten, staging and back with every bit, type, order, tie and view."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.roundtrip import bits, roundtrip

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.uint16, torch.uint64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e8m0fnu]
POOL = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Windows of one pool and fresh tensors, of any dtype and stride."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    first = draw(st.integers(0, 8)) * dtype.itemsize
    flat = POOL[first : first + 256 * dtype.itemsize].view(dtype)
    if draw(st.booleans()):
        flat = flat.clone()
    t = flat[: math.prod(shape)].view(shape)
    if t.dim() and draw(st.booleans()):
        t = t.permute(draw(st.permutations(range(t.dim()))))
    if t.dim() and draw(st.booleans()):
        t = t[..., :: draw(st.integers(1, 3))]
    if draw(st.booleans()) and dtype.is_complex:
        t = t.conj()
    return t


keys = st.one_of(
    st.text(max_size=4), st.integers(-3, 300), st.booleans(), st.none(), st.sampled_from(["a/b", "%", "(0)"])
)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.booleans())
plain = st.one_of(
    st.none(), numbers, st.text(max_size=5), st.binary(max_size=5), st.sampled_from(DTYPES),
    st.frozensets(st.integers(0, 9), max_size=3), st.sampled_from([torch.Size([2, 3]), torch.device("cpu")]),
    st.sampled_from([np.float32(0.1), np.int64(3), np.bool_(True)]),
)  # fmt: skip
arrays = st.sampled_from(
    [np.arange(6.0).reshape(2, 3), np.arange(9)[::-2], np.array(True), np.zeros((0, 2), np.uint16)]
)
leaves = st.one_of(tensors(), arrays, plain)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    )


def same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert type(b) is torch.Tensor and (a.dtype, a.shape) == (b.dtype, b.shape) and bits(a) == bits(b)
    elif isinstance(a, np.ndarray):
        assert type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert type(a) is type(b) and [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for key in a:
            same(a[key], b[key])
    elif type(a) in (list, tuple):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert type(a) is type(b) and a == b


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(keys, st.recursive(leaves, nested, max_leaves=8), max_size=4), st.sampled_from([64, 4096]))
def test_states_come_back(state: dict[Any, Any], slab_bytes: int) -> None:
    same(state, roundtrip(state, slab_bytes=slab_bytes))


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4), st.data())
def test_ties_stay_ties(some: list[torch.Tensor], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(some) - 1), min_size=1, max_size=6))
    back = roundtrip({str(i): some[n] for i, n in enumerate(picks)})
    for i, n in enumerate(picks):
        same(some[n], back[str(i)])
        for j, m in enumerate(picks):
            if n == m and some[n].numel():
                assert back[str(i)].data_ptr() == back[str(j)].data_ptr()
