"""Names of objects, relative to the checkpoint prefix. No name is ever written twice with other bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

LOG = "log/"
DATA = "data/"

_RECORD = re.compile(r"log/(\d{20})\.msgpack")
_INDEX = re.compile(r"data/(s\d{12}-[0-9A-Z]{26}-\d{4,9})/rank-(\d{5})\.([0-9a-f]{32})\.([0-9a-f]{16})\.index")
_FAILED = re.compile(r"data/s\d{12}-[0-9A-Z]{26}-\d{4,9}/rank-(\d{5})\.failed")
_PACK = re.compile(r"data/(s\d{12}-[0-9A-Z]{26}-\d{4,9})/rank-(\d{5})-(\d{4,9})\.pack")
_ATTEMPT = re.compile(r"s(\d{12})-([0-9A-Z]{26})-(\d{4,9})")


@dataclass(frozen=True, slots=True)
class IndexName:
    attempt: str
    rank: int
    digest: str
    signature: str


def record(seq: int) -> str:
    return f"{LOG}{seq:020d}.msgpack"


def record_seq(key: str) -> int | None:
    """The seq of a record's key; None when the key is no record."""
    found = _RECORD.fullmatch(key)
    return int(found[1]) if found else None


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
