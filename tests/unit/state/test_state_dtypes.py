"""Bit views of tensors, and borders of slabs anywhere in leaves of any dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.roundtrip import bits, staged

from objckpt.format.dtypes import ITEMSIZE
from objckpt.state import staging
from objckpt.state.dtypes import as_bytes, dtype_of
from objckpt.state.flatten import flatten

STORABLE = [name for name in ITEMSIZE if hasattr(torch, name)]


def made(name: str, count: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes: signalling NaNs, subnormals and negative zeros of each type are among them."""
    raw = np.random.default_rng(seed).bytes(count * ITEMSIZE[name])
    if not raw:
        return torch.empty(0, dtype=dtype_of(name, name))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype_of(name, name))


@pytest.mark.parametrize("name", STORABLE)
def test_one_element_counts_as_contiguous_with_any_stride(name: str) -> None:
    t = made(name, 2)[::2]
    assert t.is_contiguous() and t.stride() == (2,)
    assert as_bytes(t).numpy().tobytes() == bits(t)
    assert as_bytes(t).data_ptr() == t.data_ptr()
    assert as_bytes(made(name, 1).reshape(())).numel() == ITEMSIZE[name]
    assert as_bytes(made(name, 0)).numel() == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(STORABLE), st.integers(0, 9), st.integers(0, 9), st.sampled_from(["c", "t", "s"])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([16, 32, 48, 64, 256]),
    st.sampled_from([16, 64, 1 << 20]),
    st.sampled_from([0, 1 << 20]),
)
def test_borders_anywhere(
    specs: list[tuple[str, int, int, str]], slab_bytes: int, temporary_bytes: int, small_bytes: int
) -> None:
    """Slabs of any size that is a multiple of 16; with small limits also the ways of large tensors are taken."""
    state = {}
    for number, (name, rows, columns, layout) in enumerate(specs):
        t = made(name, rows * columns, number).reshape(rows, columns)
        state[str(number)] = {"c": t, "t": t.t(), "s": t[:, ::2]}[layout]
    flat = flatten(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_TEMPORARY_BYTES", temporary_bytes)
        patch.setattr(staging, "_SMALL_BYTES", small_bytes)
        got = staged(flat, slab_bytes=slab_bytes)
    assert got == [bits(leaf.tensor) for leaf in flat.leaves]
