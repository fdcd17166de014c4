"""Codecs of chunks: `raw`, the bytes themselves, and `zstd`, byte planes compressed apart. No torch.

A float's sign and exponent bytes are alike from element to element, its mantissa bytes are noise. So `zstd` puts byte
`p` of every element into plane `p`, compresses those planes that gain from it and leaves the others as they are. The
stored bytes:

    u8 layout (1) · u8 planes P in [1, 16] · P x u32 LE size, the top bit set when the plane is one zstd frame
    the planes, back to back · the last `raw % P` bytes of the chunk

Plane `p` is `raw // P` bytes: p, p + P, p + 2 P, … of the chunk. A frame needs a window of at most 8 MiB; its content
size may be absent. Nothing may follow. The raw length is the reader's to know: the chunk table has it.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from objckpt.errors import FormatError, IntegrityError
from objckpt.limits import KiB, MiB

CODECS = ("raw", "zstd")

_LAYOUT = 1
_MAX_PLANES = 16
_COMPRESSED = 1 << 31
_MAX_WINDOW_BYTES = 8 * MiB  # what a frame of unknown size may make the decoder allocate beside its output
_MIN_RAW_BYTES = 1 * KiB  # below it the headers eat the gain
_MIN_GAIN = 1 / 64  # of a plane, and of the whole: less is not worth a decoder's time
_PROBES, _PROBE_BYTES = 8, 2 * KiB  # samples of a plane, spread evenly: the halves of a chunk may differ much

# Entropy coding (Huffman) and next to no search for matches: trained weights have none, and it runs at 1 GB/s and more.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,  # the chunk's CRC covers it
)

Bytes = NDArray[np.uint8]


class _Contexts(threading.local):
    """zstd contexts and scratch memory of one thread: neither may be used by two at once."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def scratch(self, nbytes: int) -> Bytes:
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]


_contexts = _Contexts()


def encode(name: str, raw: memoryview, itemsize: int) -> bytes | None:
    """The stored bytes of a chunk of elements of `itemsize` bytes; None when they should be stored raw.

    Thread-safe; the heavy parts release the GIL. Uses scratch memory of the size of one plane and of the result.

    Raises:
        FormatError: no such codec.
    """
    _check_name(name)
    if name == "raw" or len(raw) < _MIN_RAW_BYTES:
        return None
    planes = itemsize if 1 <= itemsize <= _MAX_PLANES else 1
    data: Bytes = np.frombuffer(raw, np.uint8)
    count = len(data) // planes
    table: Bytes = data[: count * planes].reshape(count, planes)
    gains = [_gains(table[:, p]) for p in range(planes)]
    if not any(gains):
        return None
    sizes: list[int] = []
    pieces: list[bytes | Bytes] = []
    for p, gain in enumerate(gains):
        plane: bytes | Bytes | None = _compress(table[:, p]) if gain else None
        if plane is not None:
            sizes.append(len(plane) | _COMPRESSED)
        else:
            sizes.append(count)
            plane = table[:, p]
        pieces.append(plane)
    header = struct.pack(f"<BB{planes}I", _LAYOUT, planes, *sizes)
    total = len(header) + sum(map(len, pieces)) + len(data) - count * planes
    if total > len(data) * (1 - _MIN_GAIN):
        return None
    return b"".join(
        [header, *(p if isinstance(p, bytes) else p.tobytes() for p in pieces), data[count * planes :].tobytes()]
    )


def decode(name: str, stored: memoryview, out: memoryview) -> None:
    """Write the raw bytes of a chunk to `out`, which has exactly their length.

    Thread-safe; the heavy parts release the GIL. Whatever `stored` says, it allocates at most one plane and one window
    of 8 MiB. `out` may be written in part before an error.

    Raises:
        FormatError: no such codec, or a newer layout of it.
        IntegrityError: `stored` is truncated, altered, has bytes left over or does not give `len(out)` bytes.
    """
    _check_name(name)
    if name == "raw":
        if len(stored) != len(out):
            raise _damaged(f"{len(stored)} bytes are stored raw, expected {len(out)}")
        out[:] = stored
        return
    sizes, at = _header(stored)
    planes = len(sizes)
    count, tail = divmod(len(out), planes)
    data: Bytes = np.frombuffer(out, np.uint8)
    table: Bytes = data[: count * planes].reshape(count, planes)
    wanted = at + sum(size & ~_COMPRESSED for size in sizes) + tail
    if wanted != len(stored):
        raise _damaged(f"{len(stored)} bytes are stored, its header announces {wanted}")
    for p, size in enumerate(sizes):
        nbytes = size & ~_COMPRESSED
        plane = stored[at : at + nbytes]
        at += nbytes
        if size & _COMPRESSED:
            table[:, p] = np.frombuffer(_decompress(plane, count), np.uint8)
        elif nbytes == count:
            table[:, p] = np.frombuffer(plane, np.uint8)
        else:
            raise _damaged(f"plane {p} has {nbytes} bytes, expected {count}")
    data[count * planes :] = np.frombuffer(stored[at:], np.uint8)


def _check_name(name: str) -> None:
    if name not in CODECS:
        raise FormatError(f"codec {name!r} is unknown to this version of objckpt: upgrade it", codec=name)


def _gains(plane: Bytes) -> bool:
    """Whether samples from all over the plane shrink."""
    if len(plane) <= _PROBES * _PROBE_BYTES:
        return True
    step = (len(plane) - _PROBE_BYTES) // (_PROBES - 1)
    sample = np.concatenate([plane[i * step : i * step + _PROBE_BYTES] for i in range(_PROBES)])
    return len(_contexts.compressor.compress(sample.data)) < len(sample) * (1 - _MIN_GAIN)


def _compress(plane: Bytes) -> bytes | None:
    if not plane.flags.c_contiguous:
        gathered = _contexts.scratch(len(plane))
        np.copyto(gathered, plane)
        plane = gathered
    packed: bytes = _contexts.compressor.compress(plane.data)
    return packed if len(packed) < len(plane) * (1 - _MIN_GAIN) else None


def _header(stored: memoryview) -> tuple[tuple[int, ...], int]:
    """The size of each plane, with its flag, and where the planes begin."""
    if len(stored) < 2:
        raise _damaged(f"{len(stored)} bytes are stored, expected 2 or more")
    layout, planes = stored[0], stored[1]
    if layout != _LAYOUT:
        raise FormatError(f"layout {layout} of codec zstd is unknown to this version of objckpt: upgrade it")
    end = 2 + 4 * planes
    if not 1 <= planes <= _MAX_PLANES or len(stored) < end:
        raise _damaged(f"{len(stored)} bytes are stored with {planes} planes")
    return struct.unpack_from(f"<{planes}I", stored, 2), end


def _decompress(frame: memoryview, nbytes: int) -> bytes:
    """The content of exactly one frame, which must be `nbytes`; nothing larger is ever allocated."""
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        if claimed not in (nbytes, zstandard.CONTENTSIZE_UNKNOWN):
            raise _damaged(f"a zstd frame announces {claimed} bytes, expected {nbytes}")
        content: bytes = _contexts.decompressor.decompress(frame, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise _damaged(f"a zstd frame of {len(frame)} bytes, expected to give {nbytes}: {err}") from err
    if len(content) != nbytes:
        raise _damaged(f"a zstd frame gave {len(content)} bytes, expected {nbytes}")
    return content


def _damaged(why: str) -> IntegrityError:
    return IntegrityError(f"a zstd or raw chunk is damaged: {why}")
