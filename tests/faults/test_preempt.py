"""SIGTERM with `on_preempt`: a flag for the training loop; the save in flight and a last one are committed; status 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from objckpt import Checkpointer
from objckpt.errors import UsageError

ROOT = Path(__file__).parents[2]
TRAINING = """
import sys, time, torch
from objckpt import Checkpointer
with Checkpointer(sys.argv[1], on_preempt=lambda: print("asked", flush=True)) as ckpt:
    state = {"w": torch.zeros(1 << 20), "step": 0}
    for step in range(1, 10_000):
        state["w"].fill_(step)
        state["step"] = step
        if step % 5 == 1 or ckpt.preempted:
            ckpt.save(step, state)
            print("saved", step, flush=True)
        if ckpt.preempted:
            break
        time.sleep(0.02)
print("left", step, flush=True)
"""


def test_sigterm_ends_the_loop_with_a_committed_checkpoint(weed_url: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, weed_url],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved 1\n"
        os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does: the whole group; the uploader is not in it
        os.killpg(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    lines = rest.splitlines()
    last = int(lines[-1].removeprefix("left "))
    assert process.returncode == 0 and lines.count("asked") == 1
    with Checkpointer(weed_url) as ckpt:
        assert [c.step for c in ckpt.checkpoints()][-1] == last
        loaded = ckpt.load()
        assert loaded["step"] == last and bool((loaded["w"] == last).all())


def test_the_former_handler_is_called_too_and_comes_back(weed_url: str) -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append("former"))
    try:
        former = signal.getsignal(signal.SIGTERM)
        ckpt = Checkpointer(weed_url, on_preempt=lambda: calls.append("ours"))
        assert not ckpt.preempted
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.preempted and calls == ["ours", "former", "former"]
        ckpt.close()
        assert signal.getsignal(signal.SIGTERM) == former and ckpt.preempted
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_the_option_nothing_is_installed(weed_url: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(weed_url) as ckpt:
        assert signal.getsignal(signal.SIGTERM) == before and ckpt.preempted is False


def test_in_another_thread_it_is_refused(weed_url: str) -> None:
    raised: list[BaseException] = []

    def make() -> None:
        try:
            Checkpointer(weed_url, on_preempt=lambda: None)
        except UsageError as err:
            raised.append(err)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_handlers_come_back_whatever_the_order_of_closing(weed_url: str) -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append("former"))
    try:
        first = Checkpointer(weed_url, on_preempt=lambda: calls.append("first"))
        second = Checkpointer(weed_url, on_preempt=lambda: calls.append("second"))
        first.close()
        thread = threading.Thread(target=second.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == ["former"]
    finally:
        signal.signal(signal.SIGTERM, before)
