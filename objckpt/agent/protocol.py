"""Messages between trainer and agent: a length, then one msgpack map; the arena's memfd rides along as SCM_RIGHTS.

trainer → agent   hello, arena (+fd), save, give-up, bye
agent → trainer   ready, progress, committed, failed, warning
"""

from __future__ import annotations

import array
import hashlib
import os
import socket
import struct
import threading
from typing import Any

from objckpt.format import wire

_HEAD = struct.Struct("<I")
Message = dict[str, Any]


class Channel:
    """One end of the socket pair. `send` may be called by any thread, `receive` by one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []  # received, in order
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: Message, fd: int | None = None) -> None:
        """Blocks while the peer's socket buffer is full. ConnectionError when the peer is gone."""
        body = wire.pack(message)
        head = _HEAD.pack(len(body))
        with self._sending:
            if fd is None:
                self.sock.sendall(head)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                self.sock.sendmsg([head], rights)
            self.sock.sendall(body)

    def receive(self) -> Message | None:
        """The next message; None when the peer has closed or died. Blocks."""
        head = self._take(_HEAD.size)
        body = head and self._take(_HEAD.unpack(head)[0])
        if not body:
            return None
        message: Message = wire.unpack(body, "message")
        return message

    def _take(self, count: int) -> bytes | None:
        while len(self._buffer) < count:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1 << 20, 4)
            except OSError:
                return None
            self.fds.extend(fds)
            if not data:
                return None
            self._buffer += data
        out = bytes(self._buffer[:count])
        del self._buffer[:count]
        return out


def agent_address(url: str, rank: int) -> bytes:
    """The abstract Unix socket on which the agent of this URL, user and rank can be met by its trainer's successor."""
    name = hashlib.sha256(f"{url}\0{rank}".encode()).hexdigest()[:24]
    return f"\0objckpt/{os.getuid()}/{name}".encode()
