"""A run over all that objckpt does: `python everything.py URL FOLDER`, with the usual AWS variables. Prints whatever it is told.

Failures are printed, too: with wrong credentials every one of them is a failure.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.cli.main import run
from objckpt.store import open_store


def attempt(what: str, act: Callable[[], object]) -> None:
    try:
        print(what, repr(act()))
    except Exception as err:
        traceback.print_exc()
        print(what, repr(err), err, getattr(err, "context", None), getattr(err, "__notes__", None))


def save(url: str, uploader: str) -> None:
    quick = StoreOptions(retry_deadline_s=3.0, request_timeout_s=3.0)
    step = 1 if uploader == "process" else 2
    with Checkpointer(url, store=quick, options=SaveOptions(uploader=uploader)) as ckpt:  # type: ignore[arg-type]
        print(repr(ckpt), repr(ckpt.options), repr(quick), vars(ckpt))
        handle = ckpt.save(step, {"w": torch.ones(1 << 20), "n": {"step": step}}, meta={"loss": 0.5})
        print(repr(handle), vars(handle))
        attempt("committed", handle.wait_committed)
        into = {"w": torch.zeros(1 << 20), "n": {"step": 0}}
        attempt("restore", lambda: ckpt.restore(into))
        attempt("load", lambda: ckpt.load()["n"])
        attempt("open", lambda: ckpt.open()["w"][3:5])
        attempt("checkpoints", ckpt.checkpoints)


def main(url: str, folder: Path) -> None:
    for uploader in ("process", "thread"):
        attempt("save", lambda uploader=uploader: save(url, uploader))
    attempt("store", lambda: vars(open_store(url)))
    verbs = [
        ["ls"], ["ls", "--all", "--json"], ["show"], ["show", "--json"], ["verify"], ["verify", "--json"],
        ["restore", "--out", f"{folder}/a.pt"], ["restore", "--out", f"{folder}/a.safetensors"],
        ["restore", "--out", f"{folder}/parts/", "--json"], ["tag", "best", "2"], ["doctor", "--quick"],
        ["doctor", "--quick", "--json"],
        ["gc"], ["gc", "--json"], ["rm", "1", "--yes"],
    ]  # fmt: skip
    for verb, *rest in verbs:
        print("$", verb, *rest)
        attempt(verb, lambda verb=verb, rest=rest: run([verb, url, *rest]))
    attempt("diff", lambda: run(["diff", f"{url}", f"{url}"]))
    attempt("debug", lambda: run(["ls", url, "--debug"]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
