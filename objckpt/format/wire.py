"""Strict, bounded msgpack: every length is checked against the bytes at hand before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack

from objckpt.errors import FormatError

MAGIC_RECORD = b"OCKPTREC"
MAGIC_INDEX = b"OCKPTIDX"
_MAX_COLLISIONS = 100  # keys of one hash: an honest map has a handful


def pack(value: Any) -> bytes:
    """msgpack bytes of plain data (str, bytes, int, float, bool, None, list, dict, ExtType)."""
    return bytes(msgpack.packb(value, use_bin_type=True, strict_types=True))


def unpack(data: bytes | memoryview, what: str, ext_hook: Callable[[int, bytes], Any] | None = None) -> Any:
    """The one value that `data` holds. FormatError, naming `what`, for anything else (trailing bytes, absurd lengths)."""

    def refuse(code: int, data: bytes) -> Any:
        raise FormatError(f"{what}: unknown extension type {code}", what=what)

    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=False, use_list=True, ext_hook=ext_hook or refuse, object_pairs_hook=_pairs
        )
    except FormatError as err:
        raise FormatError(f"{what}: {err}" if what not in str(err) else str(err), what=what) from err
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError, MemoryError) as err:
        raise FormatError(f"{what}: not valid msgpack: {type(err).__name__}: {str(err)[:200]}", what=what) from err


def check_keys(keys: list[Any], what: str) -> None:
    """FormatError for keys that are an attack: some hundred thousand of one hash keep a dict busy for hours."""
    try:
        for key in keys:
            if type(key) in (int, tuple):
                repr(key)  # Python refuses numbers of thousands of digits, and then no FQN could name what lies there
    except ValueError as err:
        raise FormatError(f"{what}: a key is an absurd number", what=what) from err
    if len(keys) > _MAX_COLLISIONS and max(Counter(map(hash, keys)).values()) > _MAX_COLLISIONS:
        raise FormatError(f"{what}: too many keys share a hash", what=what)


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    check_keys([key for key, _ in pairs], "map")
    out = dict(pairs)
    if len(out) != len(pairs):
        raise FormatError("a map has the same key twice")
    return out


def seal(magic: bytes, version: int, body: dict[str, Any]) -> bytes:
    """`magic`, the version as two big-endian bytes, then the msgpack map."""
    return magic + version.to_bytes(2, "big") + pack(body)


def unseal(magic: bytes, version: int, data: bytes, what: str) -> dict[str, Any]:
    """The map of a sealed object. FormatError for foreign bytes and for versions that this code does not know."""
    if len(data) < 10 or data[:8] != magic:
        raise FormatError(f"{what}: these are not objckpt's bytes (wrong magic)", what=what)
    found = int.from_bytes(data[8:10], "big")
    if found != version:
        raise FormatError(
            f"{what}: format version {found}; this objckpt reads version {version}: upgrade objckpt", what=what
        )
    body = unpack(memoryview(data)[10:], what)
    if type(body) is not dict:
        raise FormatError(f"{what}: expected a map, found {type(body).__name__}", what=what)
    return body


class Fields:
    """Typed access to a decoded map; every wrong type or missing field is a FormatError that names it."""

    def __init__(self, body: dict[str, Any], what: str) -> None:
        self.body, self.what = body, what

    def get(self, name: str, *types: type) -> Any:
        if name not in self.body:
            raise FormatError(f"{self.what}: field {name!r} is missing", what=self.what)
        value = self.body[name]
        if type(value) not in types:
            raise FormatError(f"{self.what}: field {name!r} has type {type(value).__name__}", what=self.what)
        return value

    def integer(self, name: str, low: int = 0, high: int = 2**63 - 1) -> int:
        value: int = self.get(name, int)
        if not low <= value <= high:
            raise FormatError(f"{self.what}: field {name!r} = {value} is outside [{low}, {high}]", what=self.what)
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name, int, type(None)) is None else self.integer(name)

    def text(self, name: str, limit: int = 4096) -> str:
        value: str = self.get(name, str)
        if len(value) > limit:
            raise FormatError(f"{self.what}: field {name!r} is longer than {limit}", what=self.what)
        return value

    def blob(self, name: str, length: int | None = None) -> bytes:
        value: bytes = self.get(name, bytes)
        if length is not None and len(value) != length:
            raise FormatError(f"{self.what}: field {name!r} has {len(value)} bytes, not {length}", what=self.what)
        return value

    def rows(self, name: str, *columns: type | tuple[type, ...]) -> list[list[Any]]:
        """A list of rows whose cells have exactly these types."""
        rows: list[Any] = self.get(name, list)
        for row in rows:
            if type(row) is not list or len(row) != len(columns):
                raise FormatError(f"{self.what}: field {name!r} has a malformed row", what=self.what)
            for cell, kind in zip(row, columns, strict=True):
                if type(cell) not in (kind if isinstance(kind, tuple) else (kind,)):
                    raise FormatError(
                        f"{self.what}: field {name!r} has a cell of type {type(cell).__name__}", what=self.what
                    )
        return rows
