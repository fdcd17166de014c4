"""Checkpoints of PyTorch training on object storage. `import objckpt` imports neither torch nor a network client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from objckpt.config import SaveOptions, StoreOptions
from objckpt.errors import ObjckptError

if TYPE_CHECKING:
    from objckpt.checkpointer import Checkpointer
    from objckpt.handle import SaveHandle, SaveStats

__version__ = "0.1.0"
__all__ = ["Checkpointer", "ObjckptError", "SaveHandle", "SaveOptions", "SaveStats", "StoreOptions", "__version__"]

_LAZY = {
    "Checkpointer": "objckpt.checkpointer",
    "SaveHandle": "objckpt.handle",
    "SaveStats": "objckpt.handle",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'objckpt' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
