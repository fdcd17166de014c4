"""Bundles: copies of many records in one object, so that a log of ten thousand records is read by some dozen requests."""

from __future__ import annotations

from collections.abc import Sequence

from objckpt import limits
from objckpt.errors import FormatError
from objckpt.format import checksums, keys, wire

MAGIC = b"OCKPTBDL"
# Records in each; the first slot is a multiple of it. Small ones keep the tail of single records short.
SIZES = (256, 32)
MAX_BYTES = 64 * limits.MiB


def encode(first: int, records: Sequence[bytes]) -> tuple[str, bytes] | None:
    """Key and bytes of the bundle of the records from slot `first` on; None when it would be too large."""
    data = wire.seal(MAGIC, limits.FORMAT_VERSION, {"first": first, "records": list(records)})
    if len(data) > MAX_BYTES:
        return None
    return keys.bundle(first, first + len(records) - 1, checksums.digest_hex(data)), data


def decode(data: bytes, name: keys.BundleName) -> list[bytes]:
    """The bytes of the records, slot by slot. FormatError unless they are those that the name promises."""
    what = name.key
    if len(data) > MAX_BYTES or checksums.digest_hex(data) != name.digest:
        raise FormatError(f"{what}: its bytes are not those that its name promises", what=what)
    f = wire.Fields(wire.unseal(MAGIC, limits.FORMAT_VERSION, data, what), what)
    records: list[bytes] = f.get("records", list)
    if f.integer("first") != name.first or len(records) != name.last - name.first + 1:
        raise FormatError(f"{what}: it has records of other slots", what=what)
    if not all(type(record) is bytes for record in records):
        raise FormatError(f"{what}: malformed record", what=what)
    return records
