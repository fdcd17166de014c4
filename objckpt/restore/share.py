"""Reading once for a whole job: what several ranks want is fetched by one of them, which passes the pieces on.

That is so for replicas (DDP, HSDP), and when a layout changes across the stored rows: a chunk is verified whole, so each
rank would fetch nearly all chunks for its columns. Who reads what follows from the indexes and from the boxes that the
ranks want, the same everywhere; after one exchange of those, only tensor bytes travel. In rounds of bounded size.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from objckpt.events import Progress, ignore
from objckpt.format.index import PER_RANK
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box, Boxes, Integers, Layout
from objckpt.restore.open import Checkpoint, StoredTensor, opened_whole
from objckpt.restore.place import Filler, copy, new, parts_of
from objckpt.restore.plan import split
from objckpt.state.dtypes import as_bytes, dtype_of
from objckpt.state.shards import is_distributed, layout_of, local_part
from objckpt.store import Store

T = TypeVar("T")
Fill = tuple[torch.Tensor, TensorLeaf]
ROUND_BYTES = 256 * 1024 * 1024  # of all ranks together; a rank holds at most as much to send, and as much to place
UNIT_BYTES = 64 * 1024 * 1024  # read by one rank at a time; cut at rows, so a chunk at each border is read twice
_LEAST_UNIT_BYTES = 4 * 1024 * 1024
_TRIED = 64  # boxes of a tensor from which its cost is estimated
_WORTH_IT = 1.05  # more bytes than this multiple of the tensor are wanted: then it is shared


class Ranks(Protocol):
    """The ranks of the job; all methods are collectives."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""

    def together(self, work: Callable[[], T]) -> T:
        """Do something on every rank; a failure anywhere raises everywhere."""

    def exchange(self, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        """Send a host buffer to each of some ranks, and fill one from each of some."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A box of a stored tensor, in global elements, that `reader` fetches for all."""

    fqn: str
    box: Box
    nbytes: int
    reader: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What all ranks want of one tensor: boxes, and of each the rank; those of one rank in the order of its targets."""

    ranks: Integers
    boxes: Boxes


class Sharing:
    """Used by all ranks of a job in one restore: `take`, and after the rest is fetched `run`.

    checkpoint: opened at least for what rank 0's index tells; before `run` it has to have what `wanted` names.
    """

    def __init__(self, ranks: Ranks, store: Store, checkpoint: Checkpoint, progress: Progress = ignore) -> None:
        self.ranks, self.store, self.checkpoint, self.progress = ranks, store, checkpoint, progress
        self._targets: dict[str, list[tuple[torch.Tensor, Box]]] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._rounds: list[list[_Unit]] = []

    def take(self, fills: Sequence[Fill]) -> list[Fill]:
        """Plan; returns the fills that are left to be fetched by this rank alone. A collective."""
        layouts: dict[str, list[Layout]] = {}
        for target, leaf in fills:
            if not _alone(leaf):
                self._targets.setdefault(leaf.fqn, []).extend(
                    (t, b) for t, b in parts_of(target, leaf.fqn) if b.elements
                )
                layouts.setdefault(leaf.fqn, []).append(self._layout(target, leaf.fqn))
        here = self.checkpoint
        back = all(here.tensors[fqn].has(box) for fqn, parts in self._targets.items() for _, box in parts)
        if all(self.ranks.gather(not here.complete and back)):
            return list(fills)  # every rank takes back what it wrote
        self._agree(layouts)
        if any(here.tensors[fqn].entry.layout is None for fqn in self._wanted):  # the same answer on all ranks
            self.checkpoint = self.ranks.together(self._whole)
        names = sorted(self._wanted) if self.ranks.rank == 0 else []
        shared = self.ranks.gather([fqn for fqn in names if self._worth(fqn)])[0]
        self._plan(shared)
        gone = set(shared)
        return [(target, leaf) for target, leaf in fills if _alone(leaf) or leaf.fqn not in gone]

    def wanted(self) -> dict[str, list[Box]]:
        """What this rank will read for all, by FQN."""
        out: dict[str, list[Box]] = {}
        for unit in itertools.chain(*self._rounds):
            if unit.reader == self.ranks.rank:
                out.setdefault(unit.fqn, []).append(unit.box)
        return out

    def run(self, checkpoint: Checkpoint) -> None:
        """Fetch and pass on, round by round. A collective; blocks."""
        self.checkpoint = checkpoint
        for units in self._rounds:
            own = [unit for unit in units if unit.reader == self.ranks.rank]
            out, into = self.ranks.together(lambda own=own, units=units: self._pack(units, self._read(own)))  # type: ignore[misc]
            self.ranks.exchange({r: b for r, b in out.items() if r != self.ranks.rank}, into)
            into |= {r: b for r, b in out.items() if r == self.ranks.rank}
            del out
            self.ranks.together(lambda into=into, units=units: self._place(units, into))  # type: ignore[misc]

    def _layout(self, target: torch.Tensor, fqn: str) -> Layout:
        if is_distributed(target):
            return layout_of(target, fqn).layout
        return Layout(tuple(range(self.ranks.size)), (self.ranks.size,), (None,))

    def _whole(self) -> Checkpoint:
        return opened_whole(self.store, self.checkpoint)

    def _agree(self, layouts: dict[str, list[Layout]]) -> None:
        """Find out what every rank wants. Where all have the same layouts, as ranks of one program do, these tell it."""
        told = sorted((fqn, [(each.ranks, each.mesh, each.cuts) for each in found]) for fqn, found in layouts.items())
        mine = hashlib.sha256(repr(told).encode()).hexdigest()
        found = {fqn: self._by_layout(fqn, each) for fqn, each in layouts.items()}
        own = {fqn: [box for _, box in parts] for fqn, parts in self._targets.items()}
        for fqn, wanted in found.items():
            rows = np.flatnonzero(wanted.ranks == self.ranks.rank).tolist()
            if [wanted.boxes[row] for row in rows] != own[fqn]:
                mine = f"rank {self.ranks.rank}"  # equal to nobody's
        if len(set(self.ranks.gather(mine))) == 1:
            self._wanted = found
            return
        every = self.ranks.gather({fqn: [(b.offset, b.shape) for b in boxes] for fqn, boxes in own.items()})
        for fqn in sorted(set().union(*every)):
            listed = [(rank, Box(*box)) for rank, each in enumerate(every) for box in each.get(fqn, ())]
            boxes = Boxes.of([box for _, box in listed], len(self.checkpoint.tensors[fqn].shape))
            self._wanted[fqn] = _Wanted(np.array([rank for rank, _ in listed], np.int64), boxes)

    def _by_layout(self, fqn: str, layouts: Sequence[Layout]) -> _Wanted:
        parts = [each.boxes(self.checkpoint.tensors[fqn].shape) for each in layouts]
        boxes = Boxes(*(np.concatenate([getattr(b, name) for _, b in parts]) for name in ("offset", "shape")))
        return _Wanted(np.concatenate([ranks for ranks, _ in parts]), boxes)

    def _worth(self, fqn: str) -> bool:
        """Whether the ranks, each for itself, would fetch more of a tensor than it has."""
        stored, wanted = self.checkpoint.tensors[fqn], self._wanted[fqn].boxes
        most = _WORTH_IT * math.prod(stored.shape)
        total = int(wanted.elements.sum())
        if total > most or not total:
            return total > 0
        cut = _stored_boxes(stored)
        if all((boxes.shape[:, 1:] == stored.shape[1:]).all() for boxes in (wanted, cut)):
            return False  # whole rows: a rank fetches what it wants
        # Between the first and the last byte: nearly all chunks there are fetched, unless runs are far apart.
        tried = wanted.take(np.arange(0, len(wanted), -(-len(wanted) // _TRIED)))
        strides = np.cumprod(np.concatenate((np.ones((len(cut), 1), np.int64), cut.shape[:, :0:-1]), axis=1), axis=1)[
            :, ::-1
        ]
        spans = 0
        for row in range(len(tried)):
            rows, common = cut.common(tried[row])
            spans += int(((common.shape - 1) * strides[rows]).sum()) + len(rows)
        return spans * total > most * int(tried.elements.sum())

    def _plan(self, shared: Sequence[str]) -> None:
        """Give each piece to the reader that has least so far, and put each reader's pieces into rounds."""
        load = [(0, rank) for rank in range(self.ranks.size)]
        total = 0
        unit_bytes = max(_LEAST_UNIT_BYTES, min(UNIT_BYTES, ROUND_BYTES // self.ranks.size))
        for fqn in shared:
            stored = self.checkpoint.tensors[fqn]
            cut = _stored_boxes(stored)
            for box in (piece for row in range(len(cut)) for piece in split(cut[row], stored.itemsize, unit_bytes)):
                if (nbytes := box.elements * stored.itemsize) == 0:
                    continue
                least, reader = load[0]
                heapq.heapreplace(load, (least + nbytes, reader))
                number, total = total // ROUND_BYTES, total + nbytes
                while len(self._rounds) <= number:
                    self._rounds.append([])
                self._rounds[number].append(_Unit(fqn, box, nbytes, reader))

    def _read(self, units: Sequence[_Unit]) -> list[torch.Tensor]:
        filler = Filler(self.store, self.checkpoint, self.progress)
        out = []
        for unit in units:
            stored = self.checkpoint.tensors[unit.fqn]
            out.append(new(stored, list(unit.box.shape)))
            filler.add_box(stored, out[-1], unit.box)
        filler.run()
        return out

    def _pack(
        self, units: Sequence[_Unit], read: Sequence[torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """One buffer for each rank that wants something of what this one has read, and one for each that it gets from."""
        me, mine = self.ranks.rank, iter(read)
        pieces: dict[int, list[torch.Tensor]] = {}
        sizes: dict[int, int] = {}
        for unit in units:
            wanted, itemsize = self._wanted[unit.fqn], self.checkpoint.tensors[unit.fqn].itemsize
            if unit.reader != me:
                common = [unit.box.intersect(box) for _, box in self._targets.get(unit.fqn, ())]
                if nbytes := sum(box.elements for box in common if box is not None) * itemsize:
                    sizes[unit.reader] = sizes.get(unit.reader, 0) + nbytes
                continue
            tensor = next(mine)
            rows, boxes = wanted.boxes.common(unit.box)
            for n, rank in enumerate(wanted.ranks[rows].tolist()):
                part = local_part(tensor, boxes[n].relative_to(unit.box))
                pieces.setdefault(rank, []).append(as_bytes(part.contiguous()).reshape(-1))
        out = {rank: torch.cat(parts) for rank, parts in pieces.items()}
        return out, {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}

    def _place(self, units: Sequence[_Unit], into: dict[int, torch.Tensor]) -> None:
        at = dict.fromkeys(into, 0)
        for unit in units:
            stored = self.checkpoint.tensors[unit.fqn]
            dtype = dtype_of(stored.dtype, unit.fqn)
            for target, box in self._targets.get(unit.fqn, ()):
                common = unit.box.intersect(box)
                if common is None:
                    continue
                start = at[unit.reader]
                at[unit.reader] = end = start + common.elements * stored.itemsize
                # A buffer's piece may start anywhere, a typed view may not.
                source = into[unit.reader][start:end].clone().view(dtype).view(common.shape)
                copy(local_part(target, common.relative_to(box)), source)


def _alone(leaf: TensorLeaf) -> bool:
    """Whether each rank reads it for itself: views, and what belongs to this rank."""
    return leaf.view is not None or leaf.fqn.startswith(f"{PER_RANK}/")


def _stored_boxes(stored: StoredTensor) -> Boxes:
    """A cut of the tensor, the same on all ranks, that follows its shards as far as rank 0's index knows them."""
    layout = stored.entry.layout
    return stored.boxes if layout is None else layout.boxes(stored.shape, stored.entry.replica)[1]
