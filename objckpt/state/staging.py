"""Staging: the bytes of every leaf into the snapshot. This is what `save()` blocks for.

Device tensors are copied on a side stream into pinned slabs, all in flight at once; one event is waited for before
`stage` returns, so that neither the caller's next kernel nor the agent can meet a copy that is still under way.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from objckpt.limits import KiB, MiB
from objckpt.state.dtypes import as_bits, as_bytes
from objckpt.state.leaf import Leaf

logger = logging.getLogger("objckpt")

_TEMPORARY_BYTES = 1 * MiB  # of a strided tensor that lies across the end of a slab
_SMALL_BYTES = 16 * KiB  # so little is copied before torch has found out how


class Lane(Protocol):
    """The asynchronous way of one device's bytes to the host. All that staging needs to know of streams and events."""

    def begin(self) -> None:
        """Let the copies that follow wait for what the caller has queued on the device."""

    def copying(self) -> AbstractContextManager[Any]:
        """Copies made inside take this lane."""

    def sent(self, tensor: torch.Tensor) -> None:
        """A copy of `tensor` is queued: its memory may not be given to another tensor before that is done."""

    def wait(self) -> None:
        """Block until every copy queued is done."""


class DeviceLane:
    """A side stream. `module` is `torch.cuda`, `torch.xpu` or another of their kind."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device, self.module = device, module
        self.stream = module.Stream(device)

    def begin(self) -> None:
        self.stream.wait_stream(self.module.current_stream(self.device))

    def copying(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.module.stream(self.stream)
        return context

    def sent(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)

    def wait(self) -> None:
        self.stream.record_event().synchronize()


def lane_of(device: torch.device) -> Lane | None:
    """A new lane of a device; None for host memory, which is copied at once."""
    return None if device.type == "cpu" else DeviceLane(device, torch.get_device_module(device))


class Stager:
    """Copies leaves into slabs. One per Checkpointer: it owns the side streams and the pinned ranges."""

    def __init__(self, new_lane: Callable[[torch.device], Lane | None] = lane_of) -> None:
        self._new_lane = new_lane
        self._lanes: dict[torch.device, Lane | None] = {}
        self._pinned: set[int] = set()

    def stage(self, leaves: Sequence[Leaf], extents: Sequence[tuple[int, int]], slabs: Sequence[memoryview]) -> None:
        """Copy leaf `i` to `[start, start + nbytes)` of the byte space that the slabs make up; `extents[i]` has both.

        Blocks until all bytes are there; after an error, until no copy is under way any more, so that the slabs may be
        used again. All slabs have one size; `start` is a multiple of the leaf's item size. No tensor is kept.
        """
        snapshot = _Snapshot(
            [torch.frombuffer(slab, dtype=torch.uint8) for slab in slabs], len(slabs[0]) if slabs else 1
        )
        used: dict[torch.device, Lane] = {}
        try:
            with torch.no_grad():
                for leaf, (start, nbytes) in zip(leaves, extents, strict=True):
                    if nbytes:
                        self._stage(leaf.tensor, start, nbytes, snapshot, used)
        finally:
            _wait_all(list(used.values()))

    def _stage(
        self, tensor: torch.Tensor, start: int, nbytes: int, snapshot: _Snapshot, used: dict[torch.device, Lane]
    ) -> None:
        device = tensor.device
        if device not in self._lanes:
            self._lanes[device] = self._new_lane(device)
        lane = self._lanes[device]
        if lane is None:
            snapshot.put(tensor, start, nbytes, False)
            return
        if device not in used:
            used[device] = lane
            lane.begin()
        with lane.copying():
            try:
                snapshot.put(tensor, start, nbytes, True)
            finally:
                lane.sent(tensor)  # of a tensor put in several pieces some may be queued when another fails

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for fast device copies; does nothing where CUDA is not in use by this process."""
        if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) == 0:
            self._pinned.add(address)
        else:
            logger.warning("cudaHostRegister of %d bytes failed (%s): staging will be slower", nbytes, status)

    def unpin(self, address: int) -> None:
        """Undo `pin`. Does nothing for memory that is not pinned."""
        if address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
            self._pinned.discard(address)


def _wait_all(lanes: list[Lane]) -> None:
    """Wait for every lane, even when waiting for one of them fails (a kernel queued before the copies did)."""
    if lanes:
        try:
            lanes[0].wait()
        finally:
            _wait_all(lanes[1:])


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One byte space made of slabs of equal size."""

    slabs: list[torch.Tensor]  # uint8
    slab_bytes: int

    def put(self, tensor: torch.Tensor, start: int, nbytes: int, non_blocking: bool) -> None:
        """Copy the tensor's bits, in row-major order, to bytes `[start, start + nbytes)`."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        slab, at = divmod(start, self.slab_bytes)
        inside = at + nbytes <= self.slab_bytes
        if tensor.is_contiguous():
            if inside and nbytes <= _SMALL_BYTES and tensor.device.type == "cpu":
                ctypes.memmove(self.slabs[slab].data_ptr() + at, tensor.data_ptr(), nbytes)
            elif inside:
                self.slabs[slab].narrow(0, at, nbytes).copy_(as_bytes(tensor), non_blocking=non_blocking)
            else:
                self._pieces(as_bytes(tensor), slab, at, non_blocking)
        elif inside:
            bits = as_bits(tensor)
            target = self.slabs[slab].narrow(0, at, nbytes).view(bits.dtype).view(bits.shape)
            target.copy_(bits, non_blocking=non_blocking)
        elif nbytes > _TEMPORARY_BYTES:
            # Row-major order: the first half of the outermost dimension comes first, and is a strided tensor itself.
            dim = next(d for d, n in enumerate(tensor.shape) if n > 1)
            half = tensor.shape[dim] // 2
            first = nbytes // tensor.shape[dim] * half
            self.put(tensor.narrow(dim, 0, half), start, first, non_blocking)
            self.put(tensor.narrow(dim, half, tensor.shape[dim] - half), start + first, nbytes - first, non_blocking)
        else:
            self._pieces(as_bytes(as_bits(tensor).contiguous()), slab, at, non_blocking)

    def _pieces(self, source: torch.Tensor, slab: int, at: int, non_blocking: bool) -> None:
        done, nbytes = 0, source.numel()
        while done < nbytes:
            take = min(nbytes - done, self.slab_bytes - at)
            piece = source.narrow(0, done, take)
            self.slabs[slab].narrow(0, at, take).copy_(piece, non_blocking=non_blocking)
            slab, at, done = slab + 1, 0, done + take
