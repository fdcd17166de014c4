"""What `save()` returns: the outcome of one save, as a future."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from objckpt.errors import ObjckptError, WaitTimeout


@dataclass
class SaveStats:
    """Figures of one save; those of the upload are filled when it has committed."""

    blocked_s: float = 0.0  # how long save() kept the caller, all in all
    wait_s: float = 0.0  # of it: waiting for an earlier save to give memory back
    stage_s: float = 0.0  # of it: copying
    staged_bytes: int = 0
    sent_bytes: int = 0  # progress of the upload
    stored_bytes: int = 0  # in the store, after compression
    upload_s: float = 0.0
    commit_s: float = 0.0
    agent_cpu_s: float = 0.0  # of the uploader process (of the whole trainer process in thread mode)


class SaveHandle:
    """One save. It is staged when `save()` returns; `wait_committed()` tells how it ended."""

    def __init__(self, step: int, stats: SaveStats) -> None:
        self.step = step
        self.stats = stats
        self.seq: int | None = None  # place of the commit record in the log, once committed
        self.reported = False  # whether the failure has been raised to the caller
        self._settled = threading.Event()
        self._error: ObjckptError | None = None

    def __repr__(self) -> str:
        state = "in flight" if not self.done() else "failed" if self._error else f"committed as record {self.seq}"
        return f"<SaveHandle step={self.step} {state}>"

    def wait_staged(self) -> None:
        """Returns at once: `save()` returns after staging. Here for symmetry with other libraries."""

    def wait_committed(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is durable and visible. It then survives the death of every writer.

        Raises:
            SaveError (or WriterFencedError): the save has failed; there is no checkpoint of this save.
            WaitTimeout: `timeout` seconds are over; the save goes on.
        """
        if not self._settled.wait(timeout):
            raise WaitTimeout(f"step {self.step} is not committed yet after {timeout} s; it goes on", step=self.step)
        if self._error is not None:
            self.reported = True
            raise self._error

    def done(self) -> bool:
        """Whether the save has committed or failed. Does not block."""
        return self._settled.is_set()

    def exception(self) -> ObjckptError | None:
        """The failure; None while in flight and after a commit. Does not block, and does not count as reported."""
        return self._error

    def _settle(self, *, seq: int | None = None, error: ObjckptError | None = None) -> None:
        self.seq, self._error = seq, error
        self._settled.set()
