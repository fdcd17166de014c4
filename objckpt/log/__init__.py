"""The commit log: read and fold it, append to it, fence writers that were replaced."""

from __future__ import annotations

from objckpt.log.append import append, fence
from objckpt.log.bundles import write_bundles
from objckpt.log.fold import Log
from objckpt.log.read import read_log

__all__ = ["Log", "append", "fence", "read_log", "write_bundles"]
