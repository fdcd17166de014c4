"""Says that a store is in trouble while requests are tried again, and when that is over: once, not for each request."""

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
    """Of one store as one client sees it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s: float | None = None  # nothing has succeeded since this failure
        self._told_s = -AGAIN_S  # when it was told last
        self._began_s: float | None = None  # of the trouble that was told, and is not over

    def failed(self, fault: Fault, where: Where, tries: Tries) -> None:
        """A request has failed, and is tried again."""
        now_s = time.monotonic()
        with self._lock:
            self._since_s = now_s if self._since_s is None else self._since_s
            began_s = min(self._since_s, tries.began)  # a single request may be in trouble, too
            if now_s - began_s < PATIENCE_S or now_s - self._told_s < AGAIN_S:
                return
            self._told_s, self._began_s = now_s, began_s
        logger.warning(
            "%s has not succeeded for %.0f s (%s: %s); it is tried again for up to %.0f s more",
            where, now_s - began_s, fault.code, fault.message[:200], tries.left_s(),
        )  # fmt: skip

    def succeeded(self, where: Where) -> None:
        """A request has succeeded."""
        if self._since_s is None and self._began_s is None:
            return
        with self._lock:
            began_s, self._since_s, self._began_s = self._began_s, None, None
        if began_s is not None:
            logger.warning("%s succeeds again, after %.0f s", where, time.monotonic() - began_s)
