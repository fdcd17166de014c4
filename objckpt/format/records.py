"""Records of the log. A commit record is the manifest of a checkpoint: small, and written last."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from objckpt import limits
from objckpt.errors import FormatError
from objckpt.format import keys, values, wire

WRITE_ID_BYTES = 16
_HEX32 = re.compile(r"[0-9a-f]{32}")
_HEX16 = re.compile(r"[0-9a-f]{16}")
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_ULID = re.compile(r"[0-9A-Z]{26}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record has. `seq` is its place in the log and comes from the key, not from the bytes."""

    kind: ClassVar[str]
    seq: int = -1
    write_id: bytes
    epoch: int
    session: str
    time_s: float  # seconds since 1970, the writer's clock; informative only
    host: str

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def encode(self) -> bytes:
        head = {
            "kind": self.kind,
            "write_id": self.write_id,
            "epoch": self.epoch,
            "session": self.session,
            "time_s": self.time_s,
            "host": self.host,
        }
        return wire.seal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, head | self.body())


@dataclass(frozen=True, kw_only=True)
class Open(Record):
    """A writer starts. Its epoch is above all before it: older writers are fenced from here on."""

    kind = "open"
    world_size: int
    capabilities: dict[str, Any] = field(default_factory=dict)  # of the store, as probed

    def body(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "capabilities": self.capabilities}


@dataclass(frozen=True, kw_only=True)
class Commit(Record):
    """The manifest. Sizes in bytes; `parent` is the seq of the checkpoint that this state descends from."""

    kind = "commit"
    step: int
    attempt: str
    parent: int | None
    world_size: int
    raw_bytes: int
    stored_bytes: int
    tensors: int
    ranks: list[tuple[str, int]]  # per rank: digest (32 hex) and size of its index
    signature: str  # 16 hex: what all ranks have alike, see SPEC.md; part of the indexes' names
    foreign_packs: list[str] = field(default_factory=list)  # packs of older attempts that the indexes refer to
    meta: Any = None  # the user's metadata, a neutral value

    def body(self) -> dict[str, Any]:
        names = ("step", "attempt", "parent", "world_size", "raw_bytes", "stored_bytes", "tensors", "foreign_packs",
            "signature")  # fmt: skip
        return {n: getattr(self, n) for n in names} | {
            "ranks": [list(r) for r in self.ranks],
            "meta": values.pack(self.meta),
        }

    def index_key(self, rank: int) -> str:
        return keys.index(self.attempt, rank, self.ranks[rank][0], self.signature)


@dataclass(frozen=True, kw_only=True)
class Retire(Record):
    """Checkpoints (by seq) that are no longer live, and attempts that may never commit. Their data may be deleted."""

    kind = "retire"
    seqs: list[int] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    reason: str = ""

    def body(self) -> dict[str, Any]:
        return {"seqs": self.seqs, "attempts": self.attempts, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class Tag(Record):
    """A name for the checkpoint of seq `target`; None takes the name away. A tagged checkpoint is kept by retention."""

    kind = "tag"
    name: str
    target: int | None

    def body(self) -> dict[str, Any]:
        return {"name": self.name, "target": self.target}


def is_tag(name: str) -> bool:
    """Whether a text may be a tag: a letter first, so that it is never taken for a step."""
    return _TAG.fullmatch(name) is not None


def decode(data: bytes, seq: int, name: keys.RecordName | None = None) -> Record:
    """The record of slot `seq`. FormatError for unknown kinds too: a fold that skips what it cannot read would lie.

    name: of the key; None for the one without epoch and write id.
    """
    name = name or keys.RecordName(seq)
    what = name.key
    if len(data) > limits.MAX_RECORD_BYTES:
        raise FormatError(f"{what}: longer than {limits.MAX_RECORD_BYTES} bytes", what=what)
    f = wire.Fields(wire.unseal(wire.MAGIC_RECORD, limits.FORMAT_VERSION, data, what), what)
    head: dict[str, Any] = {
        "seq": seq,
        "write_id": f.blob("write_id", WRITE_ID_BYTES),
        "epoch": f.integer("epoch", 1),
        "session": f.text("session"),
        "time_s": f.get("time_s", float),
        "host": f.text("host"),
    }
    if not _ULID.fullmatch(head["session"]):
        raise FormatError(f"{what}: malformed session", what=what)
    if name.write_id is not None and (head["epoch"], head["write_id"]) != (name.epoch, name.write_id):
        raise FormatError(f"{what}: this is the record of another name", what=what)
    kind = f.text("kind")
    if kind == "open":
        return Open(**head, world_size=f.integer("world_size", 1), capabilities=f.get("capabilities", dict))
    if kind == "commit":
        return _commit(f, head, what)
    if kind == "retire":
        return _retire(f, head, what)
    if kind == "tag":
        tag = Tag(**head, name=f.text("name"), target=f.optional_integer("target"))
        if not is_tag(tag.name):
            raise FormatError(f"{what}: malformed tag", what=what)
        return tag
    raise FormatError(f"{what}: record of unknown kind {kind[:40]!r}; a newer objckpt may know it: upgrade", what=what)


def _retire(f: wire.Fields, head: dict[str, Any], what: str) -> Retire:
    record = Retire(**head, seqs=f.get("seqs", list), attempts=f.get("attempts", list), reason=f.text("reason"))
    if not all(type(s) is int and 0 <= s < record.seq for s in record.seqs):
        raise FormatError(f"{what}: malformed list of checkpoints", what=what)
    if not all(type(a) is str and keys.is_attempt(a) for a in record.attempts):
        raise FormatError(f"{what}: malformed list of attempts", what=what)
    return record


def _commit(f: wire.Fields, head: dict[str, Any], what: str) -> Commit:
    commit = Commit(
        **head,
        step=f.integer("step", 0, limits.MAX_STEP),
        attempt=f.text("attempt"),
        parent=f.optional_integer("parent"),
        world_size=f.integer("world_size", 1, limits.MAX_RANKS),
        raw_bytes=f.integer("raw_bytes"),
        stored_bytes=f.integer("stored_bytes"),
        tensors=f.integer("tensors"),
        ranks=[(digest, size) for digest, size in f.rows("ranks", str, int)],
        signature=f.text("signature"),
        foreign_packs=f.get("foreign_packs", list),
        meta=values.unpack(f.blob("meta"), what),
    )
    if not _HEX16.fullmatch(commit.signature):
        raise FormatError(f"{what}: malformed signature", what=what)
    if not keys.is_attempt(commit.attempt) or len(commit.ranks) != commit.world_size:
        raise FormatError(f"{what}: malformed attempt or rank list", what=what)
    if not all(_HEX32.fullmatch(d) and 0 <= n <= limits.MAX_INDEX_BYTES for d, n in commit.ranks):
        raise FormatError(f"{what}: malformed rank list", what=what)
    if not all(type(k) is str and keys.is_pack(k) for k in commit.foreign_packs):
        raise FormatError(f"{what}: malformed foreign packs", what=what)
    return commit
