"""Reading once for a whole job: what several ranks want is fetched by one of them, which passes the pieces on.

That is so for replicas (DDP, HSDP), and when a layout changes across the stored rows: a chunk is verified whole, so each
rank would fetch nearly all chunks for its columns. Who reads what follows from rank 0's index and from the boxes that the
ranks want, the same everywhere; a rank reads what its like have written, and so needs few indexes. Then only tensor bytes
travel, in rounds of bounded size.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from objckpt import limits
from objckpt.events import Progress, ignore
from objckpt.format.index import PER_RANK
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box, Boxes, Integers, Layout
from objckpt.restore.move import collect, distribute, grouped, laid_out, padded
from objckpt.restore.open import Checkpoint, StoredTensor, opened_whole
from objckpt.restore.place import Filler, half_restored, parts_of, raw
from objckpt.restore.units import Held, Unit, Units, dealt, pieces_of, spread, written_cut
from objckpt.state.dtypes import dtype_of
from objckpt.state.shards import is_distributed, layout_of
from objckpt.store import Store

T = TypeVar("T")
Fill = tuple[torch.Tensor, TensorLeaf]
ROUND_BYTES = 64 * 1024 * 1024  # about as much a rank reads, takes, and sends, in one round
UNIT_BYTES = 64 * 1024 * 1024  # read by one rank at a time; cut at rows, so a chunk at each border is read twice
_LEAST_UNIT_BYTES = 4 * 1024 * 1024
_TRIES = 8  # to find rounds of that size
_TRIED = 16  # boxes of a tensor from which its cost is estimated
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


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Memory of this rank that takes a box of a stored tensor, and what it has in common with the tensor's units."""

    tensor: torch.Tensor
    stored: StoredTensor
    box: Box
    common: Boxes


@dataclass(frozen=True, slots=True)
class _Round:
    """What this rank does in one round. `taken` has of each piece that it gets: reader, target, row of `common`, and bytes in
    a buffer; the pieces of one reader are in the order in which that one packs them."""

    reads: list[Unit]
    taken: Integers


@dataclass(frozen=True, slots=True)
class _Sends:
    """What this rank sends in one round: each rank's bytes in a buffer of `nbytes`, and of each unit the pieces that are put
    there, relative to the unit, with their places."""

    segments: dict[int, tuple[int, int]]
    pieces: list[tuple[Boxes, Integers]]
    nbytes: int


class Sharing:
    """Used by all ranks of a job in one restore: `take`, and after the rest is fetched `run`.

    checkpoint: opened at least for what rank 0's index tells; before `run` it has to have what `wanted` names.
    """

    def __init__(self, ranks: Ranks, store: Store, checkpoint: Checkpoint, progress: Progress = ignore) -> None:
        self.ranks, self.store, self.checkpoint, self.progress = ranks, store, checkpoint, progress
        self._targets: dict[str, list[tuple[torch.Tensor, Box]]] = {}
        self._wanted: dict[str, Held] = {}
        self._layouts: dict[str, list[Layout]] = {}  # that `_wanted` follows from, where it does
        self._taking: list[_Target] = []
        self._rounds: list[_Round] = []
        self._like: Integers = np.arange(ranks.size)  # of each rank the first that wants the same
        self._memory: dict[str, torch.Tensor] = {}  # kept from round to round: fresh pages cost as much as a copy

    def take(self, fills: Sequence[Fill]) -> list[Fill]:
        """Plan; returns the fills that are left to be fetched by this rank alone. A collective."""
        if all(self._all(lambda: self._takes_back(fills))):
            return list(fills)  # every rank takes back what it wrote
        self._agree()
        if self._all(lambda: any(self.checkpoint.tensors[fqn].entry.layout is None for fqn in self._wanted))[0]:
            self.checkpoint = self.ranks.together(lambda: opened_whole(self.store, self.checkpoint))
        shared = self._all(lambda: self._all_worth() if self.ranks.rank == 0 else [])[0]
        self._plan(shared)
        gone = set(shared)
        return [(target, leaf) for target, leaf in fills if alone(leaf) or leaf.fqn not in gone]

    def wanted(self) -> dict[str, list[Box]]:
        """What this rank will read for all, by FQN."""
        out: dict[str, list[Box]] = {}
        for each in self._rounds:
            for unit in each.reads:
                out.setdefault(unit.stored.fqn, []).append(unit.box)
        return out

    def run(self, checkpoint: Checkpoint) -> None:
        """Fetch and pass on, round by round. A collective; blocks."""
        self.checkpoint = checkpoint
        with half_restored():
            for this in self._rounds:
                out, into, starts = self.ranks.together(partial(self._prepare, this))
                self.ranks.exchange(out, into)
                self.ranks.together(partial(self._place, this, starts))
        self._memory.clear()

    def _all(self, work: Callable[[], T]) -> list[T]:
        """What every rank finds, in the order of ranks; a failure anywhere raises everywhere."""
        return self.ranks.gather(self.ranks.together(work))

    def _takes_back(self, fills: Sequence[Fill]) -> bool:
        """Note what this rank wants. Whether it is what this rank wrote."""
        for target, leaf in fills:
            if not alone(leaf):
                parts = [(t, b) for t, b in parts_of(target, leaf.fqn) if b.elements]
                self._targets.setdefault(leaf.fqn, []).extend(parts)
                self._layouts.setdefault(leaf.fqn, []).append(self._layout(target, leaf.fqn))
        here = self.checkpoint
        back = all(here.tensors[fqn].has(box) for fqn, parts in self._targets.items() for _, box in parts)
        return back and not here.complete

    def _layout(self, target: torch.Tensor, fqn: str) -> Layout:
        if is_distributed(target):
            return layout_of(target, fqn).layout
        return Layout(tuple(range(self.ranks.size)), (self.ranks.size,), (None,))

    def _agree(self) -> None:
        """Find out what every rank wants. Where all have the same layouts, as ranks of one program do, these tell it."""
        own = {fqn: [box for _, box in parts] for fqn, parts in self._targets.items()}
        if len(set(self._all(lambda: self._by_layouts(own)))) == 1:
            return
        self._layouts = {}
        every = self.ranks.gather({fqn: [(b.offset, b.shape) for b in boxes] for fqn, boxes in own.items()})
        self._wanted = self.ranks.together(lambda: self._by_rank(every))

    def _by_layouts(self, own: dict[str, list[Box]]) -> str:
        """What all ranks want if they have this rank's layouts. Returns a digest of these, or what is equal to nobody's."""
        numbers: dict[Layout, int] = {}
        told = [
            (fqn, [numbers.setdefault(each, len(numbers)) for each in self._layouts[fqn]])
            for fqn in sorted(self._layouts)
        ]
        self._wanted = {fqn: self._by_layout(fqn, each) for fqn, each in self._layouts.items()}
        for fqn, wanted in self._wanted.items():
            rows = np.flatnonzero(wanted.ranks == self.ranks.rank).tolist()
            if [wanted.boxes[row] for row in rows] != own[fqn]:
                return f"rank {self.ranks.rank}"
        self._like = _first_alike([_places(layout, self.ranks.size) for layout in numbers])
        return hashlib.sha256(repr((told, list(numbers))).encode()).hexdigest()

    def _by_rank(self, every: Sequence[dict[str, list[Any]]]) -> dict[str, Held]:
        out = {}
        for fqn in sorted(set().union(*every)):
            listed = [(rank, Box(*box)) for rank, each in enumerate(every) for box in each.get(fqn, ())]
            boxes = Boxes.of([box for _, box in listed], len(self.checkpoint.tensors[fqn].shape))
            out[fqn] = Held(np.array([rank for rank, _ in listed], np.int64), boxes)
        self._like = _first_alike([[sorted(each.items()) for each in every]])
        return out

    def _by_layout(self, fqn: str, layouts: Sequence[Layout]) -> Held:
        parts = [each.boxes(self.checkpoint.tensors[fqn].shape) for each in layouts]
        boxes = Boxes(*(np.concatenate([getattr(b, name) for _, b in parts]) for name in ("offset", "shape")))
        return Held(np.concatenate([ranks for ranks, _ in parts]), boxes)

    def _all_worth(self) -> list[str]:
        known: dict[Any, bool] = {}  # many tensors are of few kinds
        out = []
        for fqn in sorted(self._wanted):
            entry = self.checkpoint.tensors[fqn].entry
            kind: Any = fqn
            if entry.layout is not None and fqn in self._layouts:
                kind = (entry.shape, entry.dtype, entry.layout, entry.replica, *self._layouts[fqn])
            if kind not in known:
                known[kind] = self._worth(fqn)
            if known[kind]:
                out.append(fqn)
        return out

    def _worth(self, fqn: str) -> bool:
        """Whether the ranks, each for itself, would fetch more of a tensor than it has."""
        stored, wanted = self.checkpoint.tensors[fqn], self._wanted[fqn].boxes
        most = _WORTH_IT * math.prod(stored.shape)
        total = int(wanted.elements.sum())
        if total > most or not total:
            return total > 0
        cut = written_cut(stored).boxes
        if all((boxes.shape[:, 1:] == stored.shape[1:]).all() for boxes in (wanted, cut)):
            return False  # whole rows: a rank fetches what it wants
        # Between the first and the last byte, and the rest of their chunks: unless runs are far apart, all that is fetched.
        tried = wanted.take(np.arange(0, len(wanted), -(-len(wanted) // _TRIED)))
        inner = np.cumprod(cut.shape[:, :0:-1], axis=1)[:, ::-1]
        strides = np.concatenate((inner, np.ones((len(cut), 1), np.int64)), axis=1)
        held, chunk, fetched = cut.elements, limits.CHUNK_BYTES // stored.itemsize, 0
        for row in range(len(tried)):
            rows, common = cut.common(tried[row])
            fetched += int(np.minimum(((common.shape - 1) * strides[rows]).sum(axis=1) + chunk, held[rows]).sum())
        return fetched * total > most * int(tried.elements.sum())

    def _plan(self, shared: Sequence[str]) -> None:
        """Who reads which piece, in which round; and what this rank gets of them. A collective."""
        if not shared:
            return
        units, gets = self.ranks.together(lambda: self._units(shared))
        total = budget = int(units.nbytes.sum())
        for _ in range(_TRIES):
            budget = min(budget, self.ranks.size * ROUND_BYTES)
            rounds = dealt(units, budget)
            # Replicas take all that is read, so that a round may have to be much less than what all could read.
            most = max(self._all(partial(self._moved, units, gets, rounds)))
            if most <= ROUND_BYTES:
                break
            budget = max(1, min(budget, total) * ROUND_BYTES // most)
        self._rounds = self.ranks.together(lambda: self._made(units, gets, rounds))

    def _units(self, shared: Sequence[str]) -> tuple[Units, Integers]:
        """The units of all ranks, and what this rank gets of them."""
        tensors = [self.checkpoint.tensors[fqn] for fqn in shared]
        unit_bytes = max(_LEAST_UNIT_BYTES, min(UNIT_BYTES, ROUND_BYTES // self.ranks.size))
        cuts = [pieces_of(stored, unit_bytes) for stored in tensors]
        nbytes = np.concatenate([c.boxes.elements * t.itemsize for c, t in zip(cuts, tensors, strict=True)])
        reader, place = spread(np.concatenate([c.ranks for c in cuts]), nbytes, self.ranks.size)
        first = np.cumsum([0, *(len(c.boxes) for c in cuts)])
        own = []
        for unit in np.flatnonzero(reader == self.ranks.rank).tolist():
            number = int(np.searchsorted(first, unit, "right")) - 1
            own.append((unit, Unit(tensors[number], cuts[number].boxes[unit - int(first[number])])))
        sent = np.zeros(len(own), np.int64)
        for n, (_, each) in enumerate(own):
            sent[n] = padded(self._wanting(each)[1].elements * each.stored.itemsize).sum()
        return Units(nbytes, reader, place, own, sent), self._gets(tensors, cuts, first)

    def _moved(self, units: Units, gets: Integers, rounds: Integers) -> int:
        """The most bytes that this rank takes, or sends from memory of its own, in one round."""
        own = rounds[[number for number, _ in units.own]]
        moved = (np.bincount(rounds[gets[:, 0]], gets[:, 3]), np.bincount(own, units.sent))
        return int(max(each.max(initial=0.0) for each in moved))

    def _made(self, units: Units, gets: Integers, rounds: Integers) -> list[_Round]:
        gets = gets[np.argsort(rounds[gets[:, 0]], kind="stable")]
        ends = np.searchsorted(rounds[gets[:, 0]], np.arange(int(rounds.max(initial=-1)) + 2))
        gets[:, 0] = units.reader[gets[:, 0]]
        made = [_Round([], gets[low:high]) for low, high in itertools.pairwise(ends)]
        for number, unit in units.own:
            made[rounds[number]].reads.append(unit)
        return made

    def _gets(self, tensors: Sequence[StoredTensor], cuts: Sequence[Held], first: Integers) -> Integers:
        """Of each piece that this rank gets: unit, target, row of `common`, and bytes in a buffer. By unit, then by target."""
        found: list[Integers] = [np.zeros((0, 4), np.int64)]
        for number, (cut, stored) in enumerate(zip(cuts, tensors, strict=True)):
            for tensor, box in self._targets.get(stored.fqn, ()):
                rows, common = cut.boxes.common(box)
                target, nbytes = np.full_like(rows, len(self._taking)), padded(common.elements * stored.itemsize)
                found.append(np.stack((first[number] + rows, target, np.arange(len(rows)), nbytes), axis=1))
                self._taking.append(_Target(tensor, stored, box, common))
        gets = np.concatenate(found)
        return gets[np.argsort(gets[:, 0], kind="stable")]

    def _prepare(self, this: _Round) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], Integers]:
        """What goes to other ranks, what comes from them, and where in it the pieces are. What stays here is in place."""
        out = self._pack(this, self._read(this.reads))
        into, starts = self._room(this)
        if (own := out.pop(self.ranks.rank, None)) is not None:
            into.pop(self.ranks.rank).copy_(own)
        return out, into, starts

    def _room(self, this: _Round) -> tuple[dict[int, torch.Tensor], Integers]:
        """What the pieces of this round arrive in, by reader; and the place in it of each piece of `taken`, in bytes."""
        memory = self._buffer("in", int(this.taken[:, 3].sum()))
        readers, groups = grouped(this.taken[:, 0])
        starts, bounds = laid_out(groups, this.taken[:, 3])
        return {rank: memory[low:high] for rank, (low, high) in zip(readers, bounds, strict=True)}, starts

    def _read(self, units: Sequence[Unit]) -> list[torch.Tensor]:
        nbytes = padded(np.array([unit.box.elements * unit.stored.itemsize for unit in units], np.int64))
        ends = np.cumsum(nbytes).tolist()
        memory = self._buffer("in", ends[-1] if ends else 0)  # what arrives comes when this has been passed on
        filler = Filler(self.store, self.checkpoint, self.progress)
        out = []
        for unit, end, size in zip(units, ends, nbytes.tolist(), strict=True):
            stored = self.checkpoint.tensors[unit.stored.fqn]  # opened meanwhile for what is read
            flat = memory[end - size :][: unit.box.elements * stored.itemsize]
            out.append(flat.view(dtype_of(stored.dtype, stored.fqn)).view(unit.box.shape))
            filler.add_box(stored, out[-1], unit.box)
        filler.run()
        return out

    def _pack(self, this: _Round, read: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What each rank wants of what this one has read; ranks that want the same get the same buffer."""
        sends = self._sends(this.reads)
        memory = self._buffer("out", sends.nbytes)
        for tensor, (boxes, starts) in zip(read, sends.pieces, strict=True):
            collect(tensor, boxes, memory, starts)
        return {rank: memory[low:high] for rank, (low, high) in sends.segments.items()}

    def _sends(self, units: Sequence[Unit]) -> _Sends:
        found = [self._wanting(unit) for unit in units]
        nbytes = [padded(boxes.elements * unit.stored.itemsize) for unit, (_, boxes) in zip(units, found, strict=True)]
        ranks, groups = grouped(np.concatenate([ranks for ranks, _ in found] or [np.zeros(0, np.int64)]))
        starts, bounds = laid_out(groups, np.concatenate(nbytes or [np.zeros(0, np.int64)]))
        at = [0, *itertools.accumulate(len(boxes) for _, boxes in found)]
        pieces = [(boxes, starts[at[n] : at[n + 1]]) for n, (_, boxes) in enumerate(found)]
        segment = dict(zip(ranks, bounds, strict=True))
        segments = {rank: segment[like] for rank, like in enumerate(self._like.tolist()) if like in segment}
        return _Sends(segments, pieces, bounds[-1][1] if bounds else 0)

    def _wanting(self, unit: Unit) -> tuple[Integers, Boxes]:
        """Which parts of a unit are wanted, relative to it, and by whom: of ranks that want the same by the first, in the order
        in which that one takes them."""
        wanted = self._wanted[unit.stored.fqn]
        first = np.flatnonzero(self._like[wanted.ranks] == wanted.ranks)
        rows, boxes = wanted.boxes.take(first).common(unit.box)
        return wanted.ranks[first[rows]], boxes.relative_to(unit.box)

    def _place(self, this: _Round, starts: Integers) -> None:
        for number, rows in zip(*grouped(this.taken[:, 1]), strict=True):
            target = self._taking[number]
            boxes = target.common.take(this.taken[rows, 2]).relative_to(target.box)
            dtype = dtype_of(target.stored.dtype, target.stored.fqn)
            distribute(self._memory["in"], starts[rows], dtype, target.tensor, boxes)

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """`nbytes` of host memory that is used again in the next round."""
        if name not in self._memory or self._memory[name].numel() < nbytes:
            self._memory.pop(name, None)
            self._memory[name] = raw(nbytes)
        return self._memory[name][:nbytes]


def alone(leaf: TensorLeaf) -> bool:
    """Whether each rank reads it for itself: views, and what belongs to this rank."""
    return leaf.view is not None or leaf.fqn.startswith(f"{PER_RANK}/")


def _places(layout: Layout, size: int) -> list[Any]:
    """For each rank what tells which pieces it has; None outside of the mesh."""
    out: list[Any] = [None] * size
    for rank, coordinate in zip(layout.ranks, itertools.product(*map(range, layout.mesh)), strict=True):
        out[rank] = [at for at, cut in zip(coordinate, layout.cuts, strict=True) if cut is not None]
    return out


def _first_alike(columns: Sequence[Sequence[Any]]) -> Integers:
    """For each rank the first one that has the same in all columns."""
    firsts: dict[str, int] = {}
    return np.array(
        [firsts.setdefault(repr(row), rank) for rank, row in enumerate(zip(*columns, strict=True))], np.int64
    )
