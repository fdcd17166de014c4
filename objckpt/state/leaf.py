"""A tensor to be stored, and which of them share memory: ties, and windows of a bigger one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.values import TensorLeaf, ViewSpec

Path = tuple[Any, ...]


@dataclass(slots=True)
class Leaf:
    """A tensor to be stored: detached, any strides and device; its bytes are not copied yet.

    Conjugate and negative views are as they are: staging resolves them one by one, so that memory stays bounded.
    """

    path: Path
    fqn: str
    tensor: torch.Tensor
    dtype: str
    numpy: bool
    global_shape: tuple[int, ...] | None = None  # of the distributed tensor that this is a box of
    offset: tuple[int, ...] | None = None  # … and where in it, in elements

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.itemsize


def _memory(leaf: Leaf) -> tuple[Any, ...]:
    """What tells one storage from another while all leaves are alive. An array is a new storage at each look."""
    return (leaf.tensor.device, leaf.tensor.untyped_storage().data_ptr(), leaf.numpy)


def _window(leaf: Leaf) -> tuple[Any, ...]:
    """What tells one window of a storage from another."""
    t = leaf.tensor
    return (t.storage_offset(), leaf.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())


def extent(leaf: Leaf) -> tuple[int, int]:
    """The bytes of its storage that a non-empty leaf touches, `[start, end)`."""
    t = leaf.tensor
    start = int(t.storage_offset()) * leaf.itemsize
    if t.is_contiguous():
        return start, start + leaf.nbytes
    last = sum((n - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * leaf.itemsize


def _plain(leaf: Leaf) -> bool:
    """Whether the storage's bytes are the leaf's own bits."""
    return not (leaf.tensor.is_conj() or leaf.tensor.is_neg())


def share(found: list[Leaf]) -> tuple[list[Leaf], dict[str, TensorLeaf]]:
    """The leaves to store, and for each of the others the tree leaf that stands for it."""
    groups: dict[tuple[Any, ...], list[Leaf]] = {}
    for leaf in found:
        if leaf.nbytes:
            groups.setdefault(_memory(leaf), []).append(leaf)
    stand_ins: dict[str, TensorLeaf] = {}
    for group in groups.values():
        if len(group) > 1:
            stand_ins |= _share_storage(group)
    return [leaf for leaf in found if leaf.fqn not in stand_ins], stand_ins


def _share_storage(group: list[Leaf]) -> dict[str, TensorLeaf]:
    """The same for the leaves of one storage."""
    first: dict[tuple[Any, ...], Leaf] = {}
    ties = {leaf.fqn: first.setdefault(_window(leaf), leaf).fqn for leaf in group}
    views: dict[str, TensorLeaf] = {}
    # By start, the longest first; so a leaf lies inside an earlier one if it ends before the furthest of them.
    # Of equal extents a contiguous one comes first: only it can hold others.
    spans = [(*extent(leaf), leaf) for leaf in first.values()]
    base, base_start, base_end = None, 0, -1
    for start, end, leaf in sorted(spans, key=lambda s: (s[0], -s[1], not s[2].tensor.is_contiguous(), -s[2].itemsize)):
        inside = base is not None and end <= base_end and (start - base_start) % leaf.itemsize == 0
        if base is not None and inside and _plain(leaf):
            view = ViewSpec(leaf.dtype, start - base_start, leaf.shape, tuple(leaf.tensor.stride()))
            views[leaf.fqn] = TensorLeaf(base.fqn, leaf.numpy, view)
        elif end > base_end and leaf.tensor.is_contiguous() and _plain(leaf):
            base, base_start, base_end = leaf, start, end
    out = {fqn: views.get(to, TensorLeaf(to, group[0].numpy)) for fqn, to in ties.items() if fqn != to}
    return out | views


def replaced(tree: Any, aliases: dict[str, TensorLeaf]) -> Any:
    if type(tree) is TensorLeaf:
        return aliases.get(tree.fqn, tree)
    if isinstance(tree, dict):
        for key in tree:
            tree[key] = replaced(tree[key], aliases)
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(replaced(child, aliases) for child in tree)
    return tree
