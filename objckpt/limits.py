"""Limits of S3 and of the format, as named constants with their source."""

from __future__ import annotations

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

# S3 (AWS user guide, "Amazon S3 multipart upload limits"; FlashBlade and MinIO document the same or wider).
MIN_PART_BYTES = 5 * MiB
MAX_PART_BYTES = 5 * GiB
MAX_PARTS = 10_000
MAX_OBJECT_BYTES = 5 * 1024 * GiB  # the classic limit; AWS raised its own to 48.8 TiB, other servers did not
MAX_KEY_BYTES = 1024
MAX_DELETE_KEYS = 1000
MAX_BODY_BYTES = 2 * GiB - 1  # one TLS write larger than this overflows in common stacks

READERS = 16  # small objects read at once: records of the log, indexes

# Format version 1.
FORMAT_VERSION = 1
CHUNK_BYTES = 4 * MiB
PART_BYTES = 16 * MiB
SLAB_BYTES = 64 * MiB  # a multiple of PART_BYTES, so that a raw part never spans two slabs
MAX_RECORD_BYTES = 16 * MiB
MAX_INDEX_BYTES = 1 * GiB
MAX_VALUE_DEPTH = 64  # each level may be a msgpack document in a document, of 32 KiB C stack while it is read
MAX_FQN_BYTES = 4096
MAX_DIMS = 64
MAX_RANKS = 100_000  # five digits in the keys
MAX_STEP = 10**12 - 1
MAX_CHUNK_RAW_BYTES = 64 * MiB
