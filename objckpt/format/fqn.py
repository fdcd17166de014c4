"""FQN: the path to a leaf as text, escaped so that it is unique.

Parts are joined by "/". In a str key "%", "/" and control characters are percent-escaped; the empty key is "%()"; a key
of another type `k` is written "%(repr(k))", escaped likewise, so that `0` and `"0"` differ.
"""

from __future__ import annotations

import re
from typing import Any

_ESCAPE = re.compile(r"[%/\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _escape(text: str) -> str:
    return _ESCAPE.sub(lambda m: f"%{ord(m[0]):02X}" if ord(m[0]) < 256 else f"%u{ord(m[0]):04X}", text)


def to_fqn(path: tuple[Any, ...]) -> str:
    """The unique text of a path: `("optim", "state", 0, "exp_avg")` is "optim/state/%(0)/exp_avg"."""
    return "/".join((_escape(k) or "%()") if type(k) is str else f"%({_escape(repr(k))})" for k in path)
