"""A small trainer, run as a subprocess: `python trainer.py URL OPTIONS`, OPTIONS being the JSON of a dict over `DEFAULTS`.

Prints one line per event on stdout, `word number ...`. Its state of step N is `state_of(N, mib, seed)`: a checkpoint can be
checked bit by bit without the process that wrote it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

DEFAULTS: dict[str, Any] = {
    "mib": 1,
    "first": None,  # None: the step after that restored
    "saves": 1,
    "seed": 0,
    "wait": "each",  # each: wait for every commit; last: only for the last one; none: for nothing
    "prepare": True,
    "restore": True,
    "stdin": False,  # wait for a line on stdin before the saves
    "end": "close",  # how the process ends; see `main`
    "on_busy": "wait",
    "part_mib": None,
    "uploader": "process",  # the id of a thread's process is told as 0
    "linger_s": 60.0,
    "pause_s": 0.0,  # between saves
}


def state_of(step: int, mib: float, seed: int = 0) -> dict[str, Any]:
    """Pseudo-random and cheap: an arithmetic sequence of int64, a permuted part, and plain values."""
    import torch

    count = int(mib * (1 << 20)) // 8
    base = (step * 1_000_003 + seed * 7_919 + 1) << 20
    return {
        "w": torch.arange(base, base + count, dtype=torch.int64),
        "small": torch.arange(7, dtype=torch.float64) * step,
        "n": step,
        "seed": seed,
    }


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(url: str, given: dict[str, Any]) -> None:
    faulthandler.enable()  # SIGABRT tells where its threads are
    opt = DEFAULTS | given
    from objckpt import Checkpointer, SaveOptions, StoreOptions
    from objckpt.errors import ObjckptError

    store = StoreOptions(retry_deadline_s=60.0, request_timeout_s=20.0)
    part_bytes = opt["part_mib"] and opt["part_mib"] << 20
    options = SaveOptions(part_bytes=part_bytes, **{name: opt[name] for name in ("linger_s", "on_busy", "uploader")})
    ckpt = Checkpointer(url, store=store, options=options)
    tell("made", os.getpid())
    step = opt["first"]
    if opt["restore"]:
        state = state_of(0, opt["mib"], opt["seed"])
        found = ckpt.restore(state)
        tell("restored", -1 if found is None else found, state["n"])
        step = (0 if found is None else found) + 1 if step is None else step
    if opt["prepare"]:
        ckpt.prepare(state_of(0, opt["mib"]))
        tell("agent", ckpt._flights.agent.pid or 0)
    if opt["stdin"]:
        tell("waiting")
        sys.stdin.readline()
    try:
        for number in range(opt["saves"]):
            handle = ckpt.save(step + number, state_of(step + number, opt["mib"], opt["seed"]))
            tell("saved", step + number, ckpt._flights.agent.pid or 0)
            if opt["wait"] == "each" or (opt["wait"] == "last" and number == opt["saves"] - 1):
                handle.wait_committed()
                tell("committed", step + number, handle.seq, ckpt._flights.agent.pid or 0)
            time.sleep(opt["pause_s"])
    except ObjckptError as err:
        tell("error", type(err).__name__, json.dumps(str(err)))
        if opt["end"] == "close":
            sys.exit(3)
        raise
    end(opt["end"], ckpt, step + opt["saves"])


def end(how: str, ckpt: Any, step: int) -> None:
    if how == "close":
        ckpt.close()
        tell("closed")
        sys.stderr.flush()
        os._exit(0)  # nothing is left to settle, and to unload torch takes a second; other ends are real ones
    elif how == "return":
        pass
    elif how == "sys.exit":
        sys.exit(0)
    elif how == "raise":
        raise RuntimeError("training failed")
    elif how == "with-raise":
        with ckpt:
            raise RuntimeError("training failed")
    elif how == "os._exit":
        os._exit(0)
    elif how == "park":
        tell("parked")
        signal.pause()
    elif how == "spin":  # saves until somebody ends it
        while True:
            ckpt.save(step, state_of(step, 1))
            step += 1
    elif how.startswith("fork-"):
        fork(how.removeprefix("fork-"), ckpt, step)
        ckpt.close()
        tell("closed")
    else:
        raise ValueError(how)


def fork(how: str, ckpt: Any, step: int) -> None:
    """A child as DataLoader makes it, while the parent's save is in flight."""
    tell("forking", int(bool(ckpt._flights.steps)))
    child = os.fork()
    if child == 0:
        if how == "save":
            began = time.monotonic()
            try:
                ckpt.save(step, {})  # no torch operation: OpenMP itself may hang in a forked child
            except Exception as err:
                tell("child", type(err).__name__, time.monotonic() - began)
            os._exit(0)
        elif how == "exit":
            sys.exit(0)
        elif how == "outlive":  # the parent ends while the child still holds its copies of everything
            time.sleep(600)
        os._exit(0)
    tell("forked", child)
    if how != "outlive":
        watchdog = threading.Timer(20, os.kill, (child, signal.SIGKILL))
        watchdog.start()
        _, status = os.waitpid(child, 0)
        watchdog.cancel()
        tell("child-ended", os.waitstatus_to_exitcode(status), int(bool(ckpt._flights.steps)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
