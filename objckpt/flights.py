"""The saves in flight: the trainer's book of what it gave to the uploader, and what became of each.

It starts the agent, hands it staged snapshots, and settles every save exactly once: by the agent's answer, or by its death.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from objckpt.agent.client import AgentClient, wait_for_predecessor
from objckpt.agent.protocol import Message
from objckpt.config import SaveOptions, StoreOptions
from objckpt.errors import AgentError, ObjckptError, WaitTimeout, from_wire
from objckpt.format import keys
from objckpt.format.records import Commit
from objckpt.handle import SaveHandle, SaveStats
from objckpt.log import read_log
from objckpt.save.arena import Arena
from objckpt.store import open_store

logger = logging.getLogger("objckpt")
_LOOK_AFTER_DEATH_S = 5.0
_QUIET_S, _CLEAN_UP_S = 3.0, 27.0  # that close() waits for what keep_last has dropped to be deleted


@dataclass
class _Flight:
    handle: SaveHandle
    slabs: list[int]
    attempt: str
    on_commit: Callable[[int], None] | None
    agent: AgentClient
    line: int  # how many restores came before it: what it commits later says nothing of the state after another one


class Flights:
    """One agent and its saves. Methods are called by the trainer's thread; answers come from a thread of the agent client.

    Attributes:
        step: of the checkpoint that the live state descends from, as far as this process knows; None before the first.
    """

    def __init__(
        self,
        url: str,
        session: str,
        arena: Arena,
        *,
        store: StoreOptions,
        options: SaveOptions,
        rank: int,
        world_size: int,
    ) -> None:
        self.url, self.session, self.options = url, session, options
        self.rank, self.world_size = rank, world_size
        self.step: int | None = None
        self._store_options = store
        self._arena = arena
        self.agent: AgentClient | None = None
        self._lock = threading.Lock()
        self._flying: dict[int, _Flight] = {}
        self._failed: list[SaveHandle] = []
        self._saves = 0
        self._tries: dict[int, int] = {}  # step → how often it was tried since the last restore: the same on all ranks
        self._restores = 0  # also the same on all ranks
        self._met_predecessor = False
        self._parent: int | None = None  # seq of the checkpoint that the live state descends from
        self._rebase = True  # whether the agent has to be told the parent
        self._resumed: int | None = None  # seq of the checkpoint restored last; retention keeps it

    @property
    def steps(self) -> list[int]:
        """The steps in flight, of the state since the last restore."""
        with self._lock:
            return [f.handle.step for f in self._flying.values() if f.line == self._restores]

    def rebase(self, parent: int, step: int) -> None:
        """The live state is that of the checkpoint `parent` from now on: later saves descend from it."""
        with self._lock:
            self._parent, self.step, self._rebase = parent, step, True
            self._resumed = parent

    def meet_predecessor(self) -> None:
        """Wait, once, for a lingering agent of a former run: see `wait_for_predecessor`."""
        if not self._met_predecessor:
            wait_for_predecessor(self.url, self.rank, self.options.linger_s)
            self._met_predecessor = True

    def start(self) -> AgentClient:
        """The running agent; starts one where there is none. AgentError when it cannot be started."""
        if self.agent is not None and self.agent.hung_up:
            self.agent.join(None)
        if self.agent is None or self.agent.ended:  # one may end before it is known here
            try:
                self.meet_predecessor()
                hello: Message = {
                    "type": "hello",
                    "url": self.url,
                    "store": self._store_options.to_wire(),
                    "options": self.options.to_wire(),
                    "session": self.session,
                    "rank": self.rank,
                    "world_size": self.world_size,
                    "pid": os.getpid(),
                }
                self._rebase = True
                agent = AgentClient(
                    self.options.uploader, hello, on_message=self._on_message, on_end=self._on_agent_end
                )
                self.agent = agent
                agent.send({"type": "arena", "slab_bytes": self._arena.slab_bytes}, self._arena.fd)
            except OSError as err:  # no file descriptors, no processes
                raise AgentError(f"the uploader cannot be started: {err}") from err
        return self.agent

    def send(
        self,
        step: int,
        attempt_number: int,
        slabs: list[int],
        content: Message,
        stats: SaveStats,
        on_commit: Callable[[int], None] | None,
    ) -> SaveHandle:
        """Hand a staged snapshot to the agent: from here on its slabs are given back by this object, and only by it.

        `content` describes the snapshot (see `agent.server`). AgentError when the agent is gone; the slabs are the caller's
        again then, as after any exception for which `owns(slabs)` is False.
        """
        agent = self.start()
        self._saves += 1
        number = self._saves
        handle = SaveHandle(step, stats)
        with self._lock:
            attempt = keys.attempt(step, self.session, attempt_number)
            self._flying[number] = _Flight(handle, slabs, attempt, on_commit, agent, self._restores)
            parent, rebase, self._rebase = self._parent, self._rebase, False
        head = {"type": "save", "save": number, "step": step, "attempt": attempt_number, "slabs": slabs}
        try:
            agent.send(head | content | {"parent": parent, "rebase": rebase, "resumed": self._resumed})
        except AgentError as err:
            with self._lock:
                mine = self._flying.pop(number, None) is not None
            if mine:
                raise AgentError(f"step {step} was not saved: {err.message}", step=step) from err
            # else its end was noticed first: the handle has failed, and the slabs are given back
        except BaseException:  # a signal's exception: how much of the message went out is not known
            agent.hang_up()
            raise
        return handle

    def number(self, step: int) -> int:
        """The number of the next attempt at a step. Counted so that ranks agree on it, whatever failed on one of them.

        After a restore no number from before it comes again: what one rank wrote then and another writes now must not meet.
        """
        self._tries[step] = self._tries.get(step, 0) + 1
        return self._restores * 1000 + self._tries[step]

    def give_up(self, step: int, number: int, reason: str) -> None:
        """`save()` raises on this rank before anything was sent: tell the others, who would wait for their deadline."""
        if self.world_size == 1:
            return
        try:
            self.start().send(
                {"type": "give-up", "attempt": keys.attempt(step, self.session, number), "reason": reason}
            )
        except AgentError as err:
            logger.warning("the other ranks could not be told that step %d fails here: %s", step, err)

    def restoring(self) -> None:
        """All ranks begin a restore together."""
        self._restores += 1
        self._tries.clear()

    def owns(self, slabs: list[int]) -> bool:
        """Whether these slabs belong to a save in flight."""
        with self._lock:
            return any(f.slabs is slabs for f in self._flying.values())

    def wait(self, timeout: float | None) -> None:
        """Block until every save has committed or failed. WaitTimeout after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            handles = [f.handle for f in self._flying.values()]
        for handle in handles:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not handle._settled.wait(left):
                raise WaitTimeout(
                    f"not finished: step {handle.step} is still being uploaded to {self.url} after {timeout} s",
                    step=handle.step,
                )

    def raise_failure(self) -> None:
        """Raise the failures that nobody was told yet, as one exception with notes."""
        with self._lock:
            failed, self._failed = [h for h in self._failed if not h.reported], []
        if not failed:
            return
        for handle in failed:
            handle.reported = True
        error = failed[0].exception()
        assert error is not None
        for handle in failed[1:]:
            error.add_note(f"also: {handle.exception()}")
        raise error

    def close(self) -> None:
        """End the agent. Nothing may be in flight. Blocks until it has ended its own clean-up, at most half a minute."""
        agent = self.agent
        if agent is not None:
            try:
                agent.send({"type": "bye"})
                agent.join(_QUIET_S)
                if not agent.ended:
                    logger.warning(
                        "all saves have ended; waiting up to %.0f s for the uploader's clean-up", _CLEAN_UP_S
                    )
                    agent.join(_CLEAN_UP_S)
            except AgentError:
                pass  # nothing was in flight: its end loses nothing

    def abandon(self) -> None:
        """In a forked child: see `AgentClient.abandon`."""
        if self.agent is not None:
            self.agent.abandon()

    # ---- answers; in the agent client's thread ----------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "ready":
            return
        if kind == "warning":
            logger.warning("%s", message["text"])
            return
        with self._lock:
            flight = self._flying.get(message["save"])
        if flight is None:
            return
        stats = flight.handle.stats
        if kind == "progress":
            stats.sent_bytes = message["sent_bytes"]
        elif kind == "committed":
            stats.sent_bytes = stats.stored_bytes = message["stored_bytes"]
            stats.upload_s, stats.commit_s = message["upload_s"], message["commit_s"]
            stats.agent_cpu_s = message["agent_cpu_s"]
            self._settle(message["save"], flight, seq=message["seq"])
        else:
            self._settle(message["save"], flight, error=from_wire(message["error"]))

    def _settle(
        self, number: int, flight: _Flight, *, seq: int | None = None, error: ObjckptError | None = None
    ) -> None:
        with self._lock:
            if self._flying.pop(number, None) is None:
                return  # send() has raised its failure, and the slabs are the caller's
            if error is not None:
                self._failed.append(flight.handle)
            elif not self._rebase and flight.line == self._restores:
                self._parent, self.step = seq, flight.handle.step
        self._arena.release(flight.slabs)
        if error is not None:
            logger.error("%s", error)
        flight.handle._settle(seq=seq, error=error)
        if error is None and flight.on_commit is not None:
            try:
                flight.on_commit(flight.handle.step)
            except Exception:
                logger.exception("on_commit of step %d raised", flight.handle.step)

    def _on_agent_end(self, agent: AgentClient, why: str) -> None:
        """Whatever this agent had in flight has failed, unless its commit record is there."""
        with self._lock:
            if self.agent is agent:  # else there is a new one already
                self.agent = None
                self._rebase = True
            flights = {number: flight for number, flight in self._flying.items() if flight.agent is agent}
        if not flights:
            return
        committed = self._committed_attempts()
        for number, flight in flights.items():
            step, record = flight.handle.step, committed.get(flight.attempt)
            if record is not None:
                with self._lock:
                    if flight.line == self._restores:
                        self._parent, self.step = record.seq, step
                self._settle(number, flight, seq=record.seq)
                continue
            error = AgentError(
                f"step {step} was not committed to {self.url}: {why}; the next save starts a new one", step=step
            )
            self._settle(number, flight, error=error)

    def _committed_attempts(self) -> dict[str, Commit]:
        limit_s = _LOOK_AFTER_DEATH_S
        options = replace(
            self._store_options,
            connect_timeout_s=min(limit_s, self._store_options.connect_timeout_s),
            request_timeout_s=min(limit_s, self._store_options.request_timeout_s),
            retry_deadline_s=limit_s,
        )
        store = open_store(self.url, options)
        try:
            return {c.attempt: c for c in read_log(store).checkpoints}
        except ObjckptError:
            return {}
        finally:
            store.close()
