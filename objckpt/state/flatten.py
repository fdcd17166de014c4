"""Training state to a neutral tree and the tensors in it.

Every tensor is stored once. Tensors that are the same window of the same memory share a leaf (tied weights); a window
inside a contiguous leaf becomes a view of it; anything else is a leaf of its own, with only its own bytes.

In a job of several ranks each flattens its own state. A DTensor gives the boxes that this rank holds; all else counts as
replicated. Of each replicated thing one rank writes the bytes, and all ranks agree on which without a word: they must
have the same replicated leaves, which the signature tells.
"""

from __future__ import annotations

import io
import math
import pickle as pickling
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from objckpt import limits
from objckpt.errors import UnsupportedDtypeError, UnsupportedTypeError, UsageError
from objckpt.format import checksums, values
from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.fqn import to_fqn
from objckpt.format.index import PER_RANK
from objckpt.format.tables import TensorEntry
from objckpt.format.values import Pickled, TensorLeaf, TorchDevice, TorchDtype, TorchSize
from objckpt.geometry import Layout
from objckpt.state import shards
from objckpt.state.dtypes import dtype_name
from objckpt.state.leaf import Leaf, extent, replaced, share
from objckpt.state.shards import Held

Path = tuple[Any, ...]
_NUMPY_DTYPES = {name: np.dtype(name) for name in ITEMSIZE if hasattr(np, name) and name not in ("bool",)}
_NUMPY_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items()} | {np.dtype(bool): "bool"}


@dataclass(slots=True)
class Flat:
    """`tree` is neutral (see format/values); `leaves` are unique, by descending item size: each starts aligned.

    `leaves` are those that this rank writes. `own` is the tree of what belongs to this rank alone; None: nothing does.
    `replicated` has the FQN of each value and tensor, and a digest of what all ranks should have alike: the value; dtype and
    (global) shape of the tensor.
    """

    tree: Any
    leaves: list[Leaf]
    own: Any = None
    replicated: list[tuple[str, int]] = field(default_factory=list)
    global_bytes: int = 0  # of all tensors of the checkpoint, those of other ranks too
    tensors: int = 0
    described: list[TensorEntry] = field(default_factory=list)  # on rank 0 of several: all tensors, and who writes them
    submesh: bool = False  # some DTensor is on a part of the ranks only: others may have another one of its name


def flatten(
    state: Mapping[Any, Any],
    *,
    pickle: bool = False,
    per_rank: Mapping[Any, Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Flat:
    """Walk the state; objects with `state_dict()` are asked for it once. Copies no tensor, communicates nothing.

    Raises:
        UsageError: the state is no mapping, or has a part "per_rank" beside the argument.
        UnsupportedTypeError: a leaf cannot be stored bit by bit, a container contains itself or is nested too deeply.
            The message has its path, its type and a remedy.
        UnsupportedDtypeError: the same of a tensor's dtype.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"the training state must be a mapping of names to parts, not {type(state).__name__}")
    if PER_RANK in state:
        raise UsageError(
            f'the state has a part "{PER_RANK}", where the checkpoint keeps the argument of this name; rename it'
        )
    walk = _Walk(pickle)
    tree = walk.visit(state, ())
    shared, aliases = share(walk.leaves)
    tree = replaced(tree, aliases) if aliases else tree
    known = _known(shared, walk.distributed, world_size)
    writers = shards.choose_writers(known)
    leaves = _to_write(shared, walk.distributed, writers, rank)
    global_bytes = sum(leaf.nbytes for leaf in shared)
    global_bytes += sum(math.prod(leaf.global_shape or ()) * leaf.itemsize for leaf, _ in walk.distributed)
    tensors = len(shared) + len(walk.distributed)
    own = None
    if per_rank is not None:
        own, mine = _of_one_rank(state, per_rank, rank, pickle)
        leaves = leaves + mine
        global_bytes += sum(leaf.nbytes for leaf in mine) * world_size  # an estimate: those of the others are not known
        tensors += len(mine) * world_size
    replicated = _replicated(tree, shared, walk.distributed, world_size) if world_size > 1 else []
    ordered = sorted(leaves, key=lambda leaf: -leaf.itemsize)
    submesh = any(len(held.layout.ranks) < world_size for _, held in walk.distributed)
    flat = Flat(tree, ordered, own, replicated, global_bytes, tensors, submesh=submesh)
    if world_size > 1 and rank == 0:
        flat.described = _described(known, [*shared, *(leaf for leaf, _ in walk.distributed)], writers)
    return flat


def _known(shared: list[Leaf], distributed: list[tuple[Leaf, Held]], world_size: int) -> list[shards.Replicated]:
    """What all ranks know alike of the leaves."""
    world = Layout(tuple(range(world_size)), (world_size,), (None,))
    known = [shards.Replicated(leaf.fqn, leaf.nbytes, world) for leaf in shared]
    for leaf, held in distributed:
        nbytes = math.prod(leaf.global_shape or ()) * leaf.itemsize
        parts = len(held.layout.ranks) // held.layout.replicas
        known.append(shards.Replicated(leaf.fqn, nbytes // parts, held.layout))
    return known


def _to_write(
    shared: list[Leaf], distributed: list[tuple[Leaf, Held]], writers: Mapping[str, int], rank: int
) -> list[Leaf]:
    """The leaves whose bytes this rank writes."""
    out = [leaf for leaf in shared if writers[leaf.fqn] == rank]
    for leaf, held in distributed:
        if writers[leaf.fqn] == held.replica:
            out += [
                replace(leaf, tensor=shards.local_part(leaf.tensor, piece.local), offset=piece.box.offset)
                for piece in held.pieces
            ]
            if not math.prod(leaf.global_shape or ()):  # nobody holds a piece, and it must be listed
                out.append(replace(leaf, tensor=leaf.tensor.new_empty(leaf.global_shape or ())))
    return out


def _described(known: list[shards.Replicated], leaves: list[Leaf], writers: Mapping[str, int]) -> list[TensorEntry]:
    """All tensors of the job, and where each is."""
    return [
        TensorEntry(leaf.path, leaf.dtype, leaf.global_shape or leaf.shape, each.layout, writers[leaf.fqn])
        for each, leaf in zip(known, leaves, strict=True)
    ]


def _of_one_rank(
    state: Mapping[Any, Any], per_rank: Mapping[Any, Any], rank: int, pickle: bool
) -> tuple[Any, list[Leaf]]:
    if not isinstance(per_rank, Mapping):
        raise UsageError(f"per_rank must be a mapping of names to parts, not {type(per_rank).__name__}")
    walk = _Walk(pickle)
    tree = walk.visit({PER_RANK: {rank: dict(per_rank)}}, ())
    if walk.distributed:
        leaf = walk.distributed[0][0]
        raise UnsupportedTypeError(
            f"{leaf.fqn}: a DTensor belongs to several ranks: put it into the state, not into per_rank", fqn=leaf.fqn
        )
    leaves, aliases = share(walk.leaves)
    return replaced(tree, aliases) if aliases else tree, leaves


def _replicated(
    tree: Any, shared: list[Leaf], distributed: list[tuple[Leaf, Held]], world_size: int
) -> list[tuple[str, int]]:
    """What every rank should have alike, by FQN. Containers count by their leaves."""
    # Of distributed tensors too: a rank that has other ones than rank 0 would not find them in the tree, which is rank 0's.
    # And how they are cut: of pieces that were cut unlike no reader could make a tensor.
    stored = {}
    for leaf, held in distributed:
        on_all = len(held.layout.ranks) == world_size
        cut = f"{held.layout.mesh} {held.layout.cuts}" if on_all else "on a part of the ranks"
        stored[leaf.fqn] = f"{leaf.dtype} {leaf.global_shape} distributed {cut}"
    stored |= {leaf.fqn: f"{leaf.dtype} {leaf.shape}" for leaf in shared}
    out = []
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict) and node:
            stack.extend(((*path, key), child) for key, child in node.items())
        elif type(node) in (list, tuple) and node:
            stack.extend(((*path, i), child) for i, child in enumerate(node))
        elif type(node) is not TensorLeaf:
            out.append((to_fqn(path), checksums.crc64(values.pack(node))))
        else:
            fqn = to_fqn(path)
            out.append((fqn, checksums.crc64(stored.get(fqn, repr(node)).encode())))
    return sorted(out)


class _Walk:
    def __init__(self, pickle: bool) -> None:
        self.pickle = pickle
        self.leaves: list[Leaf] = []
        self.distributed: list[tuple[Leaf, Held]] = []
        self.tied: dict[Any, str] = {}  # what tells one distributed tensor from another → its first FQN
        self.open: set[int] = set()  # containers and objects that we are inside of
        self.fqns: set[str] = set()

    def visit(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._distributed(value, path) if shards.is_distributed(value) else self._tensor(value, path)
        kind = type(value)
        if kind in (dict, OrderedDict, list, tuple) or (isinstance(value, Mapping) and not path):
            return self._container(value, path)
        if kind is np.ndarray and value.dtype in _NUMPY_NAMES:
            return self._numpy(value, path)
        if isinstance(value, torch.dtype):
            return TorchDtype(str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return TorchDevice(str(value))
        if kind is torch.Size:
            return TorchSize(tuple(value))
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            return self._nested(value, path, lambda: self.visit(_state_of(value, path), path))
        return self._plain(value, path)

    def _container(self, value: Any, path: Path) -> Any:
        return self._nested(value, path, lambda: self._children(value, path))

    def _children(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            out: dict[Any, Any] = OrderedDict() if type(value) is OrderedDict else {}
            for key, child in value.items():
                out[key] = self.visit(child, (*path, key))
            if hasattr(value, "_metadata") and isinstance(out, OrderedDict):
                out._metadata = value._metadata  # type: ignore[attr-defined]
            return out
        children = [self.visit(child, (*path, i)) for i, child in enumerate(value)]
        return tuple(children) if type(value) is tuple else children

    def _nested(self, value: Any, path: Path, inside: Callable[[], Any]) -> Any:
        if id(value) in self.open:
            raise UnsupportedTypeError(
                f"{to_fqn(path)}: this {type(value).__qualname__} contains itself; remove the cycle", fqn=to_fqn(path)
            )
        # An object may give another one as its state, without end and without a longer path: both are counted.
        if max(len(path), len(self.open) // 2) > limits.MAX_VALUE_DEPTH:
            raise UnsupportedTypeError(
                f"{to_fqn(path[:8])}/…: nested deeper than {limits.MAX_VALUE_DEPTH}; flatten this part of the state",
                fqn=to_fqn(path[:8]),
            )
        self.open.add(id(value))
        try:
            return inside()
        finally:
            self.open.discard(id(value))

    def _plain(self, value: Any, path: Path) -> Any:
        try:
            values.pack(value)
        except UnsupportedTypeError as err:
            if not self.pickle:
                raise _at(err, path) from None
            try:
                return Pickled(_pickled(value))
            except Exception as why:
                raise UnsupportedTypeError(
                    f"{to_fqn(path)}: a value of type {type(value).__qualname__} cannot be pickled: {why}",
                    fqn=to_fqn(path),
                ) from why
        return value

    def _numpy(self, value: np.ndarray[Any, Any], path: Path) -> TensorLeaf:
        fqn = self._name(path)
        name = _NUMPY_NAMES[value.dtype]
        # Read-only memory, negative strides and fields of records are unknown to torch: such arrays are copied already.
        known = value.flags.writeable and all(s >= 0 and s % value.itemsize == 0 for s in value.strides)
        self.leaves.append(Leaf(path, fqn, torch.from_numpy(value if known else value.copy()), name, True))
        return TensorLeaf(fqn, True)

    def _tensor(self, value: torch.Tensor, path: Path) -> TensorLeaf:
        fqn = self._name(path)
        _refuse_what_has_no_plain_bytes(value, fqn)
        name = dtype_name(value.dtype, fqn)
        leaf = Leaf(path, fqn, value.detach(), name, False)
        if leaf.nbytes and extent(leaf)[1] > leaf.tensor.untyped_storage().nbytes():
            raise UnsupportedTypeError(
                f"{fqn}: the memory of this {type(value).__qualname__} is freed or shorter than its shape "
                f"{tuple(value.shape)} (FSDP does so between uses); take it from the wrapper's state_dict()",
                fqn=fqn,
            )
        self.leaves.append(leaf)
        return TensorLeaf(fqn)

    def _distributed(self, value: Any, path: Path) -> TensorLeaf:
        fqn = self._name(path)
        held = shards.layout_of(value, fqn)
        local = value.to_local().detach()
        _refuse_what_has_no_plain_bytes(local, fqn)
        name = dtype_name(value.dtype, fqn)
        ends = [tuple(map(sum, zip(p.local.offset, p.local.shape, strict=True))) for p in held.pieces]
        size = tuple(map(max, zip(*ends, strict=True))) if value.ndim and ends else tuple(local.shape)
        if tuple(local.shape) != size or (not ends and local.numel()):
            raise UnsupportedTypeError(
                f"{fqn}: the local tensor of this DTensor has the shape {tuple(local.shape)}, its placements "
                f"{value.placements} give this rank {size}: was it made by from_local() without its global shape?",
                fqn=fqn,
            )
        leaf = Leaf(path, fqn, local, name, False, tuple(value.shape), (0,) * value.ndim)
        # Storages are told apart by themselves, not by address: empty shards have none, and all ranks must see the same ties.
        window = (
            local.untyped_storage()._cdata, local.storage_offset(), local.stride(), name, local.is_conj(), local.is_neg()
        )  # fmt: skip
        tied = self.tied.setdefault((*window, leaf.global_shape, held.layout), fqn)
        if tied == fqn:
            self.distributed.append((leaf, held))
        return TensorLeaf(tied)

    def _name(self, path: Path) -> str:
        """The FQN of a leaf, which must be one that a reader accepts, and no other leaf's."""
        fqn = to_fqn(path)
        if len(fqn.encode()) > limits.MAX_FQN_BYTES:
            raise UnsupportedTypeError(
                f"{fqn[:80]}…: the name of this leaf has more than {limits.MAX_FQN_BYTES} bytes; use shorter keys",
                fqn=fqn,
            )
        if fqn in self.fqns:  # two nan keys differ for a dict only
            raise UnsupportedTypeError(f"{fqn}: two leaves have this name; use other keys", fqn=fqn)
        self.fqns.add(fqn)
        return fqn


def _state_of(value: Any, path: Path) -> Any:
    try:
        return value.state_dict()
    except TypeError as err:  # most often a state_dict() that wants arguments; others tell their own story
        raise UnsupportedTypeError(
            f"{to_fqn(path)}: {type(value).__qualname__}.state_dict() failed: {err}; pass what it returns instead",
            fqn=to_fqn(path),
        ) from err


class _Pickler(pickling.Pickler):
    """Refuses tensors: a pickle drags their whole storages along, unchecked and untied."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
            raise TypeError(f"it holds a {type(value).__qualname__}; put tensors into dicts or lists of the state")


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def _at(err: UnsupportedTypeError, path: Path) -> UnsupportedTypeError:
    """The refusal of the value at `path`, or of a part of it, with the whole path and this layer's remedy."""
    inner, _, why = err.message.partition("; ")[0].partition(": ")
    where = to_fqn(path) if inner == "<top>" else f"{to_fqn(path)}/{inner}"
    return UnsupportedTypeError(
        f"{where}: {why}; convert it to plain values, drop it from the state, or pass SaveOptions(pickle=True)",
        fqn=where,
    )


def _refuse_what_has_no_plain_bytes(tensor: torch.Tensor, fqn: str) -> None:
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            why = f"a {name} has no data yet: run the lazy module once, then save"
        else:
            why = f"the tensor subclass {name} is not stored: save its parts (values, scales) as plain tensors"
    elif tensor.layout is not torch.strided:
        why = f"a tensor of layout {tensor.layout} is not stored: save to_dense() of it, or its values and indices"
    elif tensor.device.type == "meta":
        why = "a tensor on the meta device has no data: materialise the module (to_empty) before it is saved"
    elif tensor.is_quantized:
        dtype = str(tensor.dtype)
        message = f"{fqn}: a quantised tensor ({dtype}) is not stored: save int_repr(), scales and zero points of it"
        raise UnsupportedDtypeError(message, fqn=fqn, dtype=dtype.removeprefix("torch."))
    elif tensor.is_nested:
        why = "a nested tensor is not stored: save unbind() of it"
    else:
        return
    raise UnsupportedTypeError(f"{fqn}: {why}", fqn=fqn)
