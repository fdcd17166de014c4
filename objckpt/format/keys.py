"""Names of objects, relative to the checkpoint prefix. No name is ever written twice with other bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

LOG = "log/"
BUNDLES = "log-bundles/"
DATA = "data/"

_RECORD = re.compile(r"log/([0-9]{20})(?:\.([0-9]{6,19})\.([0-9a-f]{32}))?\.msgpack")
_BUNDLE = re.compile(r"log-bundles/([0-9]{20})-([0-9]{20})\.([0-9a-f]{32})\.msgpack")
_INDEX = re.compile(r"data/(s[0-9]{12}-[0-9A-Z]{26}-[0-9]{4,9})/rank-([0-9]{5})\.([0-9a-f]{32})\.([0-9a-f]{16})\.index")
_FAILED = re.compile(r"data/s[0-9]{12}-[0-9A-Z]{26}-[0-9]{4,9}/rank-([0-9]{5})\.failed")
_PACK = re.compile(r"data/(s[0-9]{12}-[0-9A-Z]{26}-[0-9]{4,9})/rank-([0-9]{5})-([0-9]{4,9})\.pack")
_ATTEMPT = re.compile(r"s([0-9]{12})-([0-9A-Z]{26})-([0-9]{4,9})")


@dataclass(frozen=True, slots=True)
class IndexName:
    attempt: str
    rank: int
    digest: str
    signature: str


@dataclass(frozen=True, slots=True)
class RecordName:
    """Of a record. Epoch and write id are in the keys of a log whose store does not keep writers apart, else None."""

    seq: int
    epoch: int | None = None
    write_id: bytes | None = None

    @property
    def key(self) -> str:
        if self.epoch is None or self.write_id is None:
            return record(self.seq)
        return f"{LOG}{self.seq:020d}.{self.epoch:06d}.{self.write_id.hex()}.msgpack"


def record(seq: int) -> str:
    return f"{LOG}{seq:020d}.msgpack"


def parse_record(key: str) -> RecordName | None:
    """None when the key is no record's."""
    found = _RECORD.fullmatch(key)
    if found is None:
        return None
    if found[2] is None:
        return RecordName(int(found[1]))
    name = RecordName(int(found[1]), int(found[2]), bytes.fromhex(found[3]))
    return name if name.key == key else None  # an epoch with more zeros than are due


@dataclass(frozen=True, slots=True)
class BundleName:
    first: int  # seq
    last: int
    digest: str

    @property
    def key(self) -> str:
        return bundle(self.first, self.last, self.digest)


def bundle(first: int, last: int, digest: str) -> str:
    """Of a copy of the records of these slots, both included."""
    return f"{BUNDLES}{first:020d}-{last:020d}.{digest}.msgpack"


def parse_bundle(key: str) -> BundleName | None:
    """None when the key is no bundle's."""
    found = _BUNDLE.fullmatch(key)
    return BundleName(int(found[1]), int(found[2]), found[3]) if found else None


def attempt(step: int, session: str, number: int) -> str:
    return f"s{step:012d}-{session}-{number:04d}"


def is_attempt(text: str) -> bool:
    return _ATTEMPT.fullmatch(text) is not None


def attempt_prefix(attempt: str) -> str:
    return f"{DATA}{attempt}/"


def index(attempt: str, rank: int, digest: str, signature: str) -> str:
    return f"{DATA}{attempt}/rank-{rank:05d}.{digest}.{signature}.index"


def parse_index(key: str) -> IndexName | None:
    found = _INDEX.fullmatch(key)
    return IndexName(found[1], int(found[2]), found[3], found[4]) if found else None


def failed(attempt: str, rank: int) -> str:
    """A rank's word that its part of an attempt will never come; its bytes say why."""
    return f"{DATA}{attempt}/rank-{rank:05d}.failed"


def parse_failed(key: str) -> int | None:
    """The rank of a failure's key; None when the key is none."""
    found = _FAILED.fullmatch(key)
    return int(found[1]) if found else None


def pack(attempt: str, rank: int, number: int) -> str:
    return f"{DATA}{attempt}/rank-{rank:05d}-{number:04d}.pack"


def is_pack(key: str) -> bool:
    return _PACK.fullmatch(key) is not None
