"""How many requests run at once: fewer while the store says SlowDown, and slowly more again afterwards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pace:
    """An additive-increase, multiplicative-decrease limit on parallel requests, for one event loop.

    Args:
        most: the limit while nothing is throttled.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._successes = 0
        self._to_ignore = 0  # answers to requests sent before the last decrease say nothing about the new limit
        self.limit = most

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place, in the order of asking, and hold it."""
        while self._running >= self.limit:
            place = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place in self._waiting:
                    self._waiting.remove(place)
                else:
                    self._wake()  # the place was given to this waiter, who no longer wants it
                raise
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._wake()

    def throttled(self) -> None:
        """A request was answered SlowDown or the like: halve the limit, once for all requests in flight."""
        self._successes = 0
        if self._to_ignore > 0:
            self._to_ignore -= 1
            return
        self.limit = max(1, self.limit // 2)
        self._to_ignore = max(0, self._running - 1)

    def succeeded(self) -> None:
        """A request succeeded; as many in a row as the limit raise it by one."""
        self._to_ignore = max(0, self._to_ignore - 1)
        self._successes += 1
        if self._successes >= self.limit and self.limit < self._most:
            self.limit += 1
            self._successes = 0
            self._wake()

    def _wake(self) -> None:
        free = self.limit - self._running
        while free > 0 and self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                free -= 1
