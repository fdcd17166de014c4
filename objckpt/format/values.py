"""The tree of containers and values as msgpack with extension types; nothing is ever unpickled here.

Only exact types are accepted, so that nothing changes its type in silence (msgpack by itself turns IntEnum into int and
OrderedDict into dict). torch's own value types are stood in for by the neutral classes below: reading needs no torch.
"""

from __future__ import annotations

import datetime as dt
import math
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from objckpt import limits
from objckpt.errors import FormatError, UnsupportedTypeError
from objckpt.format import wire
from objckpt.format.dtypes import ITEMSIZE
from objckpt.format.fqn import to_fqn


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """A strided window into the raw bytes of a stored tensor; `stride` in elements of `dtype`."""

    dtype: str
    byte_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor's place in the tree. `fqn` names the stored tensor: tied leaves name the same one."""

    fqn: str
    numpy: bool = False
    view: ViewSpec | None = None


@dataclass(frozen=True, slots=True)
class TorchDtype:
    name: str


@dataclass(frozen=True, slots=True)
class TorchDevice:
    name: str


@dataclass(frozen=True, slots=True)
class TorchSize:
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pickled:
    """Pickle bytes, opaque here."""

    data: bytes


TUPLE, SET, FROZENSET, ORDERED, MAP, COMPLEX, BIGINT, NPSCALAR, NPARRAY, PATH = range(1, 11)
DATETIME, DATE, TIMEDELTA, LEAF, TDTYPE, TDEVICE, TSIZE, PICKLED, COUNTER = range(11, 20)

MAX_BIGINT_BYTES = 1 << 16
MAX_NPARRAY_BYTES = limits.MiB
_NP_KINDS = "biufcSUmM"


def pack(value: Any) -> bytes:
    """The bytes of a neutral tree. UnsupportedTypeError names the path of what cannot be stored."""
    return wire.pack(_encode(value, ()))


def unpack(data: bytes, what: str) -> Any:
    """The neutral tree of `data`; FormatError when it is not one."""
    return _Decoder(what).decode(data, 0)


def _refuse(value: Any, path: tuple[Any, ...], why: str = "is not stored") -> UnsupportedTypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedTypeError(
        f"{to_fqn(path) or '<top>'}: a value of type {kind} {why}; convert it to plain values, drop it from the state, "
        "or pass pickle=True",
        fqn=to_fqn(path),
    )


def _ext(code: int, value: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, wire.pack(value))


def _encode(value: Any, path: tuple[Any, ...]) -> Any:
    if len(path) > limits.MAX_VALUE_DEPTH:
        raise UnsupportedTypeError(f"{to_fqn(path[:8])}/…: nested deeper than {limits.MAX_VALUE_DEPTH}")
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise _refuse(value, path, "with lone surrogates is not stored")
        return value
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        return msgpack.ExtType(BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path)
    if isinstance(value, np.generic) and value.dtype.kind in _NP_KINDS and not value.dtype.names:
        return _ext(NPSCALAR, [value.dtype.str, value.tobytes()])
    if isinstance(value, pathlib.PurePath):
        short = isinstance(value, pathlib.Path) and len(str(value)) <= limits.MAX_FQN_BYTES
        return _ext(PATH, str(value)) if short else _fail(value, path)
    return _fail(value, path)


def _fail(value: Any, path: tuple[Any, ...]) -> Any:
    raise _refuse(value, path)


def _items(value: dict[Any, Any], path: tuple[Any, ...]) -> list[Any]:
    return [[_encode_key(k, path), _encode(v, (*path, k))] for k, v in value.items()]


def _encode_key(key: Any, path: tuple[Any, ...]) -> Any:
    if type(key) in (str, int, float, bool, bytes, tuple) or key is None:
        return _encode(key, (*path, key))
    raise _refuse(key, path, "as a key is not stored")


def _dict(value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
    if all(type(k) is str for k in value):
        return {_encode_key(k, path): _encode(v, (*path, k)) for k, v in value.items()}
    return _ext(MAP, _items(value, path))


def _ordered(value: OrderedDict[Any, Any], path: tuple[Any, ...]) -> Any:
    meta = getattr(value, "_metadata", None)  # torch keeps the versions of modules there
    return _ext(ORDERED, [_items(value, path), _encode(meta, (*path, "_metadata"))])


def _sequence(value: Any, path: tuple[Any, ...]) -> list[Any]:
    return [_encode(v, (*path, i)) for i, v in enumerate(value)]


def _set(code: int) -> Callable[[Any, tuple[Any, ...]], Any]:
    def encode(value: Any, path: tuple[Any, ...]) -> Any:
        members = [_encode_key(v, path) for v in value]
        return _ext(code, sorted(members, key=wire.pack))  # sorted: equal sets have equal bytes

    return encode


def _array(value: np.ndarray[Any, Any], path: tuple[Any, ...]) -> Any:
    if value.dtype.kind not in _NP_KINDS or value.dtype.names:
        raise _refuse(value, path, f"and dtype {value.dtype} is not stored")
    if value.nbytes > MAX_NPARRAY_BYTES:
        raise _refuse(value, path, f"and dtype {value.dtype} is not stored above {MAX_NPARRAY_BYTES} bytes")
    return _ext(NPARRAY, [value.dtype.str, list(value.shape), value.tobytes()])


def _leaf(value: TensorLeaf, path: tuple[Any, ...]) -> Any:
    view = value.view
    return _ext(
        LEAF,
        [value.fqn, value.numpy]
        + ([] if view is None else [view.dtype, view.byte_offset, list(view.shape), list(view.stride)]),
    )


def _datetime(value: dt.datetime, path: tuple[Any, ...]) -> Any:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise _refuse(value, path, "with a named time zone is not stored")
    return _ext(DATETIME, [value.isoformat(), value.fold])


_ENCODERS: dict[type, Callable[[Any, tuple[Any, ...]], Any]] = {
    dict: _dict,
    OrderedDict: _ordered,
    Counter: lambda v, p: _ext(COUNTER, _items(v, p)),  # MultiStepLR keeps its milestones in one
    list: _sequence,
    tuple: lambda v, p: _ext(TUPLE, _sequence(v, p)),
    set: _set(SET),
    frozenset: _set(FROZENSET),
    complex: lambda v, p: _ext(COMPLEX, [v.real, v.imag]),
    np.ndarray: _array,
    dt.datetime: _datetime,
    dt.date: lambda v, p: _ext(DATE, v.isoformat()),
    dt.timedelta: lambda v, p: _ext(TIMEDELTA, [v.days, v.seconds, v.microseconds]),
    TensorLeaf: _leaf,
    TorchDtype: lambda v, p: _ext(TDTYPE, v.name),
    TorchDevice: lambda v, p: _ext(TDEVICE, v.name),
    TorchSize: lambda v, p: _ext(TSIZE, list(v.dims)),
    Pickled: lambda v, p: msgpack.ExtType(PICKLED, v.data),
}


class _Decoder:
    """Decodes with a bound on nesting: each extension value is a msgpack document of its own."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.depth = 0

    def decode(self, data: bytes, depth: int) -> Any:
        if depth > limits.MAX_VALUE_DEPTH + 4:
            raise FormatError(f"{self.what}: nested too deeply", what=self.what)
        outer, self.depth = self.depth, depth
        try:
            return wire.unpack(data, self.what, self._ext)
        finally:
            self.depth = outer

    def _ext(self, code: int, data: bytes) -> Any:
        try:
            return self._value(code, data)
        except FormatError:
            raise
        except Exception as err:  # numpy and datetime have many ways to refuse, IndexError and SystemError among them
            raise FormatError(f"{self.what}: malformed value of extension type {code}: {err}", what=self.what) from err

    def _value(self, code: int, data: bytes) -> Any:
        if code == PICKLED:
            return Pickled(data)
        if code == BIGINT:
            self._require(0 < len(data) <= MAX_BIGINT_BYTES, "big int")
            return int.from_bytes(data, "big", signed=True)
        body = self.decode(data, self.depth + 1)
        if code in (TUPLE, SET, FROZENSET):
            self._require(type(body) is list, "sequence")
            if code != TUPLE:
                wire.check_keys(body, self.what)
            return {TUPLE: tuple, SET: set, FROZENSET: frozenset}[code](body)
        if code in (MAP, ORDERED, COUNTER):
            pairs, meta = body if code == ORDERED else (body, None)
            self._require(type(pairs) is list and all(type(p) is list and len(p) == 2 for p in pairs), "map")
            kinds: dict[int, Callable[[], dict[Any, Any]]] = {MAP: dict, ORDERED: OrderedDict, COUNTER: Counter}
            wire.check_keys([key for key, _ in pairs], self.what)
            out = kinds[code]()
            for key, item in pairs:
                out[key] = item
            self._require(len(out) == len(pairs), "map with a key twice")
            if meta is not None:
                out._metadata = meta  # type: ignore[attr-defined]
            return out
        return self._scalar(code, body)

    def _scalar(self, code: int, body: Any) -> Any:
        if code == COMPLEX:
            return complex(*body)
        if code in (NPSCALAR, NPARRAY):
            return self._numpy(code, body)
        if code == PATH:
            return pathlib.Path(self._text(body))
        if code == DATETIME:
            return dt.datetime.fromisoformat(self._text(body[0])).replace(fold=body[1])
        if code == DATE:
            return dt.date.fromisoformat(self._text(body))
        if code == TIMEDELTA:
            return dt.timedelta(*body)
        if code == LEAF:
            return self._tensor_leaf(body)
        if code == TDTYPE:
            self._require(body in ITEMSIZE or self._text(body).startswith("q"), "dtype")
            return TorchDtype(body)
        if code == TDEVICE:
            return TorchDevice(self._text(body))
        if code == TSIZE:
            return TorchSize(dims(body, self.what))
        raise FormatError(f"{self.what}: unknown extension type {code}", what=self.what)

    def _numpy(self, code: int, body: list[Any]) -> Any:
        dtype = np.dtype(self._text(body[0]))
        self._require(dtype.kind in _NP_KINDS and not dtype.names and dtype.itemsize > 0, "numpy dtype")
        shape = dims(body[1], self.what) if code == NPARRAY else ()
        raw = body[-1]
        self._require(type(raw) is bytes and len(raw) == dtype.itemsize * math.prod(shape), "numpy bytes")
        if dtype.kind == "U":  # else whoever looks at it meets a SystemError
            points = np.frombuffer(raw, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
            self._require(not len(points) or points.max() <= 0x10FFFF, "numpy text")
        array = np.frombuffer(raw, dtype).reshape(shape).copy()
        return array if code == NPARRAY else array[()]

    def _tensor_leaf(self, body: Any) -> TensorLeaf:
        self._require(type(body) is list and len(body) in (2, 6) and type(body[1]) is bool, "tensor leaf")
        fqn = self._text(body[0])
        if len(body) == 2:
            return TensorLeaf(fqn, body[1])
        dtype, byte_offset, shape, stride = body[2:]
        self._require(dtype in ITEMSIZE and type(byte_offset) is int and byte_offset >= 0, "view")
        view = ViewSpec(dtype, byte_offset, dims(shape, self.what), dims(stride, self.what))
        self._require(len(view.shape) == len(view.stride), "view")
        return TensorLeaf(fqn, body[1], view)

    def _text(self, value: Any) -> str:
        self._require(type(value) is str and len(value) <= limits.MAX_FQN_BYTES, "text")
        return str(value)

    def _require(self, holds: bool, name: str) -> None:
        if not holds:
            raise FormatError(f"{self.what}: malformed {name}", what=self.what)


def dims(value: Any, what: str) -> tuple[int, ...]:
    """A checked shape, offset or stride: at most MAX_DIMS non-negative 63-bit integers."""
    if type(value) is not list or len(value) > limits.MAX_DIMS:
        raise FormatError(f"{what}: malformed shape", what=what)
    if any(type(n) is not int or not 0 <= n < 2**63 for n in value):
        raise FormatError(f"{what}: a shape has a negative or absurd size", what=what)
    return tuple(value)
