"""Preemption: SIGTERM becomes a flag that the training loop reads between two steps, in place of a sudden end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from objckpt.errors import UsageError


class Preemption:
    """Listens for SIGTERM from its making until `stop`. A handler that was installed before is called too."""

    def __init__(self, act: Callable[[], object]) -> None:
        """UsageError outside the main thread, where Python takes no signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("on_preempt needs the main thread: signal handlers can be installed only there")
        self.happened = False
        self._stopped = False
        self._act = act
        self._before: Any = signal.signal(signal.SIGTERM, self._handle)

    def stop(self) -> None:
        """Put the former handler back, unless somebody has replaced ours meanwhile. Any thread; idempotent.

        Where it cannot be put back (another thread; a later handler still calls ours) ours passes signals on from now on.
        """
        self._stopped = True
        ours = signal.getsignal(signal.SIGTERM) == self._handle
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._stopped:
            first, self.happened = not self.happened, True
            if first:
                self._act()
        if callable(self._before):
            self._before(number, frame)
        elif self._stopped and self._before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
