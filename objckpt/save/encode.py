"""From snapshot to parts: chunk, digest, optionally compress, and cut the stream into multipart pieces. Blocking; no I/O.

One pass: CRCs are taken of the runs between chunk and part borders, and a chunk's, a part's and a leaf's are combined from
them. Raw bytes are never copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from objckpt.format import checksums, codecs
from objckpt.save import plan

Pieces = list[memoryview]
CODECS = ["raw", "zstd"]  # the numbers in the chunk table


@dataclass(slots=True)
class Part:
    """One multipart piece: `pieces` back to back; `last` of its pack."""

    pack: int
    number: int  # from 1
    pieces: Pieces = field(default_factory=list)
    size: int = 0
    crc: int = 0
    last: bool = False


@dataclass(slots=True)
class Encoded:
    """What the index needs to know, filled while the parts are drawn; complete when they are exhausted."""

    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)  # of the chunk table
    digests: list[int] = field(default_factory=list)  # per leaf: CRC-64/NVME of its raw bytes
    pack_sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Chunk:
    leaf: int
    raw: int
    codec: int
    pieces: Pieces
    crc: int | None = None  # of the raw bytes; None: they are `pieces`


def encode(
    leaves: Sequence[plan.LeafPlan],
    itemsizes: Sequence[int],
    read: Callable[[int, int], Pieces],
    *,
    compression: str,
    chunk_bytes: int,
    part_bytes: int,
    pool: Executor,
    window: int,
    out: Encoded,
) -> Iterator[Part]:
    """The parts of all packs, in order. `read(start, nbytes)` gives the snapshot's memory.

    With compression up to `window` chunks are encoded ahead in `pool`: the bound of the extra memory.
    """
    cutter = _Cutter(part_bytes, plan.pack_limit(part_bytes), out)
    out.digests.extend([0] * len(leaves))
    chunks = _chunks(leaves, read, chunk_bytes)
    stream = chunks if compression == "none" else _compressed(chunks, itemsizes, compression, pool, window)
    for chunk in stream:
        yield from cutter.add(chunk)
    yield from cutter.finish()


def _chunks(leaves: Sequence[plan.LeafPlan], read: Callable[[int, int], Pieces], chunk_bytes: int) -> Iterator[_Chunk]:
    for number, leaf in enumerate(leaves):
        for start, nbytes in plan.chunks_of(leaf, chunk_bytes):
            yield _Chunk(number, nbytes, 0, read(start, nbytes))


def _compressed(
    chunks: Iterator[_Chunk], itemsizes: Sequence[int], codec: str, pool: Executor, window: int
) -> Iterator[_Chunk]:
    number = CODECS.index(codec)

    def work(chunk: _Chunk) -> _Chunk:
        raw = chunk.pieces[0] if len(chunk.pieces) == 1 else memoryview(b"".join(chunk.pieces))
        stored = codecs.encode(codec, raw, itemsizes[chunk.leaf])
        if stored is None:
            return chunk
        return _Chunk(chunk.leaf, chunk.raw, number, [memoryview(stored)], checksums.crc64(raw))

    ahead: deque[Future[_Chunk]] = deque()
    try:
        for chunk in chunks:
            ahead.append(pool.submit(work, chunk))
            if len(ahead) >= window:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()


class _Cutter:
    """Cuts the stream of chunks into parts of equal size (the last may be smaller) and packs of at most `pack_limit`."""

    def __init__(self, part_bytes: int, pack_limit: int, out: Encoded) -> None:
        self.part_bytes, self.pack_limit, self.out = part_bytes, pack_limit, out
        self.part = Part(0, 1)
        self.pack_bytes = 0

    def add(self, chunk: _Chunk) -> Iterator[Part]:
        stored = sum(len(p) for p in chunk.pieces)
        if self.pack_bytes + stored > self.pack_limit:
            yield from self.finish()
        row_pack, row_offset = self.part.pack, self.pack_bytes
        crc = 0
        for piece in chunk.pieces:
            while len(piece):
                if self.part.size == self.part_bytes:  # only now is it known that another one follows
                    yield self.part
                    self.part = Part(self.part.pack, self.part.number + 1)
                take = min(len(piece), self.part_bytes - self.part.size)
                run, piece = piece[:take], piece[take:]
                run_crc = checksums.crc64(run)
                crc = checksums.crc64_combine(crc, run_crc, take)
                self.part.crc = checksums.crc64_combine(self.part.crc, run_crc, take)
                self.part.pieces.append(run)
                self.part.size += take
        self.pack_bytes += stored
        self.out.rows.append((row_pack, row_offset, stored, chunk.raw, chunk.codec, crc))
        raw_crc = crc if chunk.crc is None else chunk.crc
        self.out.digests[chunk.leaf] = checksums.crc64_combine(self.out.digests[chunk.leaf], raw_crc, chunk.raw)

    def finish(self) -> Iterator[Part]:
        if self.part.size:
            self.part.last = True
            yield self.part
            self.out.pack_sizes.append(self.pack_bytes)
            self.part = Part(self.part.pack + 1, 1)
            self.pack_bytes = 0
