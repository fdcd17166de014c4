"""Forks trainers from a process that has imported everything, so that many can be started and killed: `python zygote.py`.

Reads lines `URL OPTIONS` from stdin; each becomes a process of its own that does what `trainer.py URL OPTIONS` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import trainer

import objckpt.agent.server
import objckpt.store.s3
import objckpt.store.uploads  # noqa: F401  all that a thread as uploader needs


def main() -> None:
    torch.set_num_threads(1)  # a pool of OpenMP does not survive a fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets the killed ones by itself
    trainer.tell("ready")
    while line := sys.stdin.readline():
        url, _, options = line.partition(" ")
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            trainer.main(url, json.loads(options))
            os._exit(0)


if __name__ == "__main__":
    main()
