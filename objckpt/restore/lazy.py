"""A checkpoint as a read-only mapping: values at once, tensors and slices of them when they are asked for."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from objckpt.errors import UsageError
from objckpt.format.fqn import to_fqn
from objckpt.format.values import Pickled, TensorLeaf, ViewSpec
from objckpt.geometry import Box
from objckpt.restore.match import leaves
from objckpt.restore.open import Checkpoint, StoredShard, view_end
from objckpt.restore.plan import Runs, grid_runs
from objckpt.store import Store

if TYPE_CHECKING:
    import torch

Index = int | slice | EllipsisType

_NEAR, _COMPARED = (
    3,
    5000,
)  # names that are shown; leaves among which like ones are looked for, about a third of a second


def lazy(store: Store, checkpoint: Checkpoint, *, pickle: bool = False) -> LazyState:
    """See `LazyState`. `pickle=True` unpickles values, which runs code from the checkpoint. Makes no request."""
    return LazyState(store, checkpoint, pickle)


class LazyState(Mapping[str, Any]):
    """FQN → `LazyTensor` or value. Nothing is fetched before a `LazyTensor` is indexed; threads may share it.

    A value that torch has a type for (dtype, device, Size) imports torch when it is looked up.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, pickle: bool = False) -> None:
        self._store, self.checkpoint, self._pickle = store, checkpoint, pickle
        self._leaves = {to_fqn(path): leaf for path, leaf in leaves(checkpoint.tree) if path}

    def __getitem__(self, fqn: str) -> Any:
        if fqn not in self._leaves:
            raise KeyError(
                f"{fqn}: the checkpoint of step {self.checkpoint.commit.step} has no such leaf{self._near(fqn)}"
            )
        leaf = self._leaves[fqn]
        if type(leaf) is TensorLeaf:
            return LazyTensor(self._store, self.checkpoint, fqn, leaf)
        if type(leaf) is Pickled or type(leaf).__module__ == TensorLeaf.__module__:
            from objckpt.state.unflatten import to_python

            return to_python(leaf, lambda path, leaf: None, pickle=self._pickle, path=(fqn,))
        return leaf

    def get(self, fqn: str, default: Any = None) -> Any:
        """The leaf, or `default`."""
        return self[fqn] if fqn in self._leaves else default

    def _near(self, fqn: str) -> str:
        name = str(fqn)
        near = [other for other in self._leaves if name in other][:_NEAR]
        if len(self._leaves) <= _COMPARED:
            near = difflib.get_close_matches(name, self._leaves, _NEAR) or near
        return f"; near it: {', '.join(near)}" if near else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._leaves

    def __repr__(self) -> str:
        return f"<checkpoint of step {self.checkpoint.commit.step} in {self._store.url}: {len(self)} leaves>"


class LazyTensor:
    """A stored tensor. Indexing it with ints, slices and `...` fetches the chunks that hold the elements, and blocks.

    `shape` in elements, `dtype` by torch's name ("bfloat16"). Fetching raises IntegrityError and StoreError.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, fqn: str, leaf: TensorLeaf) -> None:
        self._store, self._checkpoint, self._leaf = store, checkpoint, leaf
        self.fqn = fqn
        self.dtype, self.shape = checkpoint.describe(leaf)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, as a dense tensor would have."""
        from objckpt.format.dtypes import ITEMSIZE

        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"LazyTensor({self.fqn!r}, {self.dtype}, {list(self.shape)})"

    def load(self) -> torch.Tensor:
        """All of it, as a new CPU tensor."""
        return self[...]

    def numpy(self) -> np.ndarray[Any, Any]:
        """All of it, as a numpy array. TypeError for a dtype that numpy does not have, such as bfloat16."""
        array: np.ndarray[Any, Any] = self.load().numpy()
        return array

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """A new CPU tensor with the elements that numpy's basic indexing gives (negative steps too)."""
        ranges, squeezed = _ranges(index, self.shape)
        if self._leaf.view is not None:
            return _dense(self._view(self._leaf.view), ranges, squeezed)
        # Ascending order for reading; dimensions asked for backwards are turned at the end.
        grid = [r if r.step > 0 else r[::-1] for r in ranges]
        tensor = self._read(grid)
        flips = [d for d, r in enumerate(ranges) if r.step < 0 and len(r) > 1]
        if flips:
            from objckpt.restore.place import flip

            tensor = flip(tensor, flips)
        return tensor.reshape([len(r) for r, gone in zip(ranges, squeezed, strict=True) if not gone])

    def _read(self, grid: Sequence[range]) -> torch.Tensor:
        from objckpt.restore import place

        stored = self._checkpoint.tensors[self._leaf.fqn]
        out = place.new(stored, [len(r) for r in grid])
        parts: list[tuple[StoredShard, Runs | None, torch.Tensor]] = []
        later: list[tuple[tuple[slice, ...], torch.Tensor]] = []
        rows, _ = stored.boxes.common(_hull(grid))
        for shard in map(stored.shard, rows.tolist()):
            box = shard.entry.box
            cells = [_within(r, at, at + n) for r, at, n in zip(grid, box.offset, box.shape, strict=True)]
            if not all(len(c) for c in cells):
                continue
            part = [r[c.start : c.stop] for r, c in zip(grid, cells, strict=True)]
            spot = tuple(slice(c.start, c.stop) for c in cells)
            whole = all(len(c) == len(r) for c, r in zip(cells, grid, strict=True))
            memory = out if whole else place.new(stored, [len(p) for p in part])
            if not whole:
                later.append((spot, memory))
            parts.append((shard, grid_runs(shard, part), memory))
        place.read(self._store, self._checkpoint, stored, parts)
        for spot, memory in later:
            place.put(out, spot, memory)
        return out

    def _view(self, view: ViewSpec) -> torch.Tensor:
        """The view's bytes; of a base that is one shard only the extent that the view touches is read."""
        from objckpt.restore import place

        stored = self._checkpoint.tensors[self._leaf.fqn]
        whole = [s for s in stored.shards if s.entry.shape == stored.shape]
        if whole and 0 not in view.shape:
            nbytes = view_end(view) - view.byte_offset
            memory = place.raw(nbytes)
            runs = Runs(np.array([view.byte_offset], np.int64), nbytes)
            place.read(self._store, self._checkpoint, stored, [(whole[0], runs, memory)])
            return place.view_of(memory, ViewSpec(view.dtype, 0, view.shape, view.stride), self.fqn)
        base = self._read([range(n) for n in stored.shape])
        return place.view_of(base, view, self.fqn)


def _hull(grid: Sequence[range]) -> Box:
    """The smallest box that has every element of a grid of ascending ranges."""
    ends = [(r[0], r[-1] + 1) if len(r) else (0, 0) for r in grid]
    return Box(tuple(start for start, _ in ends), tuple(end - start for start, end in ends))


def _within(grid: range, start: int, stop: int) -> range:
    """The positions of `grid`, ascending, whose values lie in `[start, stop)`."""
    low = max(0, -(-(start - grid.start) // grid.step))
    high = min(len(grid), -(-(stop - grid.start) // grid.step))
    return range(low, max(low, high))


def _ranges(index: Any, shape: tuple[int, ...]) -> tuple[list[range], list[bool]]:
    """For each dimension the indexes wanted, and whether the dimension disappears."""
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        plain = item is ... or isinstance(item, slice) or (hasattr(item, "__index__") and not isinstance(item, bool))
        if not plain:
            raise UsageError(
                f"a stored tensor is indexed by ints, slices and `...`, not by {type(item).__name__}; "
                ".load() gives a tensor that takes any index"
            )
    dots = [i for i, item in enumerate(items) if item is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis (`...`)")
    given = len(items) - len(dots)
    if given > len(shape):
        raise IndexError(f"too many indices: the tensor is {len(shape)}-dimensional, but {given} were given")
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * (len(shape) - given)
    ranges, squeezed = [], []
    for item, size in zip(items, shape, strict=True):
        if isinstance(item, slice):
            ranges.append(range(*item.indices(size)))
        else:
            number = item.__index__()
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of bounds for a dimension of size {size}")
            ranges.append(range(number % size, number % size + 1))
        squeezed.append(not isinstance(item, slice))
    return ranges, squeezed


def _dense(tensor: torch.Tensor, ranges: Sequence[range], squeezed: Sequence[bool]) -> torch.Tensor:
    """Basic indexing of a tensor by ranges that may go backwards; always a new contiguous tensor."""
    from objckpt.restore.place import flip

    forward = [r if r.step > 0 else r[::-1] for r in ranges]
    picked = tensor[tuple(slice(r.start, max(r.stop, 0), r.step) for r in forward)] if forward else tensor
    flips = [d for d, r in enumerate(ranges) if r.step < 0 and len(r) > 1]
    kept = [len(r) for r, gone in zip(ranges, squeezed, strict=True) if not gone]
    return flip(picked, flips).reshape(kept).clone()
