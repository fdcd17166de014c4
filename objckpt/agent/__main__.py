"""`python -m objckpt.agent FD [DOOR]`: started by the trainer with one end of a socket pair and the socket on which successors
of the trainer meet it. Never imports torch."""

from __future__ import annotations

import signal
import socket
import sys

from objckpt.agent.server import serve


def main() -> None:
    # A Ctrl-C or a preemption's SIGTERM to the whole job must not cost the checkpoint that is under way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock, *door = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    serve(sock, *door, own_process=True)


main()
