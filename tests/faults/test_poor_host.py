"""A host that lacks what one takes for granted: a home, a temporary folder, shared memory files, file descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAVE = """
import os, resource, sys, torch
from objckpt import Checkpointer
from objckpt.errors import ObjckptError
url = sys.argv[1]
state = {"w": torch.arange(1000)}
"""
WITHOUT_FILES = (
    SAVE
    + """
with Checkpointer(url) as ckpt:
    ckpt.save(1, state).wait_committed(60)
    maps = open(f"/proc/{ckpt._flights.agent.pid}/maps").read() + open("/proc/self/maps").read()
with Checkpointer(url) as ckpt:
    assert ckpt.restore(state) == 1
print("dev-shm" if "/dev/shm/objckpt" in maps else "saved")
"""
)
WITHOUT_DESCRIPTORS = (
    SAVE
    + """
import asyncio, objckpt.agent.server, objckpt.store.uploads, objckpt.store.s3
ckpt = Checkpointer(url)
used = len(os.listdir("/proc/self/fd"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
for step in (1, 2):
    try:
        ckpt.save(step, state).wait_committed(60)
        print("committed")
    except ObjckptError as err:
        print(type(err).__name__, "open files" in str(err))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
ckpt.save(3, state).wait_committed(60)
ckpt.close()
print("then", [c.step for c in Checkpointer(url).checkpoints()])
"""
)


def run(script: str, url: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, url],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        cwd="/proc",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_writable_folder_is_needed(weed_url: str) -> None:
    assert (
        run(WITHOUT_FILES, weed_url, HOME="/proc/none", TMPDIR="/proc/none", XDG_CACHE_HOME="/proc/none") == "saved\n"
    )


def test_without_file_descriptors_a_save_fails_with_the_reason_and_the_next_one_works(weed_url: str) -> None:
    *failed, last = run(WITHOUT_DESCRIPTORS, weed_url).splitlines()
    assert failed == ["AgentError True"] * 2 and last == "then [3]"
