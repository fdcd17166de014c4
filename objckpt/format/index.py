"""The index: what one rank wrote in one attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from objckpt import limits
from objckpt.errors import FormatError
from objckpt.format import checksums, keys, wire
from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.fqn import to_fqn
from objckpt.format.values import dims
from objckpt.format.values import pack as pack_value
from objckpt.format.values import unpack as unpack_value
from objckpt.geometry import Box

CHUNK_DTYPE = np.dtype(
    [("pack", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("codec", "u1"), ("crc", "<u8")]
)
PER_RANK = "per_rank"  # the part of the tree that has what belongs to single ranks
_COLUMNS = tuple(CHUNK_DTYPE.names or ())


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


@dataclass(slots=True)
class ChunkTable:
    """Columns, one row a chunk: pack number, offset in the pack, stored and raw length in bytes, codec number, CRC-64/NVME."""

    pack: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    stored: np.ndarray[Any, Any]
    raw: np.ndarray[Any, Any]
    codec: np.ndarray[Any, Any]
    crc: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.pack)

    @classmethod
    def from_rows(cls, rows: list[tuple[int, int, int, int, int, int]]) -> ChunkTable:
        table = np.array(rows, dtype=CHUNK_DTYPE)
        return cls(*(np.ascontiguousarray(table[name]) for name in _COLUMNS))

    def encode(self) -> bytes:
        return b"".join(getattr(self, name).astype(CHUNK_DTYPE[name]).tobytes() for name in _COLUMNS)

    @classmethod
    def decode(cls, data: bytes, count: int, what: str) -> ChunkTable:
        if len(data) != count * CHUNK_DTYPE.itemsize:
            raise FormatError(f"{what}: the chunk table has {len(data)} bytes for {count} chunks", what=what)
        columns, at = [], 0
        for name in _COLUMNS:
            dtype = CHUNK_DTYPE[name]
            columns.append(np.frombuffer(data, dtype, count, at))
            at += count * dtype.itemsize
        return cls(*columns)


@dataclass(slots=True)
class Index:
    """See SPEC.md, "Index". `tree` is `values.pack` of the tree; None on ranks that do not carry it."""

    step: int
    attempt: str
    rank: int
    world_size: int
    packs: list[tuple[str, int]]  # key relative to the prefix, size in bytes
    shards: list[ShardEntry]
    chunks: ChunkTable
    codecs: list[str]
    tree: bytes | None = field(default=None, repr=False)
    replicated: list[tuple[str, int]] = field(
        default_factory=list, repr=False
    )  # FQN and digest of what ranks have alike

    @property
    def signature(self) -> str:
        """16 hex digits that are the same for all ranks of a checkpoint: of what they have alike."""
        return checksums.digest_hex(wire.pack([list(row) for row in self.replicated]))[:16]

    def encode(self) -> bytes:
        return wire.seal(
            wire.MAGIC_INDEX,
            limits.FORMAT_VERSION,
            {
                "step": self.step,
                "attempt": self.attempt,
                "rank": self.rank,
                "world_size": self.world_size,
                "packs": [list(p) for p in self.packs],
                "codecs": self.codecs,
                "shards": [
                    [
                        pack_value(s.path),
                        s.dtype,
                        list(s.global_shape),
                        list(s.offset),
                        list(s.shape),
                        s.digest,
                        s.first_chunk,
                        s.chunk_count,
                    ]
                    for s in self.shards
                ],
                "chunk_count": len(self.chunks),
                "chunks": self.chunks.encode(),
                "tree": self.tree,
                "replicated": [list(row) for row in self.replicated],
            },
        )

    @classmethod
    def decode(cls, data: bytes, what: str = "index") -> Index:
        """FormatError unless every field has its type, every shard its bytes, and every chunk lies inside its pack."""
        f = wire.Fields(wire.unseal(wire.MAGIC_INDEX, limits.FORMAT_VERSION, data, what), what)
        packs = [(key, size) for key, size in f.rows("packs", str, int)]
        codecs: list[str] = f.get("codecs", list)
        columns = (bytes, str, list, list, list, int, int, int)
        index = cls(
            step=f.integer("step", 0, limits.MAX_STEP),
            attempt=f.text("attempt"),
            rank=f.integer("rank", 0, 99_999),
            world_size=f.integer("world_size", 1, 100_000),
            packs=packs,
            shards=[_shard(row, what) for row in f.rows("shards", *columns)],
            chunks=ChunkTable.decode(f.get("chunks", bytes), f.integer("chunk_count", 0, 2**32), what),
            codecs=codecs,
            tree=f.get("tree", bytes, type(None)),
            replicated=[(fqn, digest) for fqn, digest in f.rows("replicated", str, int)],
        )
        _check(index, what)
        return index


def _shard(row: list[Any], what: str) -> ShardEntry:
    packed, dtype, global_shape, offset, shape, digest, first, count = row
    path = unpack_value(packed, what)
    if type(path) is not tuple or not path:
        raise FormatError(f"{what}: a shard has no path", what=what)
    wire.check_keys(list(path), what)
    name = to_fqn(path)
    if dtype not in ITEMSIZE:
        raise FormatError(f"{what}: {name}: unknown dtype {dtype!r}; a newer objckpt may know it", what=what, fqn=name)
    if len(name.encode()) > limits.MAX_FQN_BYTES or not 0 <= digest < 2**64 or first < 0 or count < 0:
        raise FormatError(f"{what}: {name[:200]}: malformed shard", what=what)
    shard = ShardEntry(
        path, dtype, dims(global_shape, what), dims(offset, what), dims(shape, what), digest, first, count
    )
    bounds = zip(shard.offset, shard.shape, shard.global_shape, strict=False)
    if not len(shard.offset) == len(shard.shape) == len(shard.global_shape) or any(o + n > g for o, n, g in bounds):
        raise FormatError(f"{what}: {name}: the shard's box leaves the global shape", what=what, fqn=name)
    return shard


def _check(index: Index, what: str) -> None:
    """Relations between the fields: what one field promises, another must hold."""
    chunks = index.chunks

    def require(holds: Any, why: str) -> None:
        if not holds:
            raise FormatError(f"{what}: {why}", what=what)

    require(keys.is_attempt(index.attempt), "malformed attempt")
    require(index.rank < index.world_size, "rank is not below world_size")
    require(all(keys.is_pack(k) and 0 <= n <= limits.MAX_OBJECT_BYTES for k, n in index.packs), "malformed pack list")
    require(all(type(c) is str for c in index.codecs) and len(index.codecs) < 256, "malformed codec list")
    sizes = np.array([n for _, n in index.packs] or [0], dtype=np.uint64)
    if len(chunks):
        require(chunks.pack.max() < len(index.packs), "a chunk lies in an unknown pack")
        require(chunks.codec.max() < len(index.codecs), "a chunk has an unknown codec")
        require(chunks.raw.max() <= limits.MAX_CHUNK_RAW_BYTES and chunks.raw.min() > 0, "a chunk has an absurd length")
        require(chunks.stored.max() <= 2 * limits.MAX_CHUNK_RAW_BYTES, "a chunk has an absurd length")
        require(chunks.offset.max() < 2**62, "a chunk has an absurd offset")
        require((chunks.offset + chunks.stored <= sizes[chunks.pack]).all(), "a chunk ends beyond its pack")
    ends = np.concatenate(([0], np.cumsum(chunks.raw, dtype=np.uint64)))
    seen = set()
    for shard in index.shards:
        require(shard.first_chunk + shard.chunk_count <= len(chunks), f"{shard.fqn}: chunks are missing")
        have = int(ends[shard.first_chunk + shard.chunk_count] - ends[shard.first_chunk])
        require(have == shard.nbytes, f"{shard.fqn}: its chunks hold {have} bytes, its shape asks for {shard.nbytes}")
        require((shard.fqn, shard.offset) not in seen, f"{shard.fqn}: listed twice")
        seen.add((shard.fqn, shard.offset))
