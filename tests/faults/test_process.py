"""Real processes against a real server: what becomes of saves when trainer, agent or server die, at any moment.

To catch a save in flight the server is stopped (SIGSTOP) once the trainer has saved: nothing can commit until it goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers import GIVEN, WeedServer, lead_to
from support.trainer import state_of
from support.zygote import Forked, Zygote

from objckpt import Checkpointer, SaveOptions, StoreOptions
from objckpt.cli.main import run
from objckpt.errors import AgentError, NotCommittedError, SaveError

pytestmark = [
    pytest.mark.skipif(GIVEN, reason="stops and kills a server of its own"),
    pytest.mark.timeout(240),
]
SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0
MIB = 24  # of a save of two parts


def python_trainer(url: str, options: dict[str, Any]) -> subprocess.Popen[bytes]:
    """`python trainer.py`, as a user starts it; see `Zygote.fork` for the cheap one."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "trainer.py"), url, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
    )


class Trainer:
    """One run of support/trainer.py, in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked) -> None:
        self.process = process
        self.lines: list[list[str]] = []
        self._rest = b""
        self.agents: set[int] = set()

    @property
    def pid(self) -> int:
        return self.process.pid

    def until(self, word: str, number: int | None = None, limit_s: float = LIMIT_S) -> list[str]:
        """The first event of this word (and number), waiting for it."""
        seen, end = 0, time.monotonic() + limit_s
        while True:
            for line in self.lines[seen:]:
                if line[0] == word and (number is None or line[1] == str(number)):
                    return line[1:]
            seen = len(self.lines)
            left = end - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"no {word} {number or ''}: {self._autopsy()}")

    def _read(self, left_s: float) -> bool:
        out = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], left_s)[0]:
            return False
        data = os.read(out.fileno(), 1 << 16)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            words = line.decode().split(" ")
            self.lines.append(words)
            if words[0] in ("agent", "saved", "committed"):
                self.agents.add(int(words[-1]))
        return bool(data)

    def _autopsy(self) -> str:
        """What it has told, where its threads and those of its forks are, and its stderr. Ends them."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)  # whatever else may hold it
        errors = (self.process.stderr.read() or b"").decode(errors="replace")
        return f"{self.lines}, status {self.process.returncode}\n{errors[-10000:]}"

    def go(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def finish(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Its status and stderr, once it has ended."""
        end = time.monotonic() + limit_s
        while self._read(max(0.0, end - time.monotonic())):
            pass
        try:
            rc = self.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s: {self._autopsy()}") from None
        assert self.process.stderr is not None
        return rc, self.process.stderr.read().decode(errors="replace")

    def close(self) -> None:
        self.kill()
        while self._read(0):
            pass
        for pid in self.agents:
            kill_agent(pid)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


Start = Callable[..., Trainer]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeedServer]:
    server = WeedServer(tmp_path_factory.mktemp("weed-process"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def url(own: WeedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return lead_to(own, monkeypatch)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@pytest.fixture
def start(url: str, zygote: Zygote) -> Iterator[Start]:
    made: list[Trainer] = []

    def make(*, forked: bool = True, **options: Any) -> Trainer:
        made.append(Trainer((zygote.fork if forked else python_trainer)(url, options)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@contextlib.contextmanager
def stopped(server: WeedServer) -> Iterator[None]:
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_agent(pid: int) -> bool:
    """Whether an agent of ours lives under this pid (zombies do not)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"objckpt.agent" in command


def kill_agent(pid: int) -> None:
    if is_agent(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone(pid: int, limit_s: float = LIMIT_S) -> None:
    """Wait for the end of an agent."""
    end = time.monotonic() + limit_s
    while is_agent(pid):
        assert time.monotonic() < end, f"agent {pid} still runs"
        time.sleep(0.02)


def steps(url: str) -> list[int]:
    """The committed steps, each read back to its last bit; the reader meets no agent."""
    with Checkpointer(url) as ckpt:
        ckpt._flights._met_predecessor = True
        found = ckpt.checkpoints()
        for commit in found:
            check(ckpt.load(commit.step), commit.step)
    return [c.step for c in found]


def check(state: dict[str, Any], step: int) -> None:
    mib = state["w"].numel() * 8 / (1 << 20)
    expected = state_of(step, mib, state["seed"])
    assert list(state) == list(expected) and state["n"] == step
    assert all(torch.equal(state[k], expected[k]) for k in ("w", "small"))


def in_flight(
    url: str, start: Start, own: WeedServer, stack: contextlib.ExitStack, **options: Any
) -> tuple[Trainer, int]:
    """Step 1 is committed; a trainer whose save of step 2 cannot get on, and its agent."""
    with Checkpointer(url, options=SaveOptions(uploader="thread")) as ckpt:
        ckpt.save(1, state_of(1, 1))
    trainer = start(**{"mib": MIB, "stdin": True, "restore": False, "first": 2, "wait": "each"} | options)
    trainer.until("waiting")
    stack.enter_context(stopped(own))
    trainer.go()
    agent = int(trainer.until("saved", 2)[1])
    return trainer, agent


def test_a_killed_trainers_save_is_committed_and_resumed_from(url, start, own):
    with contextlib.ExitStack() as stack:
        trainer, agent = in_flight(url, start, own, stack)
        trainer.kill()
        assert is_agent(agent)
        successor = start(mib=MIB, saves=1)
        successor.until("made")
        stack.close()
        assert successor.until("restored") == ["2", "2"]
        assert not is_agent(agent)
        assert successor.finish()[0] == 0
    assert steps(url) == [1, 2, 3]


def test_a_killed_agent_is_told_at_once_and_replaced(url, own):
    with Checkpointer(url) as ckpt:
        ckpt.save(1, state_of(1, 1)).wait_committed()
        epoch = ckpt.checkpoints()[0].epoch
        with stopped(own):
            handle = ckpt.save(2, state_of(2, 32))
            assert ckpt._flights.agent is not None and ckpt._flights.agent.pid is not None
            os.kill(ckpt._flights.agent.pid, signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(AgentError, match=r"step 2 was not committed .*exit status -9") as caught:
                handle.wait_committed(30)
            assert time.monotonic() - began_s < 15  # the store hangs: it is asked once, briefly, for the outcome
            assert caught.value.context["step"] == 2
        ckpt.save(2, state_of(2, 32)).wait_committed(LIMIT_S)
        found = ckpt.checkpoints()
        assert [(c.step, c.epoch) for c in found] == [(1, epoch), (2, epoch)]
    assert steps(url) == [1, 2]


def test_a_killed_agent_with_a_store_that_answers(url):
    with Checkpointer(url) as ckpt:
        ckpt.prepare(state_of(1, 160))
        handle = ckpt.save(1, state_of(1, 160))
        assert ckpt._flights.agent is not None and ckpt._flights.agent.pid is not None
        os.kill(ckpt._flights.agent.pid, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(AgentError, match="step 1 "):
            handle.wait_committed(30)
        assert time.monotonic() - began_s < 5
        ckpt.save(1, state_of(1, 1)).wait_committed(LIMIT_S)
    assert steps(url) == [1]


@pytest.mark.parametrize("noticed", ["before", "after"])
def test_an_agent_that_dies_inside_save_gives_the_slabs_back_once(url, monkeypatch, noticed):
    """Its end is noticed before the sending of the save has failed, or after: given back twice, saves would share slabs."""
    with Checkpointer(url) as ckpt:
        ckpt.save(1, state_of(1, 1)).wait_committed(LIMIT_S)
        agent, arena, over = ckpt._flights.agent, ckpt._arena, threading.Event()
        assert agent is not None and agent._process is not None
        send, on_end = agent._channel.send, agent._on_end

        def send_to_the_dead(*message: Any) -> None:
            kill_agent(agent.pid)
            agent._process.wait(LIMIT_S)
            if noticed == "before":
                agent.join(LIMIT_S)
            send(*message)

        def notice(agent: Any, why: str) -> None:
            assert noticed == "before" or over.wait(LIMIT_S)
            on_end(agent, why)

        monkeypatch.setattr(agent._channel, "send", send_to_the_dead)
        monkeypatch.setattr(agent, "_on_end", notice)
        with pytest.raises(AgentError, match=r"step 2 was not (saved|committed)"):
            ckpt.save(2, state_of(2, 1)).wait_committed(LIMIT_S)
        over.set()
        agent.join(LIMIT_S)
        assert sorted(arena._free) == list(range(arena.slabs)) and arena.slabs == 1
        ckpt.save(2, state_of(2, 1)).wait_committed(LIMIT_S)
    assert steps(url) == [1, 2]


def test_a_save_that_its_agent_has_not_read_yet_outlives_the_trainer(url, start):
    """save() has returned, so the snapshot is safe: its message lies whole in the socket of an agent that is stopped."""
    for step in range(1, 3):
        trainer = start(first=step, mib=8, wait="none", restore=False, stdin=True, end="park")
        agent = int(trainer.until("agent")[0])
        trainer.until("waiting")
        os.kill(agent, signal.SIGSTOP)
        trainer.go()
        trainer.until("parked")
        trainer.kill()
        os.kill(agent, signal.SIGCONT)
        gone(agent)
        assert steps(url) == list(range(1, step + 1))


def test_both_killed_leaves_the_checkpoint_before(url, start, own):
    with contextlib.ExitStack() as stack:
        trainer, agent = in_flight(url, start, own, stack)
        trainer.kill()
        kill_agent(agent)
        gone(agent)
    successor = start(mib=1, saves=0)
    assert successor.until("restored") == ["1", "1"]
    assert successor.finish()[0] == 0
    assert steps(url) == [1]


def test_a_killed_server_that_comes_back(tmp_path, monkeypatch):
    server = WeedServer(tmp_path)
    server.start()
    try:
        url = lead_to(server, monkeypatch)
        store = StoreOptions(retry_deadline_s=45, request_timeout_s=20)
        with Checkpointer(url, store=store) as ckpt:
            ckpt.save(1, state_of(1, 4)).wait_committed(LIMIT_S)
            ckpt.prepare(state_of(2, MIB))
            os.kill(server.pid, signal.SIGSTOP)
            handle = ckpt.save(2, state_of(2, MIB))
            server.kill()
            assert not handle.done()
            server.start()
            failed = None
            try:
                handle.wait_committed(60)
            except SaveError as err:
                failed = err
            assert failed is None or "step 2 was not committed" in str(failed)
            committed = [1, 2] if failed is None else [1]
            assert steps(url) == committed
            ckpt.save(3, state_of(3, 1)).wait_committed(LIMIT_S)
        assert steps(url) == [*committed, 3]
    finally:
        server.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_process_group(url, start, own, number):
    with contextlib.ExitStack() as stack:
        trainer, agent = in_flight(url, start, own, stack)
        os.killpg(trainer.pid, number)
        stack.close()
        rc, errors = trainer.finish()
    assert rc == -number, errors
    gone(agent)
    assert steps(url) == [1, 2]


@pytest.mark.parametrize(
    ("how", "status"),
    [("return", 0), ("sys.exit", 0), ("raise", 1), ("with-raise", 1), ("os._exit", 0)],
)
def test_exit_without_close_loses_nothing(url, start, how, status):  # E047
    options = {"mib": MIB, "first": 1, "wait": "none", "restore": False, "prepare": False, "end": how}
    trainer = start(**options, forked=how not in ("return", "raise"))
    rc, errors = trainer.finish()
    assert rc == status, errors
    for agent in trainer.agents:
        gone(agent)
    assert steps(url) == [1]


def test_exit_without_close_tells_a_loss(url, start, own):  # E048
    with contextlib.ExitStack() as stack:
        trainer, agent = in_flight(url, start, own, stack, wait="none", end="return")
        kill_agent(agent)
        rc, errors = trainer.finish()
    assert rc == 1 and "step 2 was not committed" in errors
    assert steps(url) == [1]


@pytest.mark.parametrize("how", ["save", "exit", "os._exit"])
def test_a_forked_child(url, start, how):  # E045
    trainer = start(mib=MIB, first=1, wait="none", restore=False, end=f"fork-{how}")
    rc, errors = trainer.finish()
    assert rc == 0, errors
    assert trainer.until("forking") == ["1"]
    assert trainer.until("child-ended")[0] == "0"
    if how == "save":
        kind, took_s = trainer.until("child")
        assert kind == "ForkError" and float(took_s) < 5
    assert steps(url) == [1]


def test_a_forked_child_that_outlives_the_trainer(url, start):
    trainer = start(mib=MIB, first=1, wait="none", restore=False, end="fork-outlive")
    child = int(trainer.until("forked")[0])
    try:
        trainer.until("closed")
        for agent in trainer.agents:
            gone(agent)
    finally:
        os.kill(child, signal.SIGKILL)
    assert steps(url) == [1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("uploader", "kills"), [("thread", 20), ("process", 4)])
def test_kills_at_random_moments(url, start, uploader, kills, capsys):  # E024
    """Trainers are killed at moments spread over what one save takes: the step before is the newest, or all of this one.

    "thread": 20 kills, as the case asks, end the trainer together with its uploader. "process": every other kill ends
    the agent with the trainer; the rest leave it, and it finishes the save. Each agent takes a second to start and end,
    so there are fewer of these.
    """
    chance, mib = random.Random(24), 12
    into, known = state_of(0, mib), [1]
    torn, took_s = 0, 0.0
    with Checkpointer(url) as reader:
        for number in range(kills + 2):
            step = known[-1] + (number > 0)
            trainer = start(first=step, mib=mib, part_mib=8, restore=False, uploader=uploader, end="park")
            agent = int(trainer.until("agent")[0])
            began_s = time.monotonic()
            if number in (0, kills + 1):  # after the commit: the first tells how long it takes
                trainer.until("committed", step)
                took_s = time.monotonic() - began_s
                known = [1] if number == 0 else [*known, step]
            else:
                time.sleep(took_s * (number - chance.random()) / kills)
            trainer.kill()
            if number % 2:
                kill_agent(agent)
            gone(agent)
            assert run(["ls", url, "--json"]) == 0
            found = [c["step"] for c in json.loads(capsys.readouterr().out)]
            assert found == known or (found == [*known, step] and step not in known)
            known = found
            assert reader.restore(into) == known[-1]
            check(into, known[-1])
            if step not in known:
                with pytest.raises(NotCommittedError, match=f"step {step} is not committed"):
                    reader.restore(into, step=step)
                torn += 1
    assert torn > 0  # not every save was quicker than its kill


def test_two_processes_race_for_one_step(url, start):  # E051
    pair = [start(mib=24, first=5, seed=seed, restore=False, stdin=True, prepare=False) for seed in (1, 2)]
    for trainer in pair:
        trainer.until("waiting")
    for trainer in pair:
        trainer.go()
    ended = [trainer.finish() for trainer in pair]
    errors = [line for trainer in pair for line in trainer.lines if line[0] == "error"]
    assert all(line[1] == "WriterFencedError" for line in errors), errors
    assert [rc for rc, _ in ended].count(0) == 2 - len(errors) >= 1, ended
    found = steps(url)
    assert found == [5] * (2 - len(errors))
    with Checkpointer(url) as ckpt:
        check(ckpt.load(5), 5)


def test_no_torch_where_it_is_not_needed(url):
    code = "import sys, objckpt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
    with Checkpointer(url) as ckpt:
        ckpt.save(1, state_of(1, 1)).wait_committed(LIMIT_S)
        assert ckpt._flights.agent is not None
        assert "torch" not in Path(f"/proc/{ckpt._flights.agent.pid}/maps").read_text().lower()


@pytest.mark.slow
def test_memory_is_flat_and_the_agent_ends(url):
    def pss(pid: int | str) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10

    def both() -> int:
        return pss("self") + pss(agent)

    state = state_of(1, 24)
    with Checkpointer(url) as ckpt:
        sizes = []
        for step in range(1, 11):
            ckpt.save(step, state).wait_committed(LIMIT_S)
            assert ckpt._flights.agent is not None and ckpt._flights.agent.pid is not None
            agent = ckpt._flights.agent.pid
            sizes.append(both())
    assert max(sizes[3:]) - sizes[2] < 18 << 20, sizes
    assert not is_agent(agent)


def test_a_signal_while_save_waits(url, own):
    """An exception from a signal handler leaves the Checkpointer usable, and its saves are neither lost nor mixed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Checkpointer(url) as ckpt:
            ckpt.save(1, state_of(1, 64)).wait_committed(LIMIT_S)
            with stopped(own):
                ckpt.save(2, state_of(2, 64))
                timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    ckpt.save(3, state_of(3, 64))
                timer.join()
            ckpt.save(3, state_of(3, 64))
        assert steps(url) == [1, 2, 3]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_save_sends(url, monkeypatch):
    """Half of the message is out when the exception comes: that save fails, the ones before and after commit."""
    with Checkpointer(url) as ckpt:
        ckpt.save(1, state_of(1, 1))
        assert ckpt._flights.agent is not None
        sock, lock = ckpt._flights.agent._channel.sock, ckpt._flights.agent._channel._sending

        def interrupted(*_: object) -> None:
            with lock:
                sock.sendall(b"\xff\x00\x00\x00half")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ckpt._flights.agent._channel, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2, state_of(2, 1))
        with pytest.raises(AgentError, match="step 2 was not committed"):
            ckpt.wait(LIMIT_S)
        ckpt.save(3, state_of(3, 1))
    with pytest.raises(NotCommittedError), Checkpointer(url) as ckpt:
        ckpt.load(2)
    assert steps(url) == [1, 3]
