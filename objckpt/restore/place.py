"""The last stage: a checkpoint's bytes into tensors. The only torch of a restore.

A stored part goes straight into the target's memory where that is contiguous host memory of the stored dtype. All else
(device, strided, cast, a shard across the target's rows) passes pieces of bounded size through scratch memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from objckpt.errors import UsageError
from objckpt.events import Progress, ignore
from objckpt.format.values import TensorLeaf, ViewSpec
from objckpt.geometry import Box, whole
from objckpt.restore.fetch import fetch
from objckpt.restore.open import Checkpoint, StoredShard, StoredTensor
from objckpt.restore.plan import ChunkRead, Region, Runs, box_runs, chunks_for, coalesce, overlaps, request_bytes, split
from objckpt.state.dtypes import as_bits, as_bytes, dtype_of
from objckpt.state.shards import is_distributed, layout_of, local_part
from objckpt.store import Store

PIECE_BYTES = 32 * 1024 * 1024  # scratch of one piece that is placed in one copy
Path = tuple[Any, ...]


def read(
    store: Store,
    checkpoint: Checkpoint,
    stored: StoredTensor,
    parts: list[tuple[StoredShard, Runs | None, torch.Tensor]],
) -> None:
    """Fetch parts of shards into new contiguous CPU tensors of their size. Blocks."""
    chunks: list[ChunkRead] = []
    for shard, runs, tensor in parts:
        chunks += chunks_for(shard, runs, Region(stored.fqn, _memory(tensor)))
    fetch(store, coalesce(chunks), what=f"step {checkpoint.commit.step}", stage="read")


def new(stored: StoredTensor, shape: list[int]) -> torch.Tensor:
    """An uninitialised CPU tensor of the stored dtype."""
    return torch.empty(shape, dtype=dtype_of(stored.dtype, stored.fqn), device="cpu")


def raw(nbytes: int) -> torch.Tensor:
    """Uninitialised bytes, aligned for every dtype."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def put(out: torch.Tensor, spot: tuple[slice, ...], part: torch.Tensor) -> None:
    """Copy `part` to a place in `out`, bit by bit."""
    copy(out[spot], part)


def new_like(tensor: torch.Tensor, dtype: str, fqn: str) -> torch.Tensor:
    """An uninitialised tensor of a stored dtype with the layout, device and sharding of `tensor`."""
    return torch.empty_like(tensor.detach(), dtype=dtype_of(dtype, fqn))


def flip(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """`tensor` turned around in `dims`, whatever its dtype."""
    return as_bits(tensor).flip(dims).view(tensor.dtype) if dims else tensor


# ---- new tensors ---------------------------------------------------------------------------------------------------


class NewTensors:
    """Makes one tensor for each stored one that is asked for, and gives out it or views of it."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.stored: dict[str, torch.Tensor] = {}
        self.views: dict[tuple[str, ViewSpec], torch.Tensor] = {}

    def tensor_of(self, path: Path, leaf: TensorLeaf) -> Any:
        """For `to_python`: equal leaves are one tensor."""
        base = self.stored.get(leaf.fqn)
        if base is None:
            stored = self.checkpoint.tensors[leaf.fqn]
            place = torch.device("cpu") if leaf.numpy and self.device.type != "meta" else self.device
            base = torch.empty(stored.shape, dtype=dtype_of(stored.dtype, leaf.fqn), device=place)
            self.stored[leaf.fqn] = base
        tensor = base
        if leaf.view is not None:
            key = (leaf.fqn, leaf.view)
            if key not in self.views:
                self.views[key] = view_of(base, leaf.view, leaf.fqn)
            tensor = self.views[key]
        return tensor.numpy() if leaf.numpy and self.device.type != "meta" else tensor


def view_of(base: torch.Tensor, view: ViewSpec, fqn: str) -> torch.Tensor:
    """The window `view` of a contiguous tensor that starts at its storage's first byte; shares its memory."""
    dtype = dtype_of(view.dtype, fqn)
    if base.device.type == "meta":
        return torch.empty_strided(view.shape, view.stride, dtype=dtype, device="meta")
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), view.byte_offset // dtype.itemsize, view.shape, view.stride)


# ---- filling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Memory to fill, and which box of the stored tensor it takes, in global elements."""

    tensor: torch.Tensor
    box: Box


class Filler:
    """Collects targets, plans, fetches, and copies what is left. Of a DTensor only the local boxes are filled."""

    def __init__(self, store: Store, checkpoint: Checkpoint, progress: Progress = ignore) -> None:
        self.store, self.checkpoint, self.progress = store, checkpoint, progress
        self.targets: dict[str, list[_Target]] = {}
        self.views: list[tuple[TensorLeaf, torch.Tensor]] = []
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, source: copied when all else is done
        self.windows: dict[Any, str] = {}
        self.placer = _Placer()

    def add_leaf(self, leaf: TensorLeaf, target: torch.Tensor) -> None:
        """Fill `target` with a leaf of the tree."""
        if leaf.view is not None:
            self.views.append((leaf, target))
        else:
            self.add(self.checkpoint.tensors[leaf.fqn], target)

    def add(self, stored: StoredTensor, target: torch.Tensor) -> None:
        """Fill `target`, which has the shape of `stored`. A window of memory that is filled already is left alone."""
        for tensor, box in parts_of(target, stored.fqn):
            self.add_box(stored, tensor, box)

    def add_box(self, stored: StoredTensor, tensor: torch.Tensor, box: Box) -> None:
        """Fill `tensor`, which has the shape of `box`, with this box of `stored`, in global elements."""
        if tensor.numel():
            window = window_of(tensor)
            if window in self.windows:
                return
            self.windows[window] = stored.fqn
        self.targets.setdefault(stored.fqn, []).append(_Target(tensor, box))

    def run(self) -> None:
        """Blocks until every target is full."""
        sources = {leaf.fqn: self._source(leaf.fqn) for leaf, _ in self.views}
        meeting = _meeting([target.tensor for targets in self.targets.values() for target in targets])
        chunks: list[ChunkRead] = []
        for fqn, targets in self.targets.items():
            stored = self.checkpoint.tensors[fqn]
            for target in targets:
                if id(target.tensor) in meeting:
                    # Two threads must not write the same memory: such targets are filled in turn, at the end.
                    aside = torch.empty(target.box.shape, dtype=dtype_of(stored.dtype, fqn), device="cpu")
                    self.late.append((target.tensor, aside))
                    target = _Target(aside, target.box)
                chunks += self._chunks(stored, target)
        self.placer.begin({t.tensor.device for targets in self.targets.values() for t in targets})
        requests = coalesce(chunks, max_request_bytes=request_bytes(chunks, self.store.options))
        fetch(self.store, requests, what=f"step {self.checkpoint.commit.step}", progress=self.progress)
        for leaf, wanted in self.views:
            assert leaf.view is not None
            source = view_of(sources[leaf.fqn], leaf.view, leaf.fqn)
            self.late += [(tensor, local_part(source, box)) for tensor, box in parts_of(wanted, leaf.fqn)]
        for tensor, source in self.late:
            copy(tensor, source)
        for targets in self.targets.values():
            for target in targets:
                if not target.tensor.is_inference():
                    torch.autograd.graph.increment_version(target.tensor)  # written behind autograd's back

    def _source(self, fqn: str) -> torch.Tensor:
        """A tensor of exactly the stored bytes from which views are copied: a target, or one made for it."""
        stored = self.checkpoint.tensors[fqn]
        dtype = dtype_of(stored.dtype, fqn)
        for target in self.targets.get(fqn, []):
            tensor = target.tensor
            if (
                target.box.shape == stored.shape
                and tensor.dtype == dtype
                and tensor.is_contiguous()
                and tensor.storage_offset() == 0
                and not lazy_bits(tensor)
            ):
                return tensor
        base = torch.empty(stored.shape, dtype=dtype, device="cpu")
        self.targets.setdefault(fqn, []).append(_Target(base, whole(stored.shape)))
        return base

    def _chunks(self, stored: StoredTensor, target: _Target) -> list[ChunkRead]:
        chunks: list[ChunkRead] = []
        dtype = dtype_of(stored.dtype, stored.fqn)
        for shard, part in overlaps(stored, target.box):
            into = local_part(target.tensor, part.relative_to(target.box))
            plain = into.device.type == "cpu" and into.dtype == dtype and not lazy_bits(into)
            if plain and into.is_contiguous():
                chunks += chunks_for(shard, box_runs(shard, part), Region(stored.fqn, _memory(into)))
                continue
            for piece in split(part, stored.itemsize, PIECE_BYTES):
                into = local_part(target.tensor, piece.relative_to(target.box))
                region = _Piece(stored.fqn, into, dtype, self.placer)
                chunks += chunks_for(shard, box_runs(shard, piece), region)
        return chunks


class _Piece(Region):
    """Scratch memory for a part of a target, copied there when it is full."""

    def __init__(self, fqn: str, target: torch.Tensor, dtype: torch.dtype, placer: _Placer) -> None:
        super().__init__(fqn, None)
        self.target, self.dtype, self.placer = target, dtype, placer
        self.scratch_bytes = target.numel() * dtype.itemsize
        self.scratch: torch.Tensor | None = None

    def open(self) -> memoryview:
        if self.memory is None:
            pinned = self.target.device.type == "cuda"
            self.scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self.memory = self.scratch.numpy().data
        return self.memory

    def close(self) -> None:
        assert self.scratch is not None
        self.placer.place(self.target, self.scratch.view(self.dtype).view(self.target.shape))
        self.scratch = self.memory = None


class _Placer:
    """Copies from scratch memory; to CUDA on a stream of each thread, after what the caller had queued."""

    def __init__(self) -> None:
        self.ready: dict[torch.device, Any] = {}
        self.streams = threading.local()

    def begin(self, devices: set[torch.device]) -> None:
        """Called in the caller's thread: its kernels may still be writing to the targets."""
        for device in devices:
            if device.type == "cuda":
                self.ready[device] = torch.cuda.current_stream(device).record_event()

    def place(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Returns when the copy is done: the scratch memory is used again."""
        if target.device not in self.ready:
            copy(target, source)
            return
        streams: dict[torch.device, Any] = self.streams.__dict__.setdefault("of", {})
        stream = streams.get(target.device)
        if stream is None:
            stream = streams[target.device] = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
            stream.wait_event(self.ready[target.device])
        with torch.cuda.stream(stream):
            copy(target, source, non_blocking=True)
        stream.synchronize()


def copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Bit by bit where the dtypes are equal; else the values, cast."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.dtype == source.dtype and not lazy_bits(target):
            target, source = as_bits(target), as_bits(source)  # bit by bit, whatever the dtype: NaNs keep their payload
        target.copy_(source, non_blocking=non_blocking)


def boxes_of(checkpoint: Checkpoint, leaf: TensorLeaf, target: torch.Tensor) -> list[Box]:
    """What a target needs of the tensor that a leaf names: of a view's base all of it."""
    if leaf.view is not None:
        return [whole(checkpoint.tensors[leaf.fqn].shape)]
    return [box for _, box in parts_of(target, leaf.fqn)]


def parts_of(target: torch.Tensor, fqn: str) -> list[tuple[torch.Tensor, Box]]:
    """The memory of a target on this rank, each with the global box that it holds: all of it but for a DTensor."""
    if not is_distributed(target):
        return [(target, whole(tuple(target.shape)))]
    local = target.detach().to_local()  # type: ignore[attr-defined]
    return [(local_part(local, piece.local), piece.box) for piece in layout_of(target, fqn).pieces]


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; no copy."""
    return as_bytes(tensor.detach()).numpy().data


@contextlib.contextmanager
def half_restored() -> Iterator[None]:
    """What fails inside says what it leaves behind."""
    try:
        yield
    except BaseException as err:
        err.add_note("The tensors given to restore() hold a mixture of old and new bytes now; restore them again.")
        raise


def lazy_bits(tensor: torch.Tensor) -> bool:
    """Conjugate and negative views: their memory is not what they show."""
    return tensor.is_conj() or tensor.is_neg()


def window_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), flags)


def _meeting(targets: list[torch.Tensor]) -> set[int]:
    """The ids of host targets whose memory meets that of another one, but for one of each group."""
    extents = []
    for target in targets:
        if target.device.type == "cpu" and target.numel():
            last = sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True))
            extents.append((target.data_ptr(), target.data_ptr() + (last + 1) * target.dtype.itemsize, id(target)))
    extents.sort()
    out, end = set(), 0
    for start, stop, number in extents:
        if start < end:
            out.add(number)
        end = max(end, stop)
    return out


def device_of(device: Any) -> torch.device:
    """The device a caller names; UsageError when it is none."""
    if not isinstance(device, (str, torch.device)):
        raise UsageError(
            f"device must be a name or a torch.device, not {type(device).__name__}; tensors carry no device in a "
            "checkpoint, so there is nothing to map from"
        )
    try:
        return torch.device(device)
    except RuntimeError as err:
        raise UsageError(f"device {device!r}: {err}") from err
