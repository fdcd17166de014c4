"""The way of a training state through flatten and staging into small slabs, and back: no store, no files.

Small slabs put borders inside tensors; the real ones are 64 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from objckpt.format import values
from objckpt.format.values import TensorLeaf
from objckpt.restore.place import view_of
from objckpt.save.plan import LeafPlan, lay_out, slabs_for
from objckpt.state.dtypes import as_bits, dtype_of
from objckpt.state.flatten import Flat, flatten
from objckpt.state.staging import Stager
from objckpt.state.unflatten import to_python

SLAB_BYTES = 64


def bits(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor of any dtype and strides."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return as_bits(plain).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def stage(flat: Flat, slab_bytes: int = SLAB_BYTES, stager: Stager | None = None) -> tuple[bytes, list[LeafPlan]]:
    """The snapshot of all leaves, and the place of each."""
    plans, total = lay_out([leaf.nbytes for leaf in flat.leaves])
    slabs = [bytearray(b"\xa5" * slab_bytes) for _ in range(slabs_for(total, slab_bytes))]
    extents = [(plan.start, plan.nbytes) for plan in plans]
    (stager or Stager()).stage(flat.leaves, extents, [memoryview(slab) for slab in slabs])
    snapshot = b"".join(slabs)
    assert snapshot[total:] == b"\xa5" * (len(snapshot) - total), "bytes behind the last leaf were written"
    return snapshot[:total], plans


def unstage(flat: Flat, snapshot: bytes, plans: list[LeafPlan], *, pickle: bool = False) -> Any:
    """The state from the snapshot and the packed tree. Leaves of one stored tensor share its memory."""
    stored: dict[str, torch.Tensor] = {}
    for leaf, plan in zip(flat.leaves, plans, strict=True):
        memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
        if plan.nbytes:
            memory.copy_(
                torch.frombuffer(bytearray(snapshot[plan.start : plan.start + plan.nbytes]), dtype=torch.uint8)
            )
        stored[leaf.fqn] = memory.view(dtype_of(leaf.dtype, leaf.fqn)).view(leaf.shape)

    def tensor_of(path: tuple[Any, ...], leaf: TensorLeaf) -> Any:
        tensor = stored[leaf.fqn]
        if leaf.view is not None:
            tensor = view_of(tensor, leaf.view, leaf.fqn)
        return tensor.numpy() if leaf.numpy else tensor

    return to_python(values.unpack(values.pack(flat.tree), "tree"), tensor_of, pickle=pickle)


def through(state: Mapping[Any, Any], *, slab_bytes: int = SLAB_BYTES, pickle: bool = False) -> Any:
    """The state after a whole way."""
    flat = flatten(state, pickle=pickle)
    return unstage(flat, *stage(flat, slab_bytes), pickle=pickle)
