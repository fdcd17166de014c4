"""What is read once for a whole job: cut into units, spread over the ranks, dealt out to rounds. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from objckpt.geometry import Box, Boxes, Integers
from objckpt.restore.open import StoredTensor
from objckpt.restore.plan import split


@dataclass(frozen=True, slots=True)
class Held:
    """Boxes of one tensor, in global elements, and the rank that wrote each, or that wants it. Those that a rank wants are in
    the order of its targets."""

    ranks: Integers
    boxes: Boxes


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A box of a stored tensor that this rank reads for all."""

    stored: StoredTensor
    box: Box


@dataclass(frozen=True, slots=True)
class Units:
    """All that is read for all, a row a unit: bytes, who reads it, and its place in what that one reads, in bytes; and those that
    this rank reads, with their numbers and the bytes that it sends of each."""

    nbytes: Integers
    reader: Integers
    place: Integers
    own: list[tuple[int, Unit]]
    sent: Integers


def written_cut(stored: StoredTensor) -> Held:
    """A cut of the tensor, the same on all ranks, that follows its shards as far as rank 0's index knows them."""
    layout = stored.entry.layout
    if layout is not None:
        return Held(*layout.boxes(stored.shape, stored.entry.replica))
    ranks = np.array([index.rank for index in stored.indexes], np.int64)
    return Held(ranks[stored.origins[:, 0]], stored.boxes)


def pieces_of(stored: StoredTensor, unit_bytes: int) -> Held:
    """The same in pieces of at most `unit_bytes`, none empty."""
    whole = written_cut(stored)
    nbytes = whole.boxes.elements * stored.itemsize
    small, large = np.flatnonzero((nbytes > 0) & (nbytes <= unit_bytes)), np.flatnonzero(nbytes > unit_bytes)
    parts = [whole.boxes.take(small)]
    ranks = [whole.ranks[small]]
    for row in large.tolist():
        pieces = [piece for piece in split(whole.boxes[row], stored.itemsize, unit_bytes) if piece.elements]
        parts.append(Boxes.of(pieces, len(stored.shape)))
        ranks.append(np.full(len(pieces), whole.ranks[row]))
    return Held(
        np.concatenate(ranks), Boxes(*(np.concatenate([getattr(b, n) for b in parts]) for n in ("offset", "shape")))
    )


def spread(writer: Integers, nbytes: Integers, size: int) -> tuple[Integers, Integers]:
    """The reader of each unit, and the unit's place in what this one reads, in bytes.

    Units in the order of the ranks that wrote them, in `size` spans of equal bytes.
    """
    order = np.argsort(writer, kind="stable")
    ends = np.cumsum(nbytes[order])
    middle = ends - (nbytes[order] + 1) // 2
    reader, place = np.empty_like(order), np.empty_like(order)
    reader[order], place[order] = np.divmod(middle, max(1, -(-int(ends[-1]) // size)) if len(ends) else 1)
    return reader, place


def dealt(units: Units, round_bytes: int) -> Integers:
    """The round of each unit: readers advance alike, and about `round_bytes` are read in each."""
    order = np.lexsort((units.reader, units.place))
    sizes = units.nbytes[order]
    out = np.empty_like(order)
    out[order] = np.unique((np.cumsum(sizes) - sizes) // round_bytes, return_inverse=True)[1]
    return out
