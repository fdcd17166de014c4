"""A state through flatten, the packed tree, staging into slabs and back: all of `state/`, without a store."""

from __future__ import annotations

import gc
from typing import Any

import torch

from objckpt.format import values
from objckpt.format.values import TensorLeaf
from objckpt.restore.place import view_of
from objckpt.state.dtypes import as_bits, as_bytes, dtype_of
from objckpt.state.flatten import Flat, flatten
from objckpt.state.staging import Stager
from objckpt.state.unflatten import to_python


def extents(flat: Flat) -> list[tuple[int, int]]:
    """The leaves back to back."""
    out, at = [], 0
    for leaf in flat.leaves:
        out.append((at, leaf.nbytes))
        at += leaf.nbytes
    return out


def staged(flat: Flat, *, slab_bytes: int = 4096, stager: Stager | None = None) -> list[bytes]:
    """The bytes of each leaf, by way of slabs full of other bytes."""
    places = extents(flat)
    total = sum(n for _, n in places)
    slabs = [memoryview(bytearray(b"\xa5" * slab_bytes)) for _ in range(-(-total // slab_bytes))]
    (stager or Stager()).stage(flat.leaves, places, slabs)
    whole = b"".join(slabs)
    assert whole[total:] == b"\xa5" * (len(whole) - total)
    return [whole[start : start + n] for start, n in places]


def roundtrip(state: Any, *, pickle: bool = False, slab_bytes: int = 4096) -> Any:
    """What a restore of the state gives."""
    flat = flatten(state, pickle=pickle)
    tree = values.unpack(values.pack(flat.tree), "tree")
    stored: dict[str, torch.Tensor] = {}
    for leaf, raw in zip(flat.leaves, staged(flat, slab_bytes=slab_bytes), strict=True):
        tensor = torch.empty(leaf.shape, dtype=dtype_of(leaf.dtype, leaf.fqn))
        if raw:
            as_bytes(tensor).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        stored[leaf.fqn] = tensor

    def tensor_of(path: tuple[Any, ...], leaf: TensorLeaf) -> Any:
        tensor = stored[leaf.fqn] if leaf.view is None else view_of(stored[leaf.fqn], leaf.view, leaf.fqn)
        return tensor.numpy() if leaf.numpy else tensor

    return to_python(tree, tensor_of, pickle=pickle)


def bits(tensor: torch.Tensor) -> bytes:
    """The row-major bytes, by another way than the code under test."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return as_bits(plain).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def collect() -> None:
    for _ in range(3):
        gc.collect()
