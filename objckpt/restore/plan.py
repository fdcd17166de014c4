"""Plans of a restore: pure functions from wanted boxes to chunks, and from chunks to ranged GETs.

A `Region` is a piece of flat memory that takes the row-major bytes of one part of one shard. A chunk that is wanted by
several regions (tied targets, pieces that meet inside it) is fetched once; of a partial box only the chunks that hold a
byte of it are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from objckpt.config import StoreOptions
from objckpt.geometry import Box, run_starts
from objckpt.restore.open import StoredShard, StoredTensor

MAX_GAP_BYTES = 64 * 1024  # reading this much for nothing is cheaper than another request
MAX_REQUEST_BYTES = 16 * 1024 * 1024
SHORT_RUN_BYTES = 512  # runs below this are gathered by numpy, longer ones copied one by one
GATHER_BYTES = 256 * 1024  # gathered at a time: the indexes take eight times as much

Starts = np.ndarray[tuple[int], np.dtype[np.int64]]
ByteArray = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Region:
    """Flat memory for the bytes of one part of one shard. This one is memory that is there already."""

    scratch_bytes = 0  # memory that `open` allocates and `close` gives back

    def __init__(self, fqn: str, memory: memoryview | None) -> None:
        self.fqn = fqn
        self.memory = memory
        self.pending = 0  # chunks that are still to come

    def open(self) -> memoryview:
        """The memory; called often, from several threads, under one lock."""
        assert self.memory is not None
        return self.memory

    def close(self) -> None:
        """Called once, in some thread, when every chunk has arrived and is verified."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What a region takes of its shard: the first bytes of runs, ascending, and the length of each, in bytes."""

    starts: Starts
    length: int

    @property
    def nbytes(self) -> int:
        return len(self.starts) * self.length

    def place_of(self, start: int, nbytes: int) -> int | None:
        """Where shard bytes `[start, start + nbytes)` lie in the region when one run holds all of them."""
        i = int(np.searchsorted(self.starts, start, "right")) - 1
        if i < 0 or start + nbytes > int(self.starts[i]) + self.length:
            return None
        return i * self.length + start - int(self.starts[i])

    def copy(self, chunk: ByteArray, start: int, region: ByteArray) -> None:
        """Copy into `region` what it takes of `chunk`, the shard's bytes from `start` on."""
        end, length = start + len(chunk), self.length
        first = int(np.searchsorted(self.starts, start - length, "right"))
        last = int(np.searchsorted(self.starts, end, "left"))
        if length <= SHORT_RUN_BYTES:
            inner_first = int(np.searchsorted(self.starts, start, "left"))
            inner_last = int(np.searchsorted(self.starts, end - length, "right"))
            step = max(1, GATHER_BYTES // length)
            within = np.arange(length)
            for at in range(inner_first, inner_last, step):
                to = min(at + step, inner_last)
                index = (self.starts[at:to] - start)[:, None] + within
                region[at * length : to * length] = chunk[index].reshape(-1)
            cut = [*range(first, min(inner_first, last)), *range(max(inner_last, inner_first, first), last)]
        else:
            cut = [*range(first, last)]
        for i in cut:
            run = int(self.starts[i])
            low, high = max(run, start), min(run + length, end)
            to = i * length + low - run
            region[to : to + high - low] = chunk[low - start : high - start]


@dataclass(frozen=True, slots=True)
class Use:
    """One region that wants a chunk. `start` is the chunk's first raw byte in the shard; `runs` None takes it whole."""

    region: Region
    start: int
    runs: Runs | None

    def place_of(self, nbytes: int) -> int | None:
        """Where the chunk of `nbytes` goes in the region when it goes there in one piece."""
        return self.start if self.runs is None else self.runs.place_of(self.start, nbytes)


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to fetch, and every region that wants it."""

    key: str
    offset: int
    stored: int
    raw: int
    codec: str
    crc: int
    uses: tuple[Use, ...]

    @property
    def identity(self) -> tuple[Any, ...]:
        """All but the uses, so that chunks sort in the order of the packs' bytes."""
        return self.key, self.offset, self.stored, self.raw, self.crc, self.codec

    @property
    def end(self) -> int:
        return self.offset + self.stored


@dataclass(frozen=True, slots=True)
class Request:
    """One ranged GET: chunks of one pack, ascending, perhaps with gaps between them."""

    key: str
    start: int
    nbytes: int
    chunks: tuple[ChunkRead, ...]


def overlaps(tensor: StoredTensor, target: Box) -> Iterator[tuple[StoredShard, Box]]:
    """The shards that hold a part of `target` (in global elements), each with the part, in global elements."""
    rows, common = tensor.boxes.common(target)
    for n, row in enumerate(rows.tolist()):
        yield tensor.shard(row), common[n]


def split(box: Box, itemsize: int, max_bytes: int) -> Iterator[Box]:
    """`box` cut across its slowest dimensions into boxes of at most `max_bytes` (or one element), row-major."""
    nbytes = box.elements * itemsize
    if nbytes <= max_bytes or box.elements <= 1:
        yield box
        return
    d = next(i for i, n in enumerate(box.shape) if n > 1)
    rows = max(1, max_bytes // (nbytes // box.shape[d]))
    for at in range(0, box.shape[d], rows):
        offset = (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :])
        shape = (*box.shape[:d], min(rows, box.shape[d] - at), *box.shape[d + 1 :])
        yield from split(Box(offset, shape), itemsize, max_bytes)


def box_runs(shard: StoredShard, part: Box) -> Runs | None:
    """The runs of `part` (in global elements) in a shard; None when it is the whole shard."""
    entry = shard.entry
    if part == entry.box:
        return None
    starts, length = run_starts(part.relative_to(entry.box), entry.shape)
    return Runs(starts * entry.itemsize, length * entry.itemsize)


def grid_runs(shard: StoredShard, grid: Sequence[range]) -> Runs:
    """The runs of every element whose global indexes are in `grid`, one ascending non-empty range a dimension."""
    entry = shard.entry
    tail = len(grid)  # dimensions [tail:] are taken whole, [tail - 1] without a step: together they are one run
    while tail > 0 and len(grid[tail - 1]) == entry.shape[tail - 1]:
        tail -= 1
    inner = math.prod(entry.shape[tail:])
    starts = np.zeros(1, np.int64)
    for d in range(tail):
        joined = d == tail - 1 and (grid[d].step == 1 or len(grid[d]) == 1)
        indexes = np.array(grid[d][:1] if joined else grid[d], dtype=np.int64) - entry.offset[d]
        starts = np.add.outer(starts, indexes * math.prod(entry.shape[d + 1 :])).reshape(-1)
        if joined:
            inner *= len(grid[d])
    return Runs(starts * entry.itemsize, inner * entry.itemsize)


def chunks_for(shard: StoredShard, runs: Runs | None, region: Region) -> list[ChunkRead]:
    """The chunks of `shard` that hold bytes of `runs` (None: all of it). Counts them in `region.pending`."""
    entry, table = shard.entry, shard.index.chunks
    ends = table.ends[entry.first_chunk : entry.first_chunk + entry.chunk_count + 1] - table.ends[entry.first_chunk]
    starts, ends = ends[:-1], ends[1:]
    if runs is None or entry.chunk_count == 1:
        needed = np.arange(entry.chunk_count)
    else:
        low = np.searchsorted(ends, runs.starts, "right")
        high = np.searchsorted(starts, runs.starts + runs.length, "left")
        marks = np.zeros(entry.chunk_count + 1, np.int64)
        np.add.at(marks, low, 1)
        np.add.at(marks, high, -1)
        needed = np.flatnonzero(np.cumsum(marks[:-1]))
    region.pending += len(needed)
    out = []
    for n in needed.tolist():
        row = entry.first_chunk + n
        out.append(
            ChunkRead(
                shard.index.packs[int(table.pack[row])][0],
                int(table.offset[row]),
                int(table.stored[row]),
                int(table.raw[row]),
                shard.index.codecs[int(table.codec[row])],
                int(table.crc[row]),
                (Use(region, int(starts[n]), runs),),
            )
        )
    return out


def coalesce(
    chunks: Sequence[ChunkRead], *, max_gap_bytes: int = MAX_GAP_BYTES, max_request_bytes: int = MAX_REQUEST_BYTES
) -> list[Request]:
    """Ranged GETs that read every chunk exactly once, neighbours together, in the order of the packs' bytes.

    A request is longer than `max_request_bytes` only when one chunk is.
    """
    out: list[Request] = []
    group: list[ChunkRead] = []
    for chunk in merge(chunks):
        joins = (
            group
            and chunk.key == group[-1].key
            and group[-1].end <= chunk.offset <= group[-1].end + max_gap_bytes
            and chunk.end - group[0].offset <= max_request_bytes
        )
        if group and not joins:
            out.append(_request(group))
            group = []
        group.append(chunk)
    if group:
        out.append(_request(group))
    return out


def request_bytes(chunks: Sequence[ChunkRead], options: StoreOptions) -> int:
    """How long the requests for these chunks should be. Chunks that pass through scratch memory keep them short."""
    if any(c.codec != "raw" or any(u.runs is not None or u.region.scratch_bytes for u in c.uses) for c in chunks):
        return MAX_REQUEST_BYTES
    return options.piece_bytes(sum(c.stored for c in chunks))


def merge(chunks: Sequence[ChunkRead]) -> list[ChunkRead]:
    """The chunks in the order of the packs' bytes; one that is wanted several times appears once, with all uses."""
    out: list[ChunkRead] = []
    last = None
    for same, chunk in sorted(((c.identity, c) for c in chunks), key=lambda each: each[0]):
        if same == last:
            out[-1] = replace(chunk, uses=out[-1].uses + chunk.uses)
        else:
            out.append(chunk)
        last = same
    return out


def _request(group: Sequence[ChunkRead]) -> Request:
    return Request(group[0].key, group[0].offset, group[-1].end - group[0].offset, tuple(group))
