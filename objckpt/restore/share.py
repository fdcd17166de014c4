"""Reading once for a whole job: what several ranks want is fetched by one of them, which passes the pieces on.

That is so for replicas (DDP, HSDP), and when a layout changes across the stored rows: a chunk is verified whole, so each
rank would fetch nearly all chunks for its columns. Who reads what follows from the indexes and from the boxes that the
ranks want, the same everywhere; after one exchange of those, only tensor bytes travel. In rounds of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from objckpt.events import Progress, ignore
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box
from objckpt.restore.open import Checkpoint, StoredTensor, open_checkpoint
from objckpt.restore.place import Filler, copy, new, parts_of
from objckpt.restore.plan import box_runs, overlaps, split
from objckpt.state.dtypes import as_bytes, dtype_of
from objckpt.state.shards import local_part
from objckpt.store import Store

T = TypeVar("T")
Fill = tuple[torch.Tensor, TensorLeaf]
ROUND_BYTES = 256 * 1024 * 1024  # of all ranks together; a rank holds at most as much to send, and as much to place
UNIT_BYTES = 64 * 1024 * 1024  # read by one rank at a time; cut at rows, so a chunk at each border is read twice
_LEAST_UNIT_BYTES = 4 * 1024 * 1024
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


class Sharing:
    """Used by all ranks of a job in one restore: `take`, and after the rest is fetched `run`."""

    def __init__(self, ranks: Ranks, store: Store, checkpoint: Checkpoint, progress: Progress = ignore) -> None:
        self.ranks, self.store, self.checkpoint, self.progress = ranks, store, checkpoint, progress
        self._targets: dict[str, list[tuple[torch.Tensor, Box]]] = {}
        self._wanted: list[dict[str, list[Box]]] = []  # of each rank
        self._rounds: list[list[_Unit]] = []

    def take(self, fills: Sequence[Fill]) -> list[Fill]:
        """Plan; returns the fills that are left to be fetched by this rank alone. A collective."""
        complete = self.ranks.gather(self.checkpoint.complete)
        if not any(complete):
            return list(fills)  # every rank takes back what it wrote
        self.checkpoint = self.ranks.together(self._whole)
        for target, leaf in fills:
            if leaf.view is None:
                parts = [(tensor, box) for tensor, box in parts_of(target, leaf.fqn) if box.elements]
                self._targets.setdefault(leaf.fqn, []).extend(parts)
        mine = {fqn: [(box.offset, box.shape) for _, box in parts] for fqn, parts in self._targets.items() if parts}
        self._wanted = [
            {fqn: [Box(*box) for box in boxes] for fqn, boxes in each.items()} for each in self.ranks.gather(mine)
        ]
        names = sorted(set().union(*self._wanted)) if self.ranks.rank == 0 else []
        shared = self.ranks.gather([fqn for fqn in names if self._worth(self.checkpoint.tensors[fqn])])[0]
        self._plan(shared)
        gone = set(shared)
        return [(target, leaf) for target, leaf in fills if leaf.view is not None or leaf.fqn not in gone]

    def _whole(self) -> Checkpoint:
        done = self.checkpoint.complete
        return self.checkpoint if done else open_checkpoint(self.store, self.checkpoint.commit)

    def run(self) -> None:
        """Fetch and pass on, round by round. A collective; blocks."""
        for units in self._rounds:
            own = [unit for unit in units if unit.reader == self.ranks.rank]
            out, into = self.ranks.together(lambda own=own, units=units: self._pack(units, self._read(own)))  # type: ignore[misc]
            self.ranks.exchange({r: b for r, b in out.items() if r != self.ranks.rank}, into)
            into |= {r: b for r, b in out.items() if r == self.ranks.rank}
            del out
            self.ranks.together(lambda into=into, units=units: self._place(units, into))  # type: ignore[misc]

    def _worth(self, stored: StoredTensor) -> bool:
        boxes = [box for rank in self._wanted for box in rank.get(stored.fqn, ())]
        most, wanted = _WORTH_IT * stored.nbytes, 0
        if all(box.shape[1:] == stored.shape[1:] for box in [*boxes, *(s.entry.box for s in stored.shards)]):
            return (
                sum(box.elements for box in boxes) * stored.itemsize > most
            )  # whole rows: a rank fetches what it wants
        for box in boxes:
            for shard, part in overlaps(stored, box):
                runs = box_runs(shard, part)
                # Between the first and the last byte: nearly all chunks there are fetched, unless runs are far apart.
                wanted += shard.entry.nbytes if runs is None else int(runs.starts[-1] - runs.starts[0]) + runs.length
            if wanted > most:
                return True
        return False

    def _plan(self, shared: Sequence[str]) -> None:
        """Give each piece to the reader that has least so far, and put each reader's pieces into rounds."""
        load = [0] * self.ranks.size
        unit_bytes = max(_LEAST_UNIT_BYTES, min(UNIT_BYTES, ROUND_BYTES // self.ranks.size))
        for fqn in shared:
            stored = self.checkpoint.tensors[fqn]
            for shard in stored.shards:
                for box in split(shard.entry.box, stored.itemsize, unit_bytes) if shard.entry.box.elements else ():
                    reader = load.index(min(load))
                    nbytes = box.elements * stored.itemsize
                    number = sum(load) // ROUND_BYTES
                    load[reader] += nbytes
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
            tensor = next(mine) if unit.reader == me else None
            for rank, wanted in enumerate(self._wanted):
                for box in wanted.get(unit.fqn, ()):
                    common = unit.box.intersect(box)
                    if common is None or (tensor is None and rank != me):
                        continue
                    if tensor is None:
                        itemsize = self.checkpoint.tensors[unit.fqn].itemsize
                        sizes[unit.reader] = sizes.get(unit.reader, 0) + common.elements * itemsize
                    else:
                        part = local_part(tensor, common.relative_to(unit.box))
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
