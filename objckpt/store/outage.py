"""Says that requests are in trouble while they are tried again, and when that is over: once a minute, not for each request."""

from __future__ import annotations

import logging
import threading
import time

from objckpt.store.retry import Fault, Tries
from objckpt.store.translate import Where

logger = logging.getLogger("objckpt")
PATIENCE_S = 5.0  # shorter trouble is nobody's business
AGAIN_S = 60.0


class Outage:
    """What one client of a store tells of it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told_s = -AGAIN_S

    def failed(self, fault: Fault, where: Where, tries: Tries) -> None:
        """A request has failed, and is tried again."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - tries.began < PATIENCE_S or now_s - self._told_s < AGAIN_S:
                return
            self._told_s = now_s
        tries.troubled = tries.began if tries.troubled is None else tries.troubled
        logger.warning(
            "%s has not succeeded for %.0f s (%s: %s); it is tried again for up to %.0f s more",
            where, now_s - tries.began, fault.code, fault.message[:200], tries.left_s(),
        )  # fmt: skip

    def succeeded(self, where: Where, tries: Tries) -> None:
        """A request has succeeded: the end of what was told of it, if something was."""
        if tries.troubled is not None:
            logger.warning("%s succeeds again, after %.0f s", where, time.monotonic() - tries.troubled)
