"""The agent's side: take saves one after the other, upload, commit, report; finish what is staged when the trainer dies.

The same code runs in a process and in a thread of the trainer; only the process lingers and can be met by a successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from typing import Any

from objckpt.agent.protocol import Channel, Message
from objckpt.agent.retention import Retention
from objckpt.config import SaveOptions, StoreOptions
from objckpt.errors import ConnectError, FormatError, ObjckptError, SaveError
from objckpt.format import keys, values
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import TensorTable
from objckpt.restore import open_checkpoint
from objckpt.save import gather
from objckpt.save.arena import ArenaReader, pieces
from objckpt.save.commit import LeafMeta, LogWriter, Sizes
from objckpt.save.journey import Journey, Snapshot, upload_index
from objckpt.store import Uploads, open_store, open_uploads

logger = logging.getLogger("objckpt")
_PROGRESS_EVERY_S = 0.2


def serve(sock: socket.socket, door: socket.socket | None = None, *, own_process: bool) -> None:
    """Serve one trainer until it says bye, or is gone and what it staged is settled (at most `linger_s` later, and the end of a
    commit that has begun).

    door: where its successors are met, see `client.open_door`.
    """
    channel = Channel(sock)
    if own_process:
        logger.addHandler(_ToTrainer(channel))
    try:
        hello = channel.receive()
        if hello is not None:
            asyncio.run(_Agent(channel, hello, door, own_process).run())
    finally:
        # Shut down first: the receiving thread blocks on this socket, and a mere close would not reach the trainer.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


class _ToTrainer(logging.Handler):
    """Hands what is logged here to the trainer, which has the user's logging; once that one is gone, to stderr."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self.channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().encode(errors="backslashreplace").decode()
            try:
                self.channel.send({"type": "warning", "text": text})
            except OSError:
                print(f"objckpt: {text}", file=sys.stderr)
        except Exception:
            self.handleError(record)  # as every handler: a message must not cost the save that it is about


class _Agent:
    def __init__(self, channel: Channel, hello: Message, door: socket.socket | None, own_process: bool) -> None:
        self.channel, self.door, self.own_process = channel, door, own_process
        self.url: str = hello["url"]
        self.session: str = hello["session"]
        self.rank: int = hello["rank"]
        self.world_size: int = hello["world_size"]
        self.store_options = StoreOptions(**hello["store"])
        self.options = SaveOptions(**hello["options"])
        self.trainer_pid: int = hello["pid"]
        self.parent: int | None = None
        self.resumed: int | None = None  # the checkpoint that this session started from; retention keeps it
        self.told_foreign = False
        self.stage = ""  # of the save at work: open, upload, commit
        self.arena: ArenaReader | None = None
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self.trainer_gone = asyncio.Event()
        self.journey = Journey(self.store_options, self.options)

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive, name="objckpt-agent-receive", daemon=True).start()
        if self.own_process:
            threading.Thread(target=self._watch_trainer, name="objckpt-agent-watch", daemon=True).start()
        if self.door is not None:
            threading.Thread(
                target=self._meet_successors, args=(self.door,), name="objckpt-agent-meet", daemon=True
            ).start()
        self.store = open_store(self.url, self.store_options)
        self.writer = LogWriter(
            self.store, self.session, self.world_size, self.store_options.retry_deadline_s, warn=self._warn
        )
        self.retention = Retention(
            lambda options: open_store(self.url, options),
            self.store_options,
            self.options,
            self.session,
            warn=self._warn,
        )
        work = asyncio.create_task(self._work())
        gone = asyncio.create_task(self._linger_is_over())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self.store.close()
            self.journey.close()
            if self.arena is not None:
                os.close(self.arena.fd)

    # ---- the trainer ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this agent has ended
            while (message := self.channel.receive()) is not None:
                self.loop.call_soon_threadsafe(self.inbox.put_nowait, message)
        self._trainer_is_gone()

    def _watch_trainer(self) -> None:
        # Forked children of the trainer may hold the socket open after its death: the pidfd tells all the same.
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(self.trainer_pid)
            select.select([fd], [], [])
            os.close(fd)
        # What it sent last may still lie in the socket: let `_receive` read to the end, and tell then.
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RD)

    def _trainer_is_gone(self) -> None:
        def tell() -> None:
            if not self.trainer_gone.is_set():
                self.trainer_gone.set()
                self.inbox.put_nowait(None)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self.loop.call_soon_threadsafe(tell)

    async def _linger_is_over(self) -> None:
        await self.trainer_gone.wait()
        await asyncio.sleep(self.options.linger_s)

    def _meet_successors(self, door: socket.socket) -> None:
        """Whoever connects is told whether our trainer lives, and sees the connection end when we do."""
        with contextlib.suppress(OSError), door:
            guests = []
            while True:
                guest, _ = door.accept()
                guests.append(guest)  # kept open until this process ends
                with contextlib.suppress(OSError):
                    guest.sendall(b"T" if _alive(self.trainer_pid) else b"L")

    def _part_with_successors(self) -> None:
        """All saves are settled: nobody has to wait for what is done after that."""
        with contextlib.suppress(OSError):
            if self.door is not None:
                self.door.shutdown(socket.SHUT_RDWR)

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # a dead trainer needs no report
            self.channel.send(message)

    def _warn(self, text: str) -> None:
        self._tell({"type": "warning", "text": text})

    # ---- the work ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        async with open_uploads(self.url, self.store_options) as uploads:
            self._tell({"type": "ready"})
            while (message := await self.inbox.get()) is not None and message["type"] != "bye":
                if message["type"] == "arena":
                    self.arena = ArenaReader(self.channel.fds.pop(0), message["slab_bytes"])
                elif message["type"] == "save":
                    await self._save(uploads, message)
                elif message["type"] == "give-up":
                    await asyncio.to_thread(self._give_up, message)
            self._part_with_successors()
            await self.retention.finish()

    async def _save(self, uploads: Uploads, message: Message) -> None:
        number, step = message["save"], message["step"]
        attempt = keys.attempt(step, self.session, message["attempt"])
        self.stage = "open"
        try:
            done = await self._upload_and_commit(uploads, message, attempt)
        except Exception as err:
            logger.debug("save of step %s failed", step, exc_info=True)
            self._tell({"type": "failed", "save": number, "error": _save_error(step, self.url, err).to_wire()})
            if self.stage != "commit":
                await asyncio.to_thread(gather.abandon, self.writer, attempt, str(err), self.rank, self.world_size)
            # Nobody but rank 0 commits. After that stage the record may be there, or come yet: a collection decides then.
            if self.rank == 0 and self.stage == "upload" and not isinstance(err, ConnectError):
                self.retention.after_failure(self.writer.log, attempt)
        else:
            self._tell({"type": "committed", "save": number, **done})
            if self.rank == 0:
                self.retention.after_commit(self.writer.log, self.writer.epoch, self.resumed)

    def _give_up(self, message: Message) -> None:
        """The trainer's `save()` raised on this rank; the others are at work on the attempt."""
        try:
            if self.rank == 0:
                self.writer.open()
        except ObjckptError as err:
            self._tell({"type": "warning", "text": f"the other ranks could not be told of a failure: {err}"})
            return
        gather.abandon(self.writer, message["attempt"], message["reason"], self.rank, self.world_size)

    async def _upload_and_commit(self, uploads: Uploads, message: Message, attempt: str) -> Message:
        assert self.arena is not None
        if message["rebase"]:  # kept for the saves after this one, also when this one fails
            self.parent = message["parent"]
        self.resumed = message["resumed"]
        began_s, cpu_s = time.monotonic(), time.process_time()
        if self.rank == 0:
            await asyncio.to_thread(self.writer.open)
            self._tell_what_was_not_restored()
        views, slab_bytes = self.arena.views(message["slabs"]), self.arena.slab_bytes
        snapshot = Snapshot(
            metas=[_leaf_meta(row) for row in message["leaves"]],
            sizes=[row[-1] for row in message["leaves"]],
            itemsizes=message["itemsizes"],
            read=lambda start, nbytes: pieces(views, slab_bytes, start, nbytes),
        )
        self.stage = "upload"
        index = await self.journey.upload(
            uploads,
            snapshot,
            step=message["step"],
            attempt=attempt,
            rank=self.rank,
            world_size=self.world_size,
            tree=message["tree"],
            replicated=message["replicated"],
            described=TensorTable.decode(message["described"], "save").entries,
            progress=self._progress(message["save"], snapshot.nbytes),
        )
        named = await upload_index(uploads, index)
        uploaded_s = time.monotonic()
        commit = await asyncio.to_thread(self._commit, index, named, message)
        self.parent = commit.seq
        return {
            "seq": commit.seq,
            "attempt": attempt,
            "stored_bytes": commit.stored_bytes,
            "upload_s": uploaded_s - began_s,
            "commit_s": time.monotonic() - uploaded_s,
            "agent_cpu_s": time.process_time() - cpu_s,
        }

    def _tell_what_was_not_restored(self) -> None:
        """Once: a run that starts anew under a URL in use, most often because `restore` was forgotten."""
        foreign = [c for c in self.writer.log.checkpoints if c.session != self.session]
        if self.parent is None and foreign and not self.told_foreign:
            newest = foreign[-1]
            text = (
                f"{self.url} has {len(foreign)} checkpoints of other runs, the newest of step {newest.step}, and none of them was "
                "restored before this save: this run begins a new line. Was restore() forgotten? "
                f'restore(step="{newest.step}@{newest.seq}") goes back to the other one.'
            )
            self._tell({"type": "warning", "text": text})
        self.told_foreign = True

    def _commit(self, index: Index, named: tuple[str, int], message: Message) -> Commit:
        """The manifest of a checkpoint whose index this rank has written: appended by rank 0, waited for by the others."""
        deadline_s = self.options.rank_deadline_s
        if self.rank:
            self.stage = "commit"
            return gather.wait_for_outcome(self.writer, index.attempt, deadline_s, rank=self.rank)
        if self.world_size == 1:
            ranks, packs = [named], sum(size for _, size in index.packs)
        else:
            ranks, packs = gather.wait_for_ranks(self.store, index, deadline_s)
            if message["submesh"]:
                self._open_as_a_reader(index, ranks)
        self.stage = "commit"
        sizes = Sizes(raw_bytes=message["global_bytes"], stored_bytes=packs, tensors=message["tensors"])
        meta = values.unpack(message["meta"], "metadata")
        return self.writer.commit(index, ranks, self.parent, meta, sizes)

    def _open_as_a_reader(self, index: Index, ranks: list[tuple[str, int]]) -> None:
        """For tensors on a part of the ranks, of which others may have namesakes: SaveError when they do not make up one tensor.

        Reads every rank's index; only states with such tensors pay for it.
        """
        planned = Commit(
            seq=0, write_id=b"", epoch=0, session=self.session, time_s=0.0, host="", step=index.step, attempt=index.attempt,
            parent=None, world_size=self.world_size, raw_bytes=0, stored_bytes=0, tensors=0, ranks=ranks,
            signature=index.signature,
        )  # fmt: skip
        try:
            open_checkpoint(self.store, planned, have=[index])
        except FormatError as err:
            if "fqn" not in err.context:  # an index that cannot be read at all
                raise
            raise SaveError(
                f"{err.message}; tensors of one name on different meshes must be the same, and cut alike: give the stages of "
                "a pipeline names of their own"
            ) from err

    def _progress(self, save: int, total: int) -> Any:
        sent, told_s = 0, 0.0

        def progress(nbytes: int) -> None:
            nonlocal sent, told_s
            sent += nbytes
            now_s = time.monotonic()
            if now_s - told_s > _PROGRESS_EVERY_S:
                told_s = now_s
                self._tell({"type": "progress", "save": save, "sent_bytes": sent, "total_bytes": total})

        return progress


def _leaf_meta(row: list[Any]) -> LeafMeta:
    path, dtype, global_shape, offset, shape, _ = row
    return LeafMeta(values.unpack(path, "path"), dtype, tuple(global_shape), tuple(offset), tuple(shape))


def _save_error(step: int, url: str, err: Exception) -> ObjckptError:
    """The failure as the trainer gets it: a SaveError naming the step; fencing keeps its own class."""
    cause = err if isinstance(err, ObjckptError) else ObjckptError(f"{type(err).__name__}: {err}")
    if cause.exit_code == 6:
        return type(cause)(cause.message, **(cause.context | {"step": step}))
    return SaveError(
        f"step {step} was not committed to {url}: {cause.message}",
        **(cause.context | {"step": step, "cause": cause.kind}),
    )


def _alive(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    dead = bool(select.select([fd], [], [], 0)[0])
    os.close(fd)
    return not dead
