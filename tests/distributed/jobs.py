"""What the ranks do. Every function is called as `job(rank, size, ...)` with the process group made; see support/ranks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from objckpt import Checkpointer, SaveOptions
from objckpt.agent import server
from objckpt.errors import ConnectError, ObjckptError
from objckpt.format import keys
from objckpt.handle import SaveHandle
from objckpt.save import upload

STEPS = 2
MORE_STEPS = 3
LONG_S = 100.0  # nobody waits so long: longer than a loaded machine may stall, and several times in one save


class Net(nn.Module):
    """Odd sizes: on four ranks the rows of `head` are 1, 1, 1 and 0; the large matrix is shared among replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)
        self.up = nn.Linear(9, 134)
        self.down = nn.Linear(134, 130)
        self.head = nn.Linear(130, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.norm(x)))))


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """One for all states of a job: making it communicates."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def build(layout: str, size: int, seed: int = 0) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """The module, what wraps it, and its optimizer."""
    torch.manual_seed(seed)
    net: nn.Module = Net()
    wrapped = net
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "ddp":
        wrapped = DistributedDataParallel(net)
    elif layout == "tp":
        parallelize_module(net, mesh(size), plan)
    elif layout == "fsdp":
        fully_shard(net, mesh=mesh(size))
    elif layout == "hsdp":
        fully_shard(net, mesh=mesh(2, size // 2, names=("replicate", "shard")))
    elif layout == "fsdp_tp":
        both = mesh(2, size // 2, names=("dp", "tp"))
        parallelize_module(net, both["tp"], plan)
        fully_shard(net, mesh=both["dp"])
    elif layout != "plain":
        raise ValueError(layout)
    return net, wrapped, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """The losses; the batch is that of the step, and the same on all ranks.

    One operation for all parameters where they lie on one mesh: DTensor's dispatch is most of the CPU time of these tests.
    """
    losses = []
    for group in optimizer.param_groups:  # a restore has put there what was saved
        group["foreach"] = len({getattr(p, "device_mesh", None) for p in group["params"]}) == 1
    for step in range(first, first + steps):
        x = torch.rand(4, 9, generator=torch.Generator().manual_seed(step))
        loss = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def contents(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of both, whole. A collective."""
    out = {f"model/{name}": full(value) for name, value in net.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        out |= {f"optim/{number}/{name}": full(value) for name, value in entries.items()}
    return out


def checkpointer(url: str, **options: Any) -> Checkpointer:
    """The uploader is a thread, where it is not the topic: it starts sooner, and dies with its rank."""
    given = {"rank_deadline_s": LONG_S, "linger_s": LONG_S, "uploader": "thread"} | options
    return Checkpointer(url, options=SaveOptions(**given))


def deadlines() -> Callable[[float], None]:
    """Sets the deadline of this rank's saves from now on. To be called before its Checkpointer, whose uploader is a thread.

    A short one is for a save that must miss it: any other would miss it, too, where the machine stalls.
    """
    agents: list[Any] = []

    class Kept(server._Agent):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            agents.append(self)

    def set_deadline(seconds: float) -> None:
        (agent,) = agents
        agent.options = SaveOptions(**(agent.options.to_wire() | {"rank_deadline_s": seconds}))

    server._Agent = Kept  # type: ignore[misc]
    return set_deadline


class Loader:
    """Has its place in the data, as a data loader has."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


# ---- any layout to any layout ----------------------------------------------------------------------------------------


def save(rank: int, size: int, urls: dict[str, str]) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    """Train and save one model a layout; what was saved, and the losses of going on."""
    out = {}
    for layout, url in urls.items():
        net, wrapped, optimizer = build(layout, size)
        train(wrapped, optimizer, STEPS)
        net.seen.fill_(7)
        ckpt = checkpointer(url)
        ckpt.save(
            STEPS, {"model": net, "optim": optimizer, "step": STEPS}, per_rank=own_state(100 + rank)
        ).wait_committed(LONG_S)
        ckpt.close()
        saved = contents(net, optimizer)
        out[layout] = (saved, train(wrapped, optimizer, MORE_STEPS, STEPS))
    return out


def own_state(number: int) -> dict[str, Any]:
    return {"rng": torch.Generator().manual_seed(number).get_state(), "loader": Loader(number), "number": number}


def restore(
    rank: int, size: int, sources: dict[Any, str], layouts: list[str]
) -> dict[Any, tuple[dict[str, torch.Tensor], list[float]]]:
    """Restore each source into each layout; what is there afterwards, and the losses of going on."""
    out = {}
    for source, url in sources.items():
        for layout in layouts:
            net, wrapped, optimizer = build(layout, size, seed=1)
            ckpt = checkpointer(url)
            state = {"model": net, "optim": optimizer, "step": 0}
            assert ckpt.restore(state) == STEPS and state["step"] == STEPS
            ckpt.close()
            assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.01
            out[source, layout] = (contents(net, optimizer), train(wrapped, optimizer, MORE_STEPS, STEPS))
    return out


def restore_own(rank: int, size: int, url: str) -> Any:
    """What belongs to this rank after a restore, and what was told missing."""
    ckpt = checkpointer(url)
    net, _, optimizer = build("fsdp", size, seed=1)
    own, state = own_state(0), {"model": net, "optim": optimizer, "step": 0}
    ckpt.restore(state, per_rank=own)
    assert state["step"] == STEPS and set(state) == {"model", "optim", "step"}
    ckpt.close()
    return own["number"], own["loader"].place, own["rng"], ckpt.missing


# ---- failures --------------------------------------------------------------------------------------------------------


def outcome(handle: SaveHandle, timeout: float = LONG_S) -> tuple[str, str]:
    """Class and text of a save's error; of a commit the class is "" and the text its step."""
    try:
        handle.wait_committed(timeout)
    except ObjckptError as err:
        return type(err).__name__, str(err)
    return "", str(handle.step)


def attempt(work: Any) -> tuple[str, str]:
    try:
        work()
    except ObjckptError as err:
        return type(err).__name__, str(err)
    return "", ""


def refusals(rank: int, size: int, url: str) -> dict[str, Any]:
    """Saves that must fail, and after each of them one that works."""
    good = {"w": distribute_tensor(torch.arange(7.0), mesh(size), [Shard(0)]), "lr": 0.5}
    out: dict[str, Any] = {}
    ckpt = checkpointer(url)
    partial = DTensor.from_local(torch.ones(3), mesh(size), [Partial()])
    out["partial"] = attempt(lambda: ckpt.save(1, {"model": {"sum": partial}}))
    out["differs"] = outcome(ckpt.save(1, good | {"lr": 0.5 if rank != 2 else 0.25}))
    out["again"] = outcome(ckpt.save(1, good))
    cut = Shard(0) if rank else Replicate()
    out["cuts"] = outcome(
        ckpt.save(2, good | {"w": distribute_tensor(torch.arange(7.0), mesh(size), [cut], src_data_rank=None)})
    )
    out["stages"] = outcome(ckpt.save(2, good | ({"extra": good["w"]} if rank == 1 else {})))
    if rank == 2:
        out["type"] = attempt(lambda: ckpt.save(3, good | {"bad": object()}))
    else:
        out["type"] = outcome(ckpt.save(3, good))
    dist.barrier()
    out["after"] = outcome(ckpt.save(4, good))
    ckpt.close()
    return out


def on_parts(rank: int, size: int, url: str) -> dict[str, Any]:
    """Tensors on one row of a mesh each, as of TP below DDP: the same on both, then what cannot be one tensor. And the restore."""
    both = mesh(2, size // 2, names=("dp", "tp"))
    row, tp = rank // (size // 2), both["tp"]
    ckpt, out = checkpointer(url), {}

    def cut(value: float, cuts: Any) -> dict[str, Any]:
        whole = torch.arange(24.0).reshape(6, 4) + value
        return {"w": distribute_tensor(whole, tp, [cuts], src_data_rank=None), "n": 1}

    out["same"] = outcome(ckpt.save(1, cut(0.0, Shard(0))))
    out["values"] = outcome(ckpt.save(2, cut(float(row), Shard(0))))
    out["cuts"] = outcome(ckpt.save(3, cut(0.0, Shard(row))))
    out["held"] = outcome(ckpt.save(4, cut(0.0, Shard(0) if row else Replicate())))
    out["again"] = outcome(ckpt.save(5, cut(5.0, Shard(1))))
    state = cut(-1.0, Shard(0))
    ckpt.restore(state)
    out["restored"] = full(state["w"]).tolist()
    ckpt.close()
    return out


def restore_refusals(rank: int, size: int, url: str) -> dict[str, Any]:
    """Of the checkpoint that `refusals` leaves: one rank fails, all raise."""
    ckpt = checkpointer(url)
    w = distribute_tensor(torch.zeros(7), mesh(size), [Shard(0)])
    wrong = {"w": w, "lr": 0.0, "more": 1} if rank == 1 else {"w": w, "lr": 0.0}
    out = {"mismatch": attempt(lambda: ckpt.restore(wrong))}
    untouched = not full(w).any()
    out["untouched"] = untouched
    out["missing"] = attempt(lambda: ckpt.restore({"w": w, "lr": 0.0}, step=99))
    if rank == 1:
        ckpt._store.get_into = fail  # this rank cannot read data
    out["read"] = attempt(lambda: ckpt.restore({"w": w, "lr": 0.0}))
    ckpt.close()
    return out


def fail(*args: Any, **kwargs: Any) -> Any:
    raise ConnectError("no route to the store")


COLUMNS_OF_ROW = 9 << 18  # 9 MiB: two parts


def rows(size: int, value: float) -> dict[str, torch.Tensor]:
    whole = torch.full((4, COLUMNS_OF_ROW), value)
    return {"w": torch.full((3,), value), "own": distribute_tensor(whole, mesh(size), [Shard(0)], src_data_rank=None)}


def die(rank: int, size: int, url: str, victim: int, uploader: str) -> Any:
    """A checkpoint; then a rank and its uploader are killed in the middle of the next one. The others have 2 s from there on.

    A thread as uploader dies before its pack is complete, a process before it has sent anything.
    """
    set_deadline, dies = deadlines(), rank == victim
    ckpt = checkpointer(url, part_bytes=8 << 20, uploader=uploader if dies else "thread")
    state = rows(size, 1.0)
    ckpt.save(1, state).wait_committed(LONG_S)
    dist.barrier()
    if not dies:
        set_deadline(2.0)
    elif uploader == "thread":
        upload._Pack.complete = end_here  # type: ignore[method-assign]
    else:
        os.kill(agent_pid(ckpt), signal.SIGSTOP)
    handle = ckpt.save(2, state)
    if dies and uploader == "process":
        end_with_agent(ckpt)
    began = time.monotonic()
    found = outcome(handle)
    took = time.monotonic() - began
    visible = [c.step for c in ckpt.checkpoints()]
    ckpt.close()
    return found, took, visible


def resume(rank: int, size: int, url: str, next_step: int) -> Any:
    ckpt, state = checkpointer(url), rows(size, 0.0)
    found = ckpt.restore(state)
    sums = state["w"].sum().item(), full(state["own"]).sum().item()
    done = outcome(ckpt.save(next_step, state))
    ckpt.close()
    return found, sums, done


def two_jobs(rank: int, size: int, url: str) -> Any:
    """A second writer opens the prefix while the first one goes on."""
    first, second = checkpointer(url), checkpointer(url)
    out = [outcome(first.save(1, {"n": 1})), outcome(second.save(2, {"n": 2}))]
    out += [outcome(first.save(3, {"n": 3})), outcome(second.save(4, {"n": 4}))]
    steps = [c.step for c in second.checkpoints()]
    for ckpt in (first, second):
        ckpt.close()
    return out, steps


def no_collectives(rank: int, size: int, url: str) -> Any:
    """From the return of save() to the commit every way to communicate raises."""
    net, wrapped, optimizer = build("fsdp", size)
    train(wrapped, optimizer, 1)
    ckpt = checkpointer(url)
    calls: list[str] = []

    def forbid(name: str) -> Any:
        def raising(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            raise RuntimeError(f"{name} in the background")

        return raising

    handle = ckpt.save(1, {"model": net, "optim": optimizer})
    kept = [(c10d, name, getattr(c10d, name)) for name in c10d.__all__ if name.islower()]
    kept += [(dist, name, getattr(dist, name)) for _, name, _ in kept if hasattr(dist, name)]
    kept += [
        (dist.ProcessGroup, n, getattr(dist.ProcessGroup, n))
        for n in ("allreduce", "allgather", "broadcast", "barrier", "send")
    ]
    names = {name for _, name, _ in kept}
    assert {"all_gather_object", "broadcast_object_list", "barrier", "isend", "all_reduce"} <= names
    for owner, name, _ in kept:
        setattr(owner, name, forbid(name))
    try:
        found = outcome(handle)
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
    ckpt.close()
    return found, calls


# ---- ranks that die or are slow --------------------------------------------------------------------------------------

SHARED = 1 << 15  # elements: more than what the first rank writes for all


class Value:
    """A part of the state with methods of its own, at which a rank may be made to die."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def filled(size: int, value: int) -> dict[str, Any]:
    """Every number in it is `value`: of two checkpoints mixed neither is what it should be."""
    own = distribute_tensor(torch.full((12, 1 << 16), float(value)), mesh(size), [Shard(0)], src_data_rank=None)
    return {"own": own, "shared": torch.full((SHARED,), float(value)), "last": Value(value)}


def numbers(state: dict[str, Any]) -> set[float]:
    """The different values in a state of `filled`. Not a collective: of what this rank holds."""
    return {*state["own"].to_local().unique().tolist(), *state["shared"].unique().tolist(), float(state["last"].value)}


def agent_pid(ckpt: Checkpointer) -> int:
    agent = ckpt._flights.agent
    assert agent is not None and agent.pid
    return agent.pid


def end_here(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_agent(ckpt: Checkpointer) -> Any:
    os.kill(agent_pid(ckpt), signal.SIGKILL)
    end_here()


def until(condition: Callable[[], Any], limit_s: float = LONG_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def meet(rank: int, size: int, folder: str, name: str) -> None:
    """Wait for all ranks. Unlike a barrier it lets a rank die at once afterwards: nobody still waits for its last message."""
    (Path(folder) / f"{name}-{rank}").touch()
    until(lambda: all((Path(folder) / f"{name}-{each}").exists() for each in range(size)))


def index_is_there(ckpt: Checkpointer, step: int, rank: int) -> bool:
    """Whether the store lists the index of a rank for a step."""
    names = [keys.parse_index(info.key) for info in ckpt._store.list("data/")]
    return any(n is not None and n.rank == rank and n.attempt.startswith(f"s{step:012d}-") for n in names)


def die_in_save(rank: int, size: int, url: str, victim: int, moment: str, folder: str, deadline_s: float) -> Any:
    """Restore and save; then a rank and its uploader, a process, are killed in the next save, or already in the first one.

    It dies "staging", or when its "index" is uploaded; "alone", when its uploader, which lives on, has its part. The others save
    when it is dead, but for "staging". They tell what they have restored, how the save in question ended, and after how long.
    """
    dead, set_deadline, dies = Path(folder) / "dead", deadlines(), rank == victim
    first = moment == "staging the first"
    ckpt = checkpointer(url, uploader="process" if dies else "thread", rank_deadline_s=deadline_s if first else LONG_S)
    state = filled(size, 0)
    found = ckpt.restore(state)
    restored, step = (found, numbers(state)), (found or 0) + 1
    ckpt.prepare(state)
    if not first:
        ckpt.save(step, filled(size, step)).wait_committed(LONG_S)
        step += 1
        if not dies:
            set_deadline(deadline_s)
    state = filled(size, step)
    meet(rank, size, folder, "saved")
    if dies and moment.startswith("staging"):
        ckpt._stager.stage = lambda *args: end_with_agent(ckpt)
    elif not dies and not moment.startswith("staging"):
        until(dead.exists)
    began = time.monotonic()
    handle = ckpt.save(step, state)
    if dies:
        if moment == "index":
            until(lambda: index_is_there(ckpt, step, rank))
            os.kill(agent_pid(ckpt), signal.SIGKILL)
        dead.touch()
        end_here()
    outcomes = outcome(handle), time.monotonic() - began
    ckpt.close()
    return restored, *outcomes


def go_on(rank: int, size: int, url: str, step: int) -> Any:
    """A new job: the step it has restored, what is in the state then, and the outcome of its save of `step`."""
    ckpt, state = checkpointer(url), filled(size, 0)
    found, there = ckpt.restore(state), numbers(state)
    done = outcome(ckpt.save(step, filled(size, step)))
    ckpt.close()
    return found, there, done


def save_filled(rank: int, size: int, url: str) -> None:
    ckpt = checkpointer(url)
    ckpt.save(1, filled(size, 1)).wait_committed(LONG_S)
    ckpt.close()


def die_in_restore(rank: int, size: int, url: str, victim: int, moment: str, timeout_s: float) -> Any:
    """A rank dies, or stops answering, in a restore by all. Class and text of what the others raise, and after how long.

    One that has stopped is missed after a timeout of the process group, which is short from the others' first read on.
    """
    ckpt, state = checkpointer(url), filled(size, 0)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    read = ckpt._store.get_into

    def impatient(*args: Any, **kwargs: Any) -> Any:
        c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s))
        return read(*args, **kwargs)

    if rank != victim:
        if moment == "stopped":
            ckpt._store.get_into = impatient
    elif moment == "fetch":
        ckpt._store.get_into = end_here
    elif moment == "exchange":
        dist.isend = dist.irecv = end_here
    elif moment == "hand over":
        state["last"].load_state_dict = end_here
    else:
        ckpt._store.get_into = lambda *args, **kwargs: stop_here()
    began, kind, text = time.monotonic(), "", ""
    try:
        ckpt.restore(state)
    except Exception as err:
        kind, text = type(err).__name__, str(err)
    took = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[victim], signal.SIGKILL)  # if it has only stopped
    ckpt.close()
    return kind, text, took


def stop_here() -> None:
    """Stop this process before this line ends. `kill` would let another thread take the signal, some time later."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def has_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def waited_for(rank: int, size: int, url: str, folder: str) -> Any:
    """Step 1; in the save of step 2 the uploader of rank 0 is stopped, in that of step 3 rank 1 as a whole.

    They go on when the others have done their part, and waited for a while. Outcomes, and whether the others still waited.
    """
    ckpt, out = checkpointer(url, uploader="process" if rank == 0 else "thread"), []
    ckpt.save(1, filled(size, 1)).wait_committed(LONG_S)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, agent_pid(ckpt) if rank == 0 else os.getpid())
    upload_index = server.upload_index

    async def stop_first(*args: Any) -> Any:
        stop_here()
        return await upload_index(*args)

    for step, late in ((2, 0), (3, 1)):
        state, waits = filled(size, step), True
        server.upload_index = stop_first if rank == late else upload_index
        if rank == late == 0:
            os.kill(pids[0], signal.SIGSTOP)
        meet(rank, size, folder, f"ready-{step}")
        handle = ckpt.save(step, state)
        notes = {each: Path(folder) / f"waits-{step}-{each}" for each in range(size) if each != late}
        if rank != late:
            until(lambda: index_is_there(ckpt, step, rank) and has_stopped(pids[late]))  # noqa: B023
            time.sleep(0.5)
            waits = not handle.done()
            notes[rank].touch()
        if rank == 0:
            until(lambda: all(note.exists() for note in notes.values()))  # noqa: B023
            os.kill(pids[late], signal.SIGCONT)
        out.append((outcome(handle), waits))
    ckpt.close()
    return out


def too_late(rank: int, size: int, url: str, plan: list[tuple[int, str]], deadline_s: float, folder: str) -> Any:
    """A save for each row of the plan: a rank, and where it is held back until the save has failed on all others. Outcomes.

    The deadline is that of a save with a late rank; a row without one is a save as usual.
    """
    set_deadline = deadlines()
    ckpt, out = checkpointer(url), []
    upload_index = server.upload_index
    ckpt.save(1, filled(size, 1)).wait_committed(LONG_S)
    for step, (who, where) in enumerate(plan, 2):
        state = filled(size, step)
        set_deadline(deadline_s if where else LONG_S)
        dist.barrier()
        told = [Path(folder) / f"{step}-{each}" for each in range(size) if each != who]

        def all_told(told: list[Path] = told) -> bool:
            return all(path.exists() for path in told)

        async def late(*args: Any, all_told: Callable[[], bool] = all_told) -> Any:
            await asyncio.to_thread(until, all_told)
            return await upload_index(*args)

        server.upload_index = late if rank == who and where == "uploader" else upload_index
        if rank == who and where == "training":
            until(all_told)
        out.append(outcome(ckpt.save(step, state)))
        (Path(folder) / f"{step}-{rank}").touch()
    ckpt.close()
    return out


# ---- elastic restart -------------------------------------------------------------------------------------------------


def train_on(rank: int, size: int, url: str, last: int, dies: bool, seed: int, folder: str) -> None:
    """FSDP2 from the newest checkpoint to the step `last`, with a save each step; dead in the save of that one if it `dies`.

    Rank 0 leaves what was restored, what was saved and the losses in the folder: a rank that dies returns nothing. The
    uploader is a thread, so that it dies with its rank.
    """

    def note(name: str, value: Any) -> None:
        if rank == 0:
            torch.save(value, Path(folder) / name)

    net, wrapped, optimizer = build("fsdp", size, seed)
    ckpt = checkpointer(url)
    state = {"model": net, "optim": optimizer, "step": 0}
    ckpt.restore(state)
    note(f"restored-{state['step']}", contents(net, optimizer))
    for step in range(state["step"] + 1, last + 1):
        note(f"loss-{step}", train(wrapped, optimizer, 1, step)[0])
        state["step"] = step
        if dies and step == last:
            meet(rank, size, folder, f"last-of-{size}")
            if rank == 1:  # without its part nothing can commit, whatever the others get done
                ckpt._stager.stage = end_here
            ckpt.save(step, state)
            end_here()
        ckpt.save(step, state).wait_committed(LONG_S)
        note(f"saved-{step}", contents(net, optimizer))
    ckpt.close()


# ---- bytes read ------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 2048, 1024  # 8 MiB of fp32


def save_rows(rank: int, size: int, url: str) -> None:
    """One tensor cut by rows, one that all hold."""
    ckpt = checkpointer(url)
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    state = {"w": distribute_tensor(whole, mesh(size), [Shard(0)], src_data_rank=None)}
    ckpt.save(1, state).wait_committed(LONG_S)
    ckpt.close()


def restore_columns(rank: int, size: int, url: str, placement: str) -> bool:
    """Into other placements of the same tensor; whether it is what was saved."""
    place = {"columns": [Shard(1)], "whole": [Replicate()], "rows": [Shard(0)]}.get(placement)
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    if place is None:
        ranks, place = mesh(2, size // 2), [Replicate(), Shard(0)]
    else:
        ranks = mesh(size)
    target = distribute_tensor(torch.zeros(ROWS, COLUMNS), ranks, place, src_data_rank=None)
    ckpt = checkpointer(url)
    ckpt.restore({"w": target})
    ckpt.close()
    return torch.equal(target.to_local(), distribute_tensor(whole, ranks, place, src_data_rank=None).to_local())


def ddp_bytes(rank: int, size: int, url: str) -> bool:
    """Save and restore as data-parallel jobs do: plain tensors, alike on all ranks."""
    tensors = {f"w{i}": torch.full((1 << 19,), float(i)) for i in range(4)}
    ckpt = checkpointer(url)
    ckpt.save(1, {"model": tensors}).wait_committed(LONG_S)
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    ckpt.restore(into)
    ckpt.close()
    return all(torch.equal(into["model"][name], tensor) for name, tensor in tensors.items())
