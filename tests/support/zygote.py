"""Trainers, `support/trainer.py`, forked from a process that has imported everything: importing torch takes longer than all else.

with Zygote() as zygote:
    process = zygote.fork(url, options)    # a part of what `subprocess.Popen(…, start_new_session=True)` gives

Each is the main thread of a process of its own with the caller's environment, and ends as `python trainer.py` does: by a
signal, or by the whole finalisation of the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 17


class Forked:
    """What is used of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, url: str, options: dict[str, Any]) -> None:
        self._zygote = zygote
        self.returncode: int | None = None
        (stdin, ours_in), (ours_out, stdout), (ours_err, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(ours_in, "wb"),
            os.fdopen(ours_out, "rb"),
            os.fdopen(ours_err, "rb"),
        )
        theirs = [stdin, stdout, stderr]
        try:
            self.pid = zygote.ask({"url": url, "options": options, "environment": dict(os.environ)}, theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        self._ended = os.pidfd_open(self.pid)  # the zygote has not reaped it: the pid is its own until `wait`

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"trainer {self.pid}", timeout)
            self.returncode = self._zygote.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)


class Zygote:
    """The caller's side. Not for several threads."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(30)

    def fork(self, url: str, options: dict[str, Any]) -> Forked:
        return Forked(self, url, options)

    def ask(self, request: dict[str, Any], fds: list[int] | None = None) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds or [])
        answer = self._socket.recv(_MOST_BYTES)
        assert answer, f"the zygote has ended with status {self._process.wait(10)}"
        return int(answer)


def main(control: socket.socket) -> None:
    import torch
    import trainer

    import objckpt.agent.server
    import objckpt.store.s3
    import objckpt.store.uploads  # noqa: F401  all that a thread as uploader needs

    torch.set_num_threads(1)  # a pool of OpenMP does not survive a fork
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, 3)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                control.close()
                os.setsid()
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
            for fd in fds:
                os.close(fd)
            if answer == 0:
                os.environ.clear()
                os.environ.update(request["environment"])
                return trainer.main(request["url"], request["options"])
        with contextlib.suppress(BrokenPipeError):
            control.send(str(answer).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
