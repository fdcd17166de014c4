"""The trainer's side of the agent: start it, talk to it, notice its death at once; meet a predecessor's."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from objckpt.agent.protocol import Channel, Message, agent_address
from objckpt.errors import AgentError

logger = logging.getLogger("objckpt")
_START_S = 20.0  # a live agent answers within, even one that still imports on a busy host


class AgentClient:
    """One running agent. Callbacks come from a thread of this object: `on_message` for each, then `on_end` once."""

    def __init__(
        self,
        mode: Literal["process", "thread"],
        hello: Message,
        *,
        on_message: Callable[[Message], None],
        on_end: Callable[[AgentClient, str], None],
    ) -> None:
        """Starts the agent and returns; importing takes it half a second more. AgentError when it cannot be started."""
        self._on_message, self._on_end = on_message, on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._server: threading.Thread | None = None
        self._stderr = -1
        self._died_of: Exception | None = None  # in thread mode
        self.hung_up = False
        self.ended = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(ours)
        if mode == "process":
            self._start_process(theirs, open_door(hello["url"], hello["rank"]))
        else:
            self._start_thread(theirs)
        self._channel.send(hello)
        self._receiver = threading.Thread(target=self._receive, name="objckpt-agent-client", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int | None:
        """The agent's process id; None in thread mode."""
        return self._process.pid if self._process is not None else None

    def send(self, message: Message, fd: int | None = None) -> None:
        """AgentError when the agent is gone."""
        try:
            self._channel.send(message, fd)
        except OSError as err:
            raise AgentError(f"the uploader is gone: {err}{self._last_words()}") from err

    def join(self, timeout: float | None) -> None:
        """Wait until the agent has ended, after `bye`."""
        self._receiver.join(timeout)

    def hang_up(self) -> None:
        """Send nothing any more: the agent settles the saves it has got whole, reports them, and ends."""
        self.hung_up = True
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors, so that the parent's end is the only one."""
        with contextlib.suppress(OSError):
            os.close(self._channel.sock.detach())

    def _start_process(self, theirs: socket.socket, door: socket.socket | None) -> None:
        # Its stderr goes to memory: inherited, it would keep a pipe such as `train.py | tee log` open while it lingers.
        self._stderr = os.memfd_create("objckpt-agent-stderr", os.MFD_CLOEXEC)
        package_dir = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package_dir, *filter(None, [os.environ.get("PYTHONPATH")])])
        sockets = [theirs] if door is None else [theirs, door]
        fds = [sock.fileno() for sock in sockets]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "objckpt.agent", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as err:
            raise AgentError(
                f'the uploader process cannot be started: {err}; uploader="thread" needs no process'
            ) from err
        finally:
            for sock in sockets:
                sock.close()

    def _start_thread(self, theirs: socket.socket) -> None:
        from objckpt.agent.server import serve

        def run() -> None:
            try:
                serve(theirs, own_process=False)
            except (
                Exception
            ) as err:  # of its start, such as an unusable CA bundle: a save's failures are told as messages
                logger.debug("the uploader ended", exc_info=True)
                self._died_of = err

        self._server = threading.Thread(target=run, name="objckpt-uploader", daemon=True)
        self._server.start()

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._on_message(message)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        if self._server is not None:
            self._server.join(5)
        self.ended = True
        self._on_end(self, f"the uploader ended unexpectedly{self._last_words()}")
        self._channel.sock.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    def _last_words(self) -> str:
        code = self._process.poll() if self._process is not None else None
        words = "" if code is None else f" (exit status {code})"
        if self._server is not None and self._server is not threading.current_thread():
            self._server.join(1)  # it is ending: let it say why
            words += f": {self._died_of}" if self._died_of is not None else ""
        if self._stderr >= 0:
            with contextlib.suppress(OSError):
                text = os.pread(self._stderr, 1 << 16, 0).decode(errors="replace").strip()
                words += f": {text.splitlines()[-1]}" if text else ""
        return words


def open_door(url: str, rank: int) -> socket.socket | None:
    """The socket on which an agent meets its trainer's successors. Opened before the agent starts, whose imports take half a
    second: whoever comes meanwhile waits. None: another live agent on this host has the same URL and rank."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        door.bind(agent_address(url, rank))
        door.listen(16)
        stack.pop_all()
        return door
    return None


def wait_for_predecessor(url: str, rank: int, bound_s: float) -> bool:
    """Block while an agent of the same URL, user and rank, whose trainer is dead, is still settling its saves.

    At most `bound_s` seconds, after at most 20 for its answer. Without this a restarted trainer would resume from an older
    checkpoint and fence the newer. Returns whether there was one.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(agent_address(url, rank))
            sock.settimeout(_START_S)
            if sock.recv(1) != b"L":
                return False
        except OSError:
            return False
        logger.warning(
            "the uploader of a former run still settles its saves to %s; waiting at most %.0f s", url, bound_s
        )
        began_s = time.monotonic()
        ended = bool(select.select([sock], [], [], bound_s)[0])
        waited_s = time.monotonic() - began_s
        if ended:
            logger.info("the uploader of the former run has ended after %.1f s", waited_s)
        else:
            logger.warning("the uploader of a former run has not ended within %.0f s; going on without it", waited_s)
        return True
