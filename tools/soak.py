"""Kills and stops a training, its uploader and its store at random moments, and checks after each round what must hold.

    python tools/soak.py                                 200 rounds on a local S3 server of its own
    python tools/soak.py --rounds 20 --seed 7 --minutes 5

A round: under load (saves without a pause between them) a fault strikes at a random moment; then everything runs again, the
training, started anew where it was killed, commits once more, and the log and all live checkpoints are read and compared
with what the trainings told. `--seed` gives the same faults at the same moments; what they hit depends on the machine.

Exit status 1: something that must hold did not. 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIBS = (0.5, 3, 12)  # of the states: one part, one part, several
ROUNDS_PER_URL = 12  # then another size, under another prefix: the log of a run stays short
KEEP_LAST = 4  # live checkpoints: retention and collection run under fire, too
LINGER_S = 6.0  # how long an uploader goes on without its training
PROGRESS_S = 90.0  # by then the training has committed again, or it hangs


# ---- the training: a process of its own ------------------------------------------------------------------------------


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def fingerprint(state: Mapping[str, Any]) -> str:
    """Of every bit of it."""
    found = hashlib.sha256()
    for key in sorted(state):
        value = state[key]
        found.update(
            f"{key} {value.dtype} {tuple(value.shape)}".encode()
            if hasattr(value, "dtype")
            else repr((key, value)).encode()
        )
        if hasattr(value, "dtype"):
            import torch

            found.update(value.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:32]


def train(url: str, mib: float, seed: int) -> None:
    """Resumes and saves until it is killed. Tells each state before it saves it, and each answer to a save."""
    import torch

    from objckpt import Checkpointer, SaveOptions, StoreOptions
    from objckpt.errors import ObjckptError, WriterFencedError

    chance = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    count = int(mib * (1 << 20)) // 8
    state: dict[str, Any] = {
        "weights": torch.zeros(count, dtype=torch.float32),
        "moments": torch.zeros(count * 2, dtype=torch.bfloat16),
        "step": 0,
        "history": [],
    }
    ckpt = Checkpointer(
        url,
        store=StoreOptions(connect_timeout_s=2.0, request_timeout_s=4.0, retry_deadline_s=30.0),
        options=SaveOptions(linger_s=LINGER_S, keep_last=KEEP_LAST, part_bytes=8 << 20),
    )
    tell("session", ckpt.session)
    found = ckpt.restore(state)
    if found is None:
        tell("restored", -1, "-")
    else:
        tell("restored", ckpt._flights._parent, fingerprint(state))
    step = state["step"]
    ckpt.prepare(state)
    pending: list[Any] = []
    while True:
        step += 1
        state["weights"].mul_(0.99).add_(torch.randn(count, generator=numbers))
        state["moments"].copy_(state["weights"].repeat(2))
        state["step"], state["history"] = step, [*state["history"][-9:], (step, ckpt.session)]
        tell("saving", step, fingerprint(state))
        try:
            pending.append(ckpt.save(step, state))
            tell("saved", step, ckpt._flights.agent.pid if ckpt._flights.agent else 0)
            if chance.random() < 0.5:
                with contextlib.suppress(ObjckptError):
                    pending[-1].wait_committed()
        except WriterFencedError as err:
            tell("fenced", json.dumps(str(err)))
            os._exit(4)
        except ObjckptError as err:
            tell("failed", type(err).__name__, json.dumps(str(err)))
            time.sleep(0.1)
        for handle in [h for h in pending if h.done()]:
            pending.remove(handle)
            if handle.exception() is None:
                tell("committed", handle.step, handle.seq)
            else:
                tell("lost", handle.step, type(handle.exception()).__name__)
        time.sleep(0.3 + mib * 0.03)  # disks are finite


# ---- what the rounds act on ------------------------------------------------------------------------------------------


class Training:
    """One training process, and what it has told."""

    def __init__(self, url: str, mib: float, seed: int, book: Book, log: Path) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.book, self.session, self.agents = book, "", set[int]()
        self.told = threading.Condition()
        self.commits = 0
        self.ready = False
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--train", json.dumps([url, mib, seed])],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        out = self.process.stdout
        assert out is not None
        for line in out:
            with self.told:
                if line.endswith(b"\n"):  # else its end was cut off
                    self._note(line.decode().split())
                self.told.notify_all()

    def _note(self, words: list[str]) -> None:
        book = self.book
        if words[0] == "session":
            self.session = words[1]
        elif words[0] == "restored":
            book.resumed(int(words[1]), words[2])
            self.ready = True
        elif words[0] == "saving":
            book.states[self.session, int(words[1])] = words[2]
        elif words[0] == "saved":
            self.agents.add(int(words[2]))
        elif words[0] == "committed":
            book.acknowledged[int(words[2])] = (self.session, int(words[1]))
            book.counts["acknowledged"] += 1
            self.commits += 1
        elif words[0] == "lost":
            book.counts["failed saves"] += 1
        elif words[0] == "fenced":
            book.violation(f"a training without a successor was fenced: {' '.join(words[1:])}")

    def wait(self, holds: Callable[[], bool], limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        with self.told:
            while not holds():
                left = end - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    return holds()
                self.told.wait(min(left, 0.2))
        return True

    def agent(self) -> int:
        """The pid of its living uploader; 0 when there is none."""
        return next((pid for pid in self.agents if is_agent(pid)), 0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(30)  # an uploader does not hold the pipe: all it told is noted now
        self._log.close()

    def last_words(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")[-2000:]


class Book:
    """What has been told under one URL, and what is wrong."""

    def __init__(self, counts: Counter[str], violation: Callable[[str], None]) -> None:
        self.counts, self.violation = counts, violation
        self.states: dict[tuple[str, int], str] = {}  # (session, step) to the fingerprint of the state that was saved
        self.acknowledged: dict[int, tuple[str, int]] = {}  # seq to (session, step)
        self.log: Any = None  # as it was read last
        self._resumed = (-1, "-")
        self.resumable = -1  # the newest seq known to be committed before the last training started

    def resumed(self, seq: int, found: str) -> None:
        if seq < self.resumable:
            self.violation(f"a training resumed from record {seq}, older than the committed record {self.resumable}")
        self._resumed = (seq, found)

    def check_resumed(self, of: Mapping[int, tuple[str, int]]) -> None:
        """Compare what the last training resumed from with what was recorded. `of`: seq to (session, step)."""
        seq, found = self._resumed
        if seq >= 0 and self.states.get(of.get(seq, ("", -1))) != found:
            self.violation(f"a training resumed from record {seq} with another state than was saved")


def is_agent(pid: int) -> bool:
    try:
        return b"objckpt.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- faults ----------------------------------------------------------------------------------------------------------


class Soak:
    """A server, one training at a time, and the rounds."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.directory = args, directory
        self.chance = random.Random(args.seed)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.fault = "-"
        self.round = 0
        self._trainings = 0
        self.everyone: set[int] = set()  # uploaders that ever lived
        self.FAULTS: dict[str, Callable[[], None]] = {
            "kill trainer": self.kill_trainer,
            "kill agent": self.kill_agent,
            "kill trainer and agent": self.kill_both,
            "kill server": self.kill_server,
            "kill server and trainer": self.kill_server_and_trainer,
            "stop server": self.stop_server,
            "stop agent": self.stop_agent,
            "stop trainer": self.stop_trainer,
            "stop server, kill trainer": self.kill_trainer_of_a_stopped_server,
            "stop agent, replace trainer": self.late_agent,
        }

    def violation(self, text: str) -> None:
        self.violations.append(text)
        print(f"round {self.round} ({self.fault}): VIOLATION: {text}", flush=True)

    # ---- one after the other ----

    def run(self) -> None:
        from objckpt.cli import local_server

        end = time.monotonic() + self.args.minutes * 60
        self.server = local_server.start(self.directory / "weed", die_with_parent=True)
        os.environ.update(self.server.environment(), AWS_EC2_METADATA_DISABLED="true")
        os.environ.pop("AWS_PROFILE", None)
        self.training: Training | None = None
        try:
            while self.round < self.args.rounds and time.monotonic() < end:
                if self.round % ROUNDS_PER_URL == 0:
                    self.new_url()
                self.one_round()
                self.round += 1
                self.counts["rounds"] += 1
        finally:
            self.end_training()
            for pid in self.everyone:
                if is_agent(pid):
                    send(pid, signal.SIGKILL)
            send(self.server.pid, signal.SIGCONT)
            local_server.kill(self.server)

    def new_url(self) -> None:
        self.end_training()
        self.mib = MIBS[self.round // ROUNDS_PER_URL % len(MIBS)] if self.args.mib is None else self.args.mib
        self.url = f"s3://{self.server.bucket}/soak-{uuid.uuid4().hex}"
        self.book = Book(self.counts, self.violation)
        self.start_training()

    def start_training(self) -> None:
        self.book.resumable = max([*self.book.acknowledged, self.book.resumable])
        self._trainings += 1
        log = self.directory / f"training-{self._trainings}.err"
        self.training = Training(self.url, self.mib, self.args.seed * 100_003 + self._trainings, self.book, log)
        self.counts["trainings"] += 1

    def end_training(self) -> None:
        if self.training is not None:
            self.training.kill()
            self.everyone |= self.training.agents
            for pid in self.training.agents:
                self.kill_pid(pid)
            self.training = None

    def next_fault(self) -> tuple[str, float]:
        """Its name, and how many seconds of load come before it."""
        return self.chance.choice(list(self.FAULTS)), self.chance.uniform(0, 1.2)

    def one_round(self) -> None:
        training = self.training
        assert training is not None
        name, delay_s = self.next_fault()
        self.fault = name
        began_s = time.monotonic()
        time.sleep(delay_s)  # the moment
        self.FAULTS[name]()
        self.counts[name] += 1
        if self.training is None:
            self.start_training()
        training = self.training
        assert training is not None
        before = training.commits
        if not training.wait(lambda: training.ready and training.commits > before, PROGRESS_S):
            status = training.process.poll()
            how = "no commit" if status is None else f"the training ended with status {status}"
            self.violation(f"{how} within {PROGRESS_S:.0f} s after the fault: {training.last_words()}")
            self.end_training()
            self.start_training()
            return
        send(training.process.pid, signal.SIGSTOP)  # else the log grows while it is read; its uploader goes on
        try:
            commits = self.check()
        finally:
            send(training.process.pid, signal.SIGCONT)
        took_s = time.monotonic() - began_s
        print(f"round {self.round}: {name}, {delay_s:.2f} s; {commits} commits, {took_s:.1f} s", flush=True)

    # ---- the faults; each leaves the server running, and `training` None when it must be started anew ----

    def kill_pid(self, pid: int) -> None:
        if is_agent(pid):
            send(pid, signal.SIGKILL)
            self.counts["kills"] += 1

    def kill_trainer(self) -> None:
        assert self.training is not None
        self.training.kill()
        self.counts["kills"] += 1
        self.everyone |= self.training.agents
        self.training = None

    def kill_agent(self) -> None:
        assert self.training is not None
        self.kill_pid(self.training.agent())

    def kill_both(self) -> None:
        assert self.training is not None
        agents = self.training.agents
        order = [self.kill_trainer, lambda: [self.kill_pid(pid) for pid in agents]]
        self.chance.shuffle(order)
        for kill in order:
            kill()

    def kill_server(self) -> None:
        from objckpt.cli import local_server

        local_server.kill(self.server)
        self.counts["kills"] += 1
        time.sleep(self.chance.uniform(0, 3))
        self.server = local_server.start(self.directory / "weed", die_with_parent=True, ports=self.server.ports)

    def kill_server_and_trainer(self) -> None:
        self.kill_trainer()
        self.kill_server()

    def stop(self, pid: int, limit_s: float) -> None:
        send(pid, signal.SIGSTOP)
        self.counts["stops"] += 1
        try:
            time.sleep(self.chance.uniform(0.05, limit_s))
        finally:
            send(pid, signal.SIGCONT)

    def stop_server(self) -> None:
        self.stop(self.server.pid, 6.0)  # above the time-out of a request

    def stop_agent(self) -> None:
        assert self.training is not None
        if pid := self.training.agent():
            self.stop(pid, 3.0)

    def stop_trainer(self) -> None:
        assert self.training is not None
        self.stop(self.training.process.pid, 2.0)

    def kill_trainer_of_a_stopped_server(self) -> None:
        assert self.training is not None
        agents = self.training.agents
        send(self.server.pid, signal.SIGSTOP)
        self.counts["stops"] += 1
        try:
            time.sleep(self.chance.uniform(0, 1))
            self.kill_trainer()
            if self.chance.random() < 0.5:
                for pid in agents:
                    self.kill_pid(pid)
            time.sleep(self.chance.uniform(0, 5))
        finally:
            send(self.server.pid, signal.SIGCONT)

    def late_agent(self) -> None:
        """The uploader of a killed training goes on when its successor is already at work: it must be kept out."""
        assert self.training is not None
        pid = self.training.agent()
        if not pid:
            return
        send(pid, signal.SIGSTOP)
        self.counts["stops"] += 1
        try:
            self.kill_trainer()
            self.start_training()
            assert self.training is not None
            training = self.training
            training.wait(lambda: training.ready, PROGRESS_S)
            time.sleep(self.chance.uniform(0, 2))
        finally:
            send(pid, signal.SIGCONT)

    # ---- what must hold ----

    def check(self) -> int:
        """Of the log and of every live checkpoint; returns the number of commits so far."""
        from objckpt import StoreOptions, restore
        from objckpt.log import read_log
        from objckpt.store import open_store

        book = self.book
        store = open_store(self.url, StoreOptions(retry_deadline_s=60.0, request_timeout_s=10.0))
        try:
            acknowledged = dict(book.acknowledged)
            if (self.round + 1) % ROUNDS_PER_URL == 0:
                book.log = None  # all of it once more, at the end
            log = book.log = read_log(store, book.log)
            for seq, why in log.damaged:
                self.violation(f"record {seq} is damaged: {why}")
            of = {c.seq: (c.session, c.step) for c in log.commits}
            attempts = Counter(c.attempt for c in log.commits)
            for attempt, times in attempts.items():
                if times > 1:
                    self.violation(f"{attempt} was committed {times} times")
            for commit in log.fenced:
                self.violation(f"record {commit.seq} got into the log after its writer was replaced")
            for seq, told in acknowledged.items():
                if of.get(seq) != told:
                    self.violation(f"record {seq} was acknowledged as {told}, the log has {of.get(seq)}")
            newest = max((c.seq for c in log.checkpoints), default=-1)
            if acknowledged and newest < max(acknowledged):
                self.violation(f"record {max(acknowledged)} was acknowledged, the newest live one is {newest}")
            book.check_resumed(of)
            for commit in log.checkpoints:
                try:
                    checkpoint = restore.open_checkpoint(store, commit)
                    problems = [str(p) for p in restore.verify(store, checkpoint)]
                    found = fingerprint(restore.load(store, checkpoint))
                    if found != book.states.get((commit.session, commit.step)):
                        problems.append(f"the state is not that which was saved as step {commit.step}")
                except Exception:
                    problems = [traceback.format_exc()[-1500:]]
                if problems and commit.seq not in read_log(store, log).retired:  # else retention came first
                    self.violation(f"record {commit.seq}: {'; '.join(problems)}")
                self.counts["checkpoints read"] += 1
                book.resumable = newest
            self.counts[f"commits {self.url}"] = len(log.commits)
            return len(log.commits)
        finally:
            store.close()

    def summary(self) -> str:
        c = self.counts
        commits = sum(n for name, n in c.items() if name.startswith("commits "))
        return (
            f"soak: {c['rounds']} rounds (seed {self.args.seed}), {c['kills']} kills, {c['stops']} stops, "
            f"{c['trainings']} trainings, {commits} commits ({c['acknowledged']} acknowledged, {c['failed saves']} saves "
            f"failed and said so), {c['checkpoints read']} checkpoints read back, {len(self.violations)} violations"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no round starts after that")
    parser.add_argument("--mib", type=float, help="size of the state; by default several in turn")
    parser.add_argument("--directory", type=Path, help="for the server's data and the trainings' errors; kept")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    sys.path.insert(0, str(ROOT))
    if args.train:
        train(*json.loads(args.train))
    directory = args.directory or Path(tempfile.mkdtemp(prefix="objckpt-soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    soak = Soak(args, directory)
    try:
        soak.run()
    finally:
        print(soak.summary(), flush=True)
        if args.directory is None and not soak.violations:
            shutil.rmtree(directory, ignore_errors=True)
    return 1 if soak.violations or not soak.counts["rounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
