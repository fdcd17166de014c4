"""The index: what one rank wrote in one attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from objckpt import limits
from objckpt.errors import FormatError
from objckpt.format import checksums, keys, wire
from objckpt.format.tables import ChunkTable, ShardEntry, ShardTable, TensorEntry, TensorTable

PER_RANK = "per_rank"  # the part of the tree that has what belongs to single ranks
NOTHING_ALIKE = wire.pack([])


@dataclass(slots=True)
class Index:
    """See SPEC.md, "Index". `tree` is `values.pack` of the tree; None on ranks that do not carry it."""

    step: int
    attempt: str
    rank: int
    world_size: int
    packs: list[tuple[str, int]]  # key relative to the prefix, size in bytes
    shards: Sequence[ShardEntry]  # a ShardTable when it was read
    chunks: ChunkTable
    codecs: list[str]
    tree: bytes | None = field(default=None, repr=False)
    # msgpack of rows: FQN and digest of what ranks have alike.
    replicated: bytes = field(default=NOTHING_ALIKE, repr=False)
    tensors: Sequence[TensorEntry] = ()  # at least those of the shards, when it was read

    @property
    def signature(self) -> str:
        """16 hex digits that are the same for all ranks of a checkpoint: of what they have alike."""
        return checksums.digest_hex(self.replicated)[:16]

    def alike(self) -> dict[str, int]:
        """By FQN, the digest of what all ranks should have alike. FormatError when that is no such list."""
        rows: Any = wire.Fields({"replicated": wire.unpack(self.replicated, "index")}, "index").rows(
            "replicated", str, int
        )
        return dict(rows)

    @property
    def table(self) -> ShardTable:
        """The shards as columns, with all tensors of the index."""
        return self.shards if isinstance(self.shards, ShardTable) else ShardTable.of(self.shards, self.tensors)

    def encode(self) -> bytes:
        shards = self.table
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
                "tensors": shards.tensors.data,
                "shard_count": len(shards),
                "shards": shards.encode(),
                "chunk_count": len(self.chunks),
                "chunks": self.chunks.encode(),
                "tree": self.tree,
                "replicated": self.replicated,
            },
        )

    @classmethod
    def decode(cls, data: bytes, what: str = "index", known: dict[Any, Any] | None = None) -> Index:
        """FormatError unless every field has its type, every shard its bytes, and every chunk lies inside its pack.

        known: what indexes of one checkpoint have alike, kept from one to the next; give the same dict for all of them.
        """
        known = {} if known is None else known
        f = wire.Fields(wire.unseal(wire.MAGIC_INDEX, limits.FORMAT_VERSION, data, what), what)
        packs = [(key, size) for key, size in f.rows("packs", str, int)]
        codecs: list[str] = f.get("codecs", list)
        listed, alike = f.blob("tensors"), f.blob("replicated")
        tensors: TensorTable | None = known.get(("tensors", listed))
        if tensors is None:
            tensors = known["tensors", listed] = TensorTable.decode(listed, what)
        index = cls(
            step=f.integer("step", 0, limits.MAX_STEP),
            attempt=f.text("attempt"),
            rank=f.integer("rank", 0, limits.MAX_RANKS - 1),
            world_size=f.integer("world_size", 1, limits.MAX_RANKS),
            packs=packs,
            shards=(shards := ShardTable.decode(f.blob("shards"), f.integer("shard_count", 0, 2**32), tensors, what)),
            chunks=ChunkTable.decode(f.blob("chunks"), f.integer("chunk_count", 0, 2**32), what),
            codecs=codecs,
            tree=f.get("tree", bytes, type(None)),
            replicated=known.setdefault(("replicated", alike), alike),
            tensors=tensors.entries,
        )
        _check(index, shards, what)
        return index


def _check(index: Index, shards: ShardTable, what: str) -> None:
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
    if not len(shards):
        return
    last = shards.first_chunk + shards.chunk_count
    _each(last <= len(chunks), shards, lambda row: "chunks are missing", what)
    have, nbytes = chunks.ends[last] - chunks.ends[shards.first_chunk], shards.nbytes()
    _each(
        have == nbytes, shards, lambda row: f"its chunks hold {have[row]} bytes, its shape asks for {nbytes[row]}", what
    )


def _each(holds: np.ndarray[Any, Any], shards: ShardTable, why: Callable[[int], str], what: str) -> None:
    if not holds.all():
        row = int(np.argmin(holds))
        raise FormatError(f"{what}: {shards[row].fqn}: {why(row)}", what=what, fqn=shards[row].fqn)
