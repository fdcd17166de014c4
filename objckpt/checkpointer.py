"""What training calls: `Checkpointer`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch

from objckpt import collect, exits, limits, restore
from objckpt.agent.protocol import Message
from objckpt.config import SaveOptions, StoreOptions
from objckpt.errors import (
    BusyError,
    ForkError,
    NotCommittedError,
    ObjckptError,
    StepOrderError,
    UsageError,
)
from objckpt.events import Progress, ignore
from objckpt.flights import Flights
from objckpt.format import values, wire
from objckpt.format.records import Commit
from objckpt.format.tables import TensorTable
from objckpt.group import Group
from objckpt.handle import SaveHandle, SaveStats
from objckpt.log import Log, read_log
from objckpt.preempt import Preemption
from objckpt.restore.removed import unless_removed
from objckpt.resume import restore_together
from objckpt.save import plan
from objckpt.save.arena import Arena
from objckpt.state.flatten import Flat, flatten
from objckpt.state.staging import Stager
from objckpt.store import open_store

logger = logging.getLogger("objckpt")
_TOLD_WAIT_S = 0.05  # a save that waited less for the one before is no news
T = TypeVar("T")


class Checkpointer:
    """Saves and restores training state under one URL, `s3://bucket/prefix`.

    Credentials and endpoint come from the standard AWS chain (environment, files, instance roles) and are refreshed by it.
    The constructor makes no request. Use it as a context manager: leaving the block waits until every save has committed
    or failed, and raises in the second case. Methods may be called by one thread at a time.

    The commands of `objckpt` (`ls`, `show`, `verify`, `restore`) work on the same URL.
    """

    def __init__(
        self,
        url: str,
        *,
        store: StoreOptions | None = None,
        options: SaveOptions | None = None,
        on_preempt: Callable[[], object] | None = None,
    ) -> None:
        """Nothing is read or written. In a process group of several ranks it broadcasts once: all ranks must make theirs.

        Args:
            on_preempt: with it SIGTERM does not end the process: it sets `preempted`, and calls this once, in the main thread
                between two of its instructions. The training loop should look at `preempted` after each step, save, and
                leave. Saves go on meanwhile, since the uploader ignores SIGTERM. Until `close` a handler that was there
                before is called as well.

        Raises:
            UsageError: a URL or option is not acceptable, or `on_preempt` is given outside the main thread.
        """
        for name, given, kind in (("store", store, StoreOptions), ("options", options, SaveOptions)):
            if given is not None and not isinstance(given, kind):
                raise UsageError(f"{name} must be {kind.__name__}, not {type(given).__name__}")
        self._store_options = store or StoreOptions()
        self.options = options or SaveOptions()
        self._store = open_store(url, self._store_options)
        self.url = self._store.url
        self.group = Group.of_this_process()
        self.session: str = self.group.broadcast(collect.new_session())
        self.pid = os.getpid()  # where it may be used
        self._stager = Stager()
        self._arena = Arena(
            limit_bytes=self.options.arena_bytes, on_segment=self._stager.pin, on_release=self._stager.unpin
        )
        self._flights = Flights(
            self.url,
            self.session,
            self._arena,
            store=self._store_options,
            options=self.options,
            rank=self.group.rank,
            world_size=self.group.size,
        )
        self._log: Log | None = None
        self.missing: list[str] = []  # of the last restore with strict=False: in the state only
        self.unexpected: list[str] = []  # … in the checkpoint only
        self._preemption = None if on_preempt is None else Preemption(on_preempt)
        self._closed = False

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM has come since this object was made with `on_preempt`. Of this process; other ranks may differ."""
        return self._preemption is not None and self._preemption.happened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except ObjckptError as lost:  # the caller's exception goes first, and carries this one's text
            error.add_note(f"objckpt: {lost}")
            logger.error("%s", lost)

    # ---- saving -----------------------------------------------------------------------------------------------------

    def prepare(self, state: Mapping[Any, Any], *, per_rank: Mapping[Any, Any] | None = None) -> None:
        """Make the first save as fast as the later ones: start the uploader and bring the snapshot memory in.

        Returns at once; the memory (the size of the state) becomes resident in the background. Call it when the state has
        its final size: for optimizers that is after the first step.
        """
        self._check_usable()
        flat = self._flatten(state, per_rank)
        self._arena.reserve(plan.slabs_for(sum(leaf.nbytes for leaf in flat.leaves)))
        exits.keep(self)
        self._flights.start()

    def save(
        self,
        step: int,
        state: Mapping[Any, Any],
        *,
        per_rank: Mapping[Any, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        on_commit: Callable[[int], None] | None = None,
    ) -> SaveHandle:
        """Copy `state` into the snapshot and return; upload and commit go on in the background.

        Blocks for the copy of the state into host memory, and before that, while an earlier save still needs this memory.
        The state may be changed as soon as this returns: what is stored is the state at the moment of the call, bit by bit.

        Args:
            step: the training step, 0 or more; above every step saved so far in this line of checkpoints.
            state: nested mappings, lists and tuples of tensors (any dtype, device and stride), plain values, and objects
                with `state_dict()`. Tensors that share memory are stored once.
            per_rank: the same for what belongs to this rank alone, such as random number generators and data loaders.
            meta: a small mapping of plain values, shown by `objckpt show`.
            overwrite: permit a step that is already saved. The new checkpoint becomes the newest; the old one is kept.
            on_commit: called with `step` from a background thread once the checkpoint is committed.

        Raises:
            SaveError: an earlier save has failed, and this was not reported yet. This save did not start; call again. (In a
                job of several ranks it has started: ranks learn of a failure at different times.)
            UnsupportedTypeError: a leaf cannot be stored. Nothing was copied or written.
            StepOrderError, UsageError: the step. Nothing was copied or written.
            ArenaFullError: the snapshot does not fit the host's memory or `arena_bytes`. Nothing was allocated.
            BusyError: an earlier save is in flight and `on_busy="raise"`.
        """
        began_s = time.perf_counter()
        self._check_usable()
        if type(step) is not int or not 0 <= step <= limits.MAX_STEP:
            raise UsageError(f"step must be an int in [0, {limits.MAX_STEP}], not {step!r}")
        number = self._flights.number(step)
        try:
            if self.group.size == 1:
                self._flights.raise_failure()
            self._check_step(step, overwrite)
            flat = self._flatten(state, per_rank)
            tree = self._tree(flat)
            packed_meta = values.pack(dict(meta) if meta is not None else None)
            plans, total = plan.lay_out([leaf.nbytes for leaf in flat.leaves])
            stats = SaveStats(staged_bytes=total)
            slabs = self._acquire(plan.slabs_for(total), stats)
        except Exception as err:
            self._flights.give_up(step, number, f"save() raised {type(err).__name__}: {err}")
            raise
        try:
            if self.group.size == 1:
                self._flights.raise_failure()  # of the save that this one has waited for
            stage_s = time.perf_counter()
            self._stager.stage(flat.leaves, [(p.start, p.nbytes) for p in plans], self._arena.views(slabs))
            stats.stage_s = time.perf_counter() - stage_s
            exits.keep(self)
            content = _content(flat, tree, packed_meta)
            handle = self._flights.send(step, number, slabs, content, stats, on_commit)
        except BaseException:
            if not self._flights.owns(slabs):
                self._arena.release(slabs)
            raise
        stats.blocked_s = time.perf_counter() - began_s
        if (
            self.group.size > 1
        ):  # only now: a rank that raised before, while others save, would cost this checkpoint too
            self._flights.raise_failure()
        return handle

    def wait(self, timeout: float | None = None) -> None:
        """Block until no save is in flight. Raises what `SaveHandle.wait_committed` raises; WaitTimeout after `timeout` s."""
        self._check_usable()
        self._flights.wait(timeout)
        self._flights.raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Wait until every save has committed or failed, then end the uploader and free the snapshot memory. Idempotent.

        Raises:
            SaveError: a save has failed and this was not reported yet.
            WaitTimeout: `timeout` seconds are over. Nothing is closed, the saves go on; call again.
        """
        if self._closed:
            return
        self._check_process()
        self._flights.wait(timeout)
        self._closed = True
        exits.forget(self)
        if self._preemption is not None:
            self._preemption.stop()
        self._flights.close()
        self._arena.close()
        self._store.close()
        self._flights.raise_failure()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Commit]:
        """The committed checkpoints in the order of their commits; the last one is the newest. Blocks for a listing."""
        return self._read_log().checkpoints

    def latest(self) -> int | None:
        """The step of the newest committed checkpoint; None when there is none. Blocks for a listing."""
        try:
            return self._read_log().newest().step
        except NotCommittedError:
            return None

    def restore(
        self,
        into: Mapping[Any, Any],
        *,
        step: int | str | None = None,
        per_rank: MutableMapping[Any, Any] | None = None,
        strict: bool = True,
        only: str | list[str] | None = None,
        cast: bool = False,
        read_sharing: Literal["auto", "off"] = "auto",
        progress: Progress = ignore,
    ) -> int | None:
        """Fill `into` from the newest committed checkpoint, or from that of `step`. Blocks. Returns the step.

        Tensors are filled in place (their device and strides stay); objects get their part by `load_state_dict`; plain
        values are replaced in their mapping. Returns None, and touches nothing, when there is no checkpoint at all and
        no step was named. Saves that follow count as descendants of the checkpoint restored.

        Args:
            strict: every leaf of `into` must be in the checkpoint and the other way round. With False the attributes
                `missing` and `unexpected` list, by FQN, what was left out, and a warning tells it.
            step: a step, "step@seq" for exactly one of several commits of a step, or a tag.
            per_rank: what `save` was given as `per_rank`, to be filled with that of this rank. Where the checkpoint has nothing
                of this rank, since fewer ranks saved it, it stays as it is, and `missing` has "per_rank/<rank>".
            only: patterns of FQNs (`"model/*"`) to restore; the rest stays untouched.
            cast: permit another floating dtype than the stored one.
            read_sharing: in a job of several ranks "auto" lets what several of them want be read by one and passed on, where
                the process group moves tensors of the host (gloo); "off" makes each read for itself.

        In a job of several ranks all must call this, with parts of the same state; it communicates. When it fails on one
        rank it raises on all: the failure there, PeerError elsewhere.

        Raises:
            NotCommittedError: `step` is not committed, or was removed while it was being read.
            PeerError: another rank has failed.
            MismatchError: leaves are missing, unexpected, or differ in shape or dtype; it lists all of them, nothing was
                touched.
            FormatError: stored bytes are not what was written.
            StoreError: the store cannot be read. Never taken for "no checkpoint".
        """

        self._check_usable()
        self.group.check()
        self._flights.restoring()

        def once() -> int | None:
            commit = self._choose(step)
            if commit is None:
                return None
            report = restore_together(
                self._store, self.group, commit, into, per_rank, strict=strict, only=only, cast=cast,
                pickle=self.options.pickle, sharing=read_sharing, progress=progress,
            )  # fmt: skip
            self._flights.rebase(commit.seq, commit.step)
            self.missing, self.unexpected = report.missing, report.unexpected
            if report.missing or report.unexpected:
                logger.warning(
                    "step %d: left as they were: %s; only in the checkpoint: %s",
                    commit.step,
                    ", ".join(report.missing) or "nothing",
                    ", ".join(report.unexpected) or "nothing",
                )
            return commit.step

        return self._unless_removed(step, once)

    def load(
        self,
        step: int | str | None = None,
        *,
        device: str | torch.device = "cpu",
        only: str | list[str] | None = None,
        progress: Progress = ignore,
    ) -> Any:
        """The nested state of the newest checkpoint, or of `step`'s, as new tensors on `device`. Blocks.

        Tensors that were tied are tied again. Raises as `restore` does; NotCommittedError when there is no checkpoint.
        """

        def once() -> Any:
            commit = self._read_log().find(step)
            with unless_removed(self._store, commit):
                checkpoint = restore.open_checkpoint(self._store, commit)
                return restore.load(
                    self._store, checkpoint, device=device, only=only, pickle=self.options.pickle, progress=progress
                )

        return self._unless_removed(step, once)

    def open(self, step: int | str | None = None) -> Mapping[str, Any]:
        """A lazy, read-only mapping from FQN to value or tensor; a tensor's slice fetches only the chunks it needs."""
        commit = self._read_log().find(step)
        return restore.lazy(self._store, restore.open_checkpoint(self._store, commit))

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _unless_removed(self, step: int | str | None, once: Callable[[], T]) -> T:
        """Beside a job that keeps only few checkpoints the newest may go while it is read: then the next one is tried."""
        if step is not None or self.group.size > 1:
            return once()
        try:
            return once()
        except NotCommittedError as err:
            if not self.checkpoints():
                raise
            logger.warning("%s; trying the newest one", err)
            return once()

    def _flatten(self, state: Mapping[Any, Any], per_rank: Mapping[Any, Any] | None) -> Flat:
        group, pickle = self.group, self.options.pickle
        group.check()
        return flatten(state, pickle=pickle, per_rank=per_rank, rank=group.rank, world_size=group.size)

    def _tree(self, flat: Flat) -> bytes | None:
        """The tree for this rank's index: rank 0's has the whole one, the others' what is their own."""
        if self.group.rank:
            return None if flat.own is None else values.pack(flat.own)
        return values.pack(flat.tree if flat.own is None else {**flat.tree, **flat.own})

    def settle_threads(self) -> None:
        """See `exits.Open`."""
        if self.options.uploader == "thread":
            self._flights.wait(None)

    def abandon(self) -> None:
        """See `exits.Open`."""
        self._flights.abandon()

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ForkError(
                "this Checkpointer was made before os.fork(); its uploader belongs to the parent process: "
                "make a new Checkpointer in the child"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise UsageError("this Checkpointer is closed: make a new one")

    def _check_step(self, step: int, overwrite: bool) -> None:
        known = self._flights.step
        newest = max([*self._flights.steps, -1 if known is None else known])
        if step <= newest and not overwrite:
            raise StepOrderError(
                f"step {step} does not come after step {newest}, which is already saved here; pass overwrite=True to save it "
                "all the same (the older checkpoint is kept)",
                step=step,
                newest=newest,
            )

    def _acquire(self, count: int, stats: SaveStats) -> list[int]:
        arena, allowed = self._arena, self.options.arena_bytes
        wanted = count
        if allowed is not None and (arena.used + count) * arena.slab_bytes <= allowed:
            wanted = arena.used + count
        arena.reserve(wanted)
        arena.wait_resident()
        began_s = time.perf_counter()
        slabs = arena.acquire(count, 0)
        if slabs is None:
            steps = ", ".join(map(str, self._flights.steps))
            if self.options.on_busy == "raise":
                raise BusyError(f"the save of step {steps} still holds the snapshot memory", steps=steps)
            slabs = arena.acquire(count, None)
            assert slabs is not None
            stats.wait_s = time.perf_counter() - began_s
            if stats.wait_s >= _TOLD_WAIT_S:
                logger.warning("save waited %.2f s for the save of step %s to end", stats.wait_s, steps)
        return slabs

    def _choose(self, step: int | str | None) -> Commit | None:
        """The checkpoint to restore, the same on all ranks; None when there is none and no step was named."""
        self._check_usable()
        self.group.together(self._flights.meet_predecessor)  # every rank's, before rank 0 lists

        def find() -> Commit | None:
            if self.group.rank:
                return None
            log = self._read_log()
            return None if step is None and not log.checkpoints and not log.damaged else log.find(step)

        return self.group.broadcast(self.group.together(find))

    def _read_log(self) -> Log:
        self._check_usable()
        self._flights.meet_predecessor()
        self._log = read_log(self._store, self._log)
        return self._log


def _content(flat: Flat, tree: bytes | None, meta: bytes) -> Message:
    """What the agent has to know of a snapshot beside its bytes."""
    rows = []
    for leaf in flat.leaves:
        shape = list(leaf.shape)
        whole = shape if leaf.global_shape is None else list(leaf.global_shape)
        offset = [0] * len(shape) if leaf.offset is None else list(leaf.offset)
        rows.append([values.pack(leaf.path), leaf.dtype, whole, offset, shape, leaf.nbytes])
    return {
        "leaves": rows,
        "itemsizes": [leaf.itemsize for leaf in flat.leaves],
        "tree": tree,
        "meta": meta,
        "replicated": wire.pack([list(row) for row in flat.replicated]),
        "described": TensorTable.of(flat.described).data,
        "global_bytes": flat.global_bytes,
        "tensors": flat.tensors,
        "submesh": flat.submesh,
    }
