"""Progress of long work: the worker calls `progress(stage, done_bytes, total_bytes)`; the command line draws it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def ignore(stage: str, done_bytes: int, total_bytes: int) -> None:
    """The default listener."""
