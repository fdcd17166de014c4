"""The ends of a process with saves in flight: exit of the interpreter, and a fork. Nothing is lost without a word."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Protocol

from objckpt.errors import ObjckptError


class Open(Protocol):
    """What has an uploader, until it is closed."""

    pid: int

    def close(self) -> None:
        """Settle what is in flight; ObjckptError when something is lost."""

    def settle_threads(self) -> None:
        """Settle what threads of this process carry."""

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the parent."""


_open: set[Open] = set()


def keep(it: Open) -> None:
    """It lives until `forget`, or until the process ends, which closes it."""
    _open.add(it)


def forget(it: Open) -> None:
    """It is closed."""
    _open.discard(it)


def _at_exit() -> None:
    """The interpreter ends: settle all saves. A lost checkpoint ends the process with status 1."""
    lost = False
    for it in list(_open):
        if it.pid != os.getpid():
            continue
        try:
            it.close()
        except ObjckptError as err:
            lost = True
            print(f"objckpt: {err}", file=sys.stderr)
    if lost:  # an exception raised here would leave the exit status 0
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _before_pools_end() -> None:
    """The interpreter ends: executors refuse work from here on, and uploads in thread mode need them. Settle those now."""
    for it in list(_open):
        if it.pid == os.getpid():
            it.settle_threads()


def _after_fork() -> None:
    for it in list(_open):
        it.abandon()


atexit.register(_at_exit)
threading._register_atexit(_before_pools_end)  # type: ignore[attr-defined]  # runs before that of concurrent.futures
os.register_at_fork(after_in_child=_after_fork)
