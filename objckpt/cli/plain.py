"""Values of a checkpoint as plain data for JSON, and as one line of text."""

from __future__ import annotations

import json
import math
from typing import Any

from objckpt.format.fqn import to_fqn
from objckpt.format.values import Pickled, TensorLeaf, TorchDevice, TorchDtype, TorchSize

_SHORT_CHARS = 200


def plain(value: Any) -> Any:
    """JSON's types as they are, mappings and sequences of them; all else as text that says what it is."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**63 else hex(value)  # readers of JSON lose digits, Python refuses to print them
    if kind is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {_key(k): plain(v) for k, v in value.items()}
    if kind in (list, tuple):
        return [plain(v) for v in value]
    return _text(value)


def short(value: Any) -> str:
    """One line of at most 200 characters."""
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= _SHORT_CHARS else text[: _SHORT_CHARS - 1] + "…"


def _key(key: Any) -> str:
    return key if type(key) is str else to_fqn((key,))


def _text(value: Any) -> str:
    if isinstance(value, (bytes, Pickled)):
        data = value.data if isinstance(value, Pickled) else value
        return f"<{len(data)} bytes{', pickled' if isinstance(value, Pickled) else ''}>"
    if isinstance(value, TensorLeaf):
        return f"<tensor {value.fqn}>"
    if isinstance(value, TorchDtype):
        return f"torch.{value.name}"
    if isinstance(value, TorchDevice):
        return f"torch.device({value.name!r})"
    if isinstance(value, TorchSize):
        return f"torch.Size({list(value.dims)})"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(str(plain(v)) for v in value)) + "}"
    try:
        return str(value)
    except Exception:  # numpy's, such as of a datetime64 without a unit
        return f"<{type(value).__name__}>"
