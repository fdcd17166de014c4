"""Checksums of the format.

* chunk: CRC-64/NVME of the stored bytes (the polynomial that S3 calls CRC64NVME), by awscrt: 12–22 GB/s.
* shard: CRC-64/NVME of the raw bytes, which for raw chunks is combined from theirs and costs no second pass. It does not
  depend on the chunk size. It tells content apart by 64 bits; it is no defence against forgery.
* index: SHA-256, the first 128 bits, in the index's key and in the commit record.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from awscrt import checksums as _crt

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]


def crc64(data: Buffer, value: int = 0) -> int:
    """CRC-64/NVME of `data` appended to bytes whose CRC is `value`."""
    return int(_crt.crc64nvme(data, value))


def crc64_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC of A‖B from those of A and B and the length of B."""
    return int(_crt.combine_crc64nvme(first, second, second_bytes))


def crc64_header(value: int) -> str:
    """The value as S3's `x-amz-checksum-crc64nvme` wants it: base64 of 8 big-endian bytes."""
    return base64.b64encode(value.to_bytes(8, "big")).decode()


def digest_hex(data: Buffer) -> str:
    """The first 32 hex digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:32]
