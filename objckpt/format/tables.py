"""The tables of an index: its tensors, their shards, and the shards' chunks; the last two column by column.

Ranks of one job have the same tensors, and thousands of ranks have millions of shards: equal tables of tensors are decoded
once (`known`), and shards and chunks stay columns until somebody asks for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from objckpt import limits
from objckpt.errors import FormatError
from objckpt.format import wire
from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.fqn import to_fqn
from objckpt.format.values import dims
from objckpt.format.values import pack as pack_value
from objckpt.format.values import unpack as unpack_value
from objckpt.geometry import Box, Integers, Layout

CHUNK_DTYPE = np.dtype(
    [("pack", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("codec", "u1"), ("crc", "<u8")]
)
SHARD_DTYPE = np.dtype([("tensor", "<u4"), ("first_chunk", "<u4"), ("chunk_count", "<u4"), ("digest", "<u8")])
Column = np.ndarray[Any, Any]
_MAX_PIECES = 1 << 22  # of a layout: strided sharding by 41 on all ranks that there can be


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor, and how its shards lie on the ranks: those of replica `replica` of `layout` hold them.

    None for `layout`: the writer of the index does not know. `shape` is the global one, in elements.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None = None
    replica: int = 0

    @property
    def fqn(self) -> str:
        return to_fqn(self.path)


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """The n-d box of one tensor that one rank holds, and where its bytes are. Shapes and offsets in elements."""

    path: tuple[Any, ...]
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: int  # CRC-64/NVME of the raw bytes
    first_chunk: int
    chunk_count: int

    @property
    def fqn(self) -> str:
        return to_fqn(self.path)

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class TensorTable:
    """The tensors of an index by number. `data` is the encoded table; tables with equal data are equal."""

    def __init__(self, data: bytes, entries: list[TensorEntry]) -> None:
        self.data, self.entries = data, entries
        self.fqns = [entry.fqn for entry in entries]
        self.dims = np.array([len(entry.shape) for entry in entries], np.int64)
        self.itemsize = np.array([ITEMSIZE[entry.dtype] for entry in entries], np.int64)
        self.shape = np.array([n for entry in entries for n in entry.shape], np.int64)  # of all, back to back
        self.start = _starts(self.dims)  # of each tensor, in `shape`

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> TensorTable:
        found = list(entries)
        layouts: dict[Layout, int] = {}
        rows = [
            [
                pack_value(e.path),
                e.dtype,
                list(e.shape),
                None if e.layout is None else layouts.setdefault(e.layout, len(layouts)),
                e.replica,
            ]
            for e in found
        ]
        cuts = [
            [np.array(each.ranks, "<u4").tobytes(), list(each.mesh), [c if c is None else list(c) for c in each.cuts]]
            for each in layouts
        ]
        return cls(wire.pack({"layouts": cuts, "tensors": rows}), found)

    @classmethod
    def decode(cls, data: bytes, what: str) -> TensorTable:
        body = wire.unpack(data, what)
        if type(body) is not dict:
            raise FormatError(f"{what}: malformed table of tensors", what=what)
        f = wire.Fields(body, what)
        layouts = [_layout(row, what) for row in f.rows("layouts", bytes, list, list)]
        rows = f.rows("tensors", bytes, str, list, (int, type(None)), int)
        table = cls(data, [_tensor(row, layouts, what) for row in rows])
        if len(set(table.fqns)) != len(rows):
            raise FormatError(f"{what}: a tensor is listed twice", what=what)
        return table


def _tensor(row: list[Any], layouts: list[Layout], what: str) -> TensorEntry:
    packed, dtype, shape, number, replica = row
    path = unpack_value(packed, what)
    if type(path) is not tuple or not path or not _is_key(path):
        raise FormatError(f"{what}: a tensor has no path", what=what)
    wire.check_keys(list(path), what)
    name = to_fqn(path)
    if len(name.encode()) > limits.MAX_FQN_BYTES:
        raise FormatError(f"{what}: {name[:200]}: its name is too long", what=what)
    if dtype not in ITEMSIZE:
        raise FormatError(f"{what}: {name}: unknown dtype {dtype!r}; a newer objckpt may know it", what=what, fqn=name)
    entry = TensorEntry(path, dtype, dims(shape, what))
    if number is None:
        return entry
    if not 0 <= number < len(layouts):
        raise FormatError(f"{what}: {name}: malformed layout", what=what, fqn=name)
    layout = layouts[number]
    if not 0 <= replica < layout.replicas or any(cut[0] >= len(shape) for cut in layout.cuts if cut is not None):
        raise FormatError(f"{what}: {name}: its layout does not fit its shape", what=what, fqn=name)
    return TensorEntry(path, dtype, entry.shape, layout, replica)


def _is_key(part: Any) -> bool:
    """Whether it may be a part of a path: what `values.pack` takes as a key."""
    return type(part) in (str, int, float, bool, bytes, type(None)) or (type(part) is tuple and all(map(_is_key, part)))


def _layout(row: list[Any], what: str) -> Layout:
    data, mesh, cuts = row
    sizes = dims(mesh, what)
    ranks = np.frombuffer(data, "<u4").tolist() if len(data) % 4 == 0 else []
    good = len(sizes) == len(cuts) and math.prod(sizes) == len(ranks) > 0 and max(ranks) < limits.MAX_RANKS
    for cut in cuts:
        pair = type(cut) is list and len(cut) == 2 and all(type(n) is int for n in cut)
        good = good and (cut is None or (pair and 0 <= cut[0] < limits.MAX_DIMS and 0 < cut[1] <= limits.MAX_RANKS))
    # Cuts of one dimension multiply: what is computed from a layout has to stay in proportion to its ranks.
    pieces = math.prod(cut[1] for cut in cuts if cut is not None) if good else 0
    if not good or pieces * len(ranks) > _MAX_PIECES:
        raise FormatError(f"{what}: malformed layout", what=what)
    return Layout(tuple(ranks), sizes, tuple(None if cut is None else (cut[0], cut[1]) for cut in cuts))


class ShardTable(Sequence[ShardEntry]):
    """The shards of an index, as columns: tensor number, first chunk, number of chunks, digest; offsets and shapes, of all
    dimensions back to back, those of shard `i` from `start[i]` on."""

    def __init__(
        self, tensors: TensorTable, columns: Mapping[str, Column] | Column, offset: Integers, shape: Integers
    ) -> None:
        self.tensors = tensors
        self.tensor, self.first_chunk = columns["tensor"].astype(np.int64), columns["first_chunk"].astype(np.int64)
        self.chunk_count, self.digest = columns["chunk_count"].astype(np.int64), columns["digest"]
        self.offset, self.shape = offset, shape
        self.dims = tensors.dims[self.tensor] if len(self.tensor) else np.zeros(0, np.int64)
        self.start = _starts(self.dims)

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, row: int) -> ShardEntry: ...

    @overload
    def __getitem__(self, row: slice) -> list[ShardEntry]: ...

    def __getitem__(self, row: int | slice) -> ShardEntry | list[ShardEntry]:
        if isinstance(row, slice):
            return [self[n] for n in range(*row.indices(len(self)))]
        row = range(len(self))[row]
        entry = self.tensors.entries[int(self.tensor[row])]
        box = slice(at := int(self.start[row]), at + int(self.dims[row]))
        return ShardEntry(
            entry.path,
            entry.dtype,
            entry.shape,
            tuple(self.offset[box].tolist()),
            tuple(self.shape[box].tolist()),
            int(self.digest[row]),
            int(self.first_chunk[row]),
            int(self.chunk_count[row]),
        )

    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, entries: Sequence[ShardEntry], known: Iterable[TensorEntry]) -> ShardTable:
        """`known`: tensors that are listed before those of the shards, and perhaps have no shard here."""
        tensors = {entry.fqn: entry for entry in known}
        for e in entries:
            tensors.setdefault(e.fqn, TensorEntry(e.path, e.dtype, e.global_shape))
        numbers = {fqn: n for n, fqn in enumerate(tensors)}
        rows = [(numbers[e.fqn], e.first_chunk, e.chunk_count, e.digest) for e in entries]
        offset, shape = (
            np.array([n for sizes in column for n in sizes], np.int64)
            for column in ((e.offset for e in entries), (e.shape for e in entries))
        )
        return cls(TensorTable.of(tensors.values()), np.array(rows, SHARD_DTYPE), offset, shape)

    def encode(self) -> bytes:
        columns = [getattr(self, name).astype(SHARD_DTYPE[name]) for name in SHARD_DTYPE.names or ()]
        return b"".join(c.tobytes() for c in [*columns, self.offset.astype("<u8"), self.shape.astype("<u8")])

    @classmethod
    def decode(cls, data: bytes, count: int, tensors: TensorTable, what: str) -> ShardTable:
        """FormatError unless every box lies in its tensor, and none is listed twice."""
        columns, at = _columns(SHARD_DTYPE, data, count, "shard", what, exact=False)
        if count and int(columns["tensor"].max()) >= len(tensors.entries):
            raise FormatError(f"{what}: a shard is of an unknown tensor", what=what)
        length = int(tensors.dims[columns["tensor"]].sum()) if count else 0
        if len(data) - at != length * 16:
            raise FormatError(f"{what}: the shard table has {len(data)} bytes for {count} shards", what=what)
        offset, shape = np.frombuffer(data, "<i8", 2 * length, at).reshape(2, length)
        table = cls(tensors, columns, offset, shape)
        table._check(what)
        return table

    def _check(self, what: str) -> None:
        whole = self.tensors.shape[self.places(self.tensors.start[self.tensor])]
        if not (
            (self.offset >= 0) & (self.shape >= 0) & (self.shape <= whole) & (self.offset <= whole - self.shape)
        ).all():
            outside = (self.shape > whole) | (self.offset > whole - self.shape) | (self.offset < 0) | (self.shape < 0)
            row = int(np.searchsorted(self.start, np.flatnonzero(outside)[0], "right")) - 1
            raise FormatError(f"{what}: {self[row].fqn}: the shard's box leaves the global shape", what=what)
        if len(np.unique(self.tensor)) == len(self):
            return
        seen = set()
        for row, tensor in enumerate(self.tensor.tolist()):
            at = int(self.start[row])
            place = (tensor, self.offset[at : at + int(self.dims[row])].tobytes())
            if place in seen:
                raise FormatError(f"{what}: {self[row].fqn}: listed twice", what=what)
            seen.add(place)

    def places(self, starts: Integers) -> Integers:
        """For each number in `shape`: where its like is in an array in which the shards' numbers begin at `starts`."""
        return np.arange(len(self.shape)) + np.repeat(starts - self.start, self.dims)

    def nbytes(self) -> Integers:
        """Of each shard; exact below 2**53, and larger than any chunks can hold above."""
        if not len(self):
            return np.zeros(0, np.int64)
        # A row of ones in front of each shard's sizes: reduceat wants no empty group.
        ones = np.ones(len(self.shape) + len(self), np.float64)
        begins = self.start + np.arange(len(self))
        ones[np.arange(len(self.shape)) + np.repeat(np.arange(len(self)) + 1, self.dims)] = self.shape
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.multiply.reduceat(ones, begins) * self.tensors.itemsize[self.tensor]
        sizes[np.minimum.reduceat(ones, begins) == 0] = 0  # and not infinity times nothing
        return np.minimum(sizes, 2.0**62).astype(np.int64)


def _starts(lengths: Integers) -> Integers:
    return np.cumsum(lengths) - lengths


def _columns(
    dtype: np.dtype[Any], data: bytes, count: int, table: str, what: str, *, exact: bool
) -> tuple[dict[str, Column], int]:
    """The columns at the beginning of `data`, and where they end."""
    if len(data) < count * dtype.itemsize or (exact and len(data) != count * dtype.itemsize):
        raise FormatError(f"{what}: the {table} table has {len(data)} bytes for {count} {table}s", what=what)
    columns, at = {}, 0
    for name in dtype.names or ():
        columns[name] = np.frombuffer(data, dtype[name], count, at)
        at += count * dtype[name].itemsize
    return columns, at


@dataclass(slots=True)
class ChunkTable:
    """Columns, one row a chunk: pack number, offset in the pack, stored and raw length in bytes, codec number, CRC-64/NVME."""

    pack: Column
    offset: Column
    stored: Column
    raw: Column
    codec: Column
    crc: Column
    # Raw bytes of the chunks before each, and of all.
    ends: Integers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.raw, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.pack)

    @classmethod
    def from_rows(cls, rows: list[tuple[int, int, int, int, int, int]]) -> ChunkTable:
        table = np.array(rows, dtype=CHUNK_DTYPE)
        return cls(*(np.ascontiguousarray(table[name]) for name in CHUNK_DTYPE.names or ()))

    def encode(self) -> bytes:
        return b"".join(getattr(self, name).astype(CHUNK_DTYPE[name]).tobytes() for name in CHUNK_DTYPE.names or ())

    @classmethod
    def decode(cls, data: bytes, count: int, what: str) -> ChunkTable:
        return cls(**_columns(CHUNK_DTYPE, data, count, "chunk", what, exact=True)[0])
