"""The journey of a restore, one file per stage: open (indexes), plan (ranges), fetch (GETs, checks), place (torch). What ranks
read once for all goes through share: units (who reads what, when), and move (pieces to and from buffers).

Importing this package imports no torch; `load`, `restore_into` and slicing a lazy tensor do.
"""

from __future__ import annotations

from typing import Any

from objckpt.restore.lazy import LazyState, LazyTensor, lazy
from objckpt.restore.open import Checkpoint, open_checkpoint
from objckpt.restore.verify import Problem, verify

__all__ = [
    "Checkpoint",
    "LazyState",
    "LazyTensor",
    "Problem",
    "lazy",
    "load",
    "open_checkpoint",
    "restore_into",
    "verify",
]


def load(*args: Any, **kwargs: Any) -> Any:
    """See `objckpt.restore.into.load`."""
    from objckpt.restore.into import load as load_

    return load_(*args, **kwargs)


def restore_into(*args: Any, **kwargs: Any) -> Any:
    """See `objckpt.restore.into.restore_into`."""
    from objckpt.restore.into import restore_into as restore_into_

    return restore_into_(*args, **kwargs)
