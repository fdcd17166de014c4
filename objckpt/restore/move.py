"""Boxes of a tensor to and from a flat buffer: a few large ones, or millions of a few bytes, as a change of layout makes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from objckpt.geometry import Box, Boxes, Integers, run_starts
from objckpt.restore.place import copy, lazy_bits
from objckpt.state.dtypes import as_bits
from objckpt.state.shards import local_part

ALIGN_BYTES = 16  # pieces of a buffer begin at multiples of this, so that each can be seen as its own dtype
_ALONE_BYTES = 64 * 1024  # pieces from this size on are copied one by one, smaller ones many at a time
_WINDOWED = ("cpu",)  # devices on which rows of overlapping windows may be assigned: five times as fast
_BLOCK_ELEMENTS = 1 << 22  # copied at a time, through as much memory beside


def padded(nbytes: Integers) -> Integers:
    """What pieces of `nbytes` take in a buffer."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def grouped(keys: Integers) -> tuple[list[int], list[Integers]]:
    """The keys that there are, ascending, and the rows of each."""
    order = np.argsort(keys, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else []
    return [int(keys[rows[0]]) for rows in groups], groups


def laid_out(groups: Sequence[Integers], nbytes: Integers) -> tuple[Integers, list[tuple[int, int]]]:
    """Groups of pieces one after the other: the first byte of each piece, -1 in no group; and first and last of each group."""
    starts = np.full(len(nbytes), -1, np.int64)
    if not groups:
        return starts, []
    order = np.concatenate(groups)
    ends = np.cumsum(nbytes[order])
    starts[order] = ends - nbytes[order]
    last = [0, *ends[np.cumsum([len(rows) for rows in groups]) - 1].tolist()]
    return starts, list(itertools.pairwise(last))


def collect(tensor: torch.Tensor, boxes: Boxes, buffer: torch.Tensor, starts: Integers) -> None:
    """Copy boxes of a tensor to `buffer` (host, uint8), each row-major from byte `starts[row]` on. Blocks."""
    tensor = as_bits(tensor)
    elements = _seen_as(buffer, tensor.dtype)
    flat = _flat(tensor)
    for rows in _alike(boxes):
        shape, at = boxes[int(rows[0])].shape, starts[rows] // tensor.dtype.itemsize
        if flat is None or math.prod(shape) * tensor.dtype.itemsize >= _ALONE_BYTES:
            for row, start in zip(rows.tolist(), at.tolist(), strict=True):
                piece = elements[start : start + math.prod(shape)].view(shape)
                piece.copy_(local_part(tensor, boxes[row]))
            continue
        for here, there, length in _runs(tensor.shape, boxes.offset[rows], shape, at):
            _windows(elements, length)[there] = _windows(flat, length)[here]


def distribute(buffer: torch.Tensor, starts: Integers, dtype: torch.dtype, tensor: torch.Tensor, boxes: Boxes) -> None:
    """The way back: pieces of `dtype` into boxes of a tensor on any device, cast where it has another dtype. Blocks."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        elements = _seen_as(buffer, dtype)
        bits = None if lazy_bits(tensor) else _flat(as_bits(tensor))
        for rows in _alike(boxes):
            shape, at = boxes[int(rows[0])].shape, starts[rows] // dtype.itemsize
            if bits is None or math.prod(shape) * dtype.itemsize >= _ALONE_BYTES:
                for row, start in zip(rows.tolist(), at.tolist(), strict=True):
                    copy(local_part(tensor, boxes[row]), elements[start : start + math.prod(shape)].view(shape))
                continue
            for here, there, length in _runs(tensor.shape, boxes.offset[rows], shape, at):
                found = _windows(as_bits(elements), length)[there].to(tensor.device)
                if tensor.dtype != dtype:
                    found = as_bits(found.view(dtype).to(tensor.dtype))
                _put(bits, here.to(tensor.device), found)


def _alike(boxes: Boxes) -> Iterator[Integers]:
    """The rows of boxes of one shape, for each shape that there is."""
    if len(boxes):
        _, group = np.unique(boxes.shape, axis=0, return_inverse=True)
        yield from grouped(group.reshape(-1))[1]


def _runs(
    whole: Sequence[int], offsets: Integers, shape: tuple[int, ...], at: Integers
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Boxes of one shape as runs: first elements in the tensor and in the buffer, and the length of all. In blocks."""
    starts, length = run_starts(Box((0,) * len(shape), shape), tuple(whole))
    strides = np.array([math.prod(whole[d + 1 :]) for d in range(len(whole))], np.int64)
    each = max(1, _BLOCK_ELEMENTS // (len(starts) * length))  # boxes
    inside = np.arange(len(starts), dtype=np.int64) * length
    for low in range(0, len(at), each):
        here = np.add.outer(offsets[low : low + each] @ strides, starts).reshape(-1)
        there = np.add.outer(at[low : low + each], inside).reshape(-1)
        yield torch.from_numpy(here), torch.from_numpy(there), length


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.as_strided((tensor.numel(),), (1,)) if tensor.is_contiguous() else None


def _windows(flat: torch.Tensor, length: int) -> torch.Tensor:
    """Row `i` has the elements `[i, i + length)`."""
    return flat.as_strided((flat.numel() - length + 1, length), (1, 1))


def _put(flat: torch.Tensor, here: torch.Tensor, runs: torch.Tensor) -> None:
    """Each row of `runs` to where it begins in `flat`."""
    length = runs.shape[1]
    if flat.device.type in _WINDOWED:
        _windows(flat, length)[here] = runs
        return
    # By element: where algorithms have to be deterministic CUDA assigns to a copy, and back, and of windows that lie across
    # each other it would bring old bytes back (ATen, native/cuda/Indexing.cu).
    places = here[:, None] + torch.arange(length, device=flat.device)
    flat[places.reshape(-1)] = runs.reshape(-1)


def _seen_as(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer[: buffer.numel() // ALIGN_BYTES * ALIGN_BYTES].view(dtype)
