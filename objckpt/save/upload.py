"""Parts to packs: bounded, concurrent multipart uploads; aborted when anything fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

from objckpt.errors import ObjckptError
from objckpt.format import checksums, keys
from objckpt.save.encode import Part
from objckpt.store import PartDone, Uploads

logger = logging.getLogger("objckpt")


async def upload_packs(
    uploads: Uploads,
    parts: Iterator[Part],
    *,
    attempt: str,
    rank: int,
    connections: int,
    reader: Executor,
    progress: Callable[[int], None],
) -> None:
    """Send every part, `connections` at a time. Draws a part only when a connection is free: that bounds the memory.

    `parts` is advanced in `reader` (one thread), so that checksums and codecs never run on the event loop. Raises the
    first failure, as itself, after the siblings are cancelled and the multipart uploads aborted. `progress(nbytes)` is
    called after each part.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(connections)
    packs: dict[int, _Pack] = {}

    async def send(pack: _Pack, part: Part) -> None:
        try:
            await pack.send(part)
        finally:
            slots.release()
        progress(part.size)

    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                part = await loop.run_in_executor(reader, next, parts, None)
                if part is None:
                    slots.release()
                    break
                pack = packs.get(part.pack)
                if pack is None:
                    pack = packs[part.pack] = _Pack(uploads, keys.pack(attempt, rank, part.pack))
                    await pack.begin(part)
                group.create_task(send(pack, part))
        for pack in packs.values():
            await pack.complete()
    except BaseException as err:
        # The abort must outlive the cancellation that may be the cause.
        await asyncio.shield(asyncio.gather(*(pack.abort() for pack in packs.values())))
        raise first_error(err) from err


class _Pack:
    """One data object under way: a plain PUT when it has a single part, else a multipart upload."""

    def __init__(self, uploads: Uploads, key: str) -> None:
        self.uploads, self.key = uploads, key
        self.upload_id: str | None = None
        self.done: list[PartDone] = []
        self.sizes: dict[int, tuple[int, int]] = {}  # part number -> CRC and size

    async def begin(self, first: Part) -> None:
        if not first.last:
            self.upload_id = await self.uploads.create(self.key)

    async def send(self, part: Part) -> None:
        if self.upload_id is None:
            await self.uploads.put(self.key, part.pieces, part.crc)
            return
        self.done.append(await self.uploads.part(self.key, self.upload_id, part.number, part.pieces, part.crc))
        self.sizes[part.number] = (part.crc, part.size)

    async def complete(self) -> None:
        if self.upload_id is None:
            return
        crc = size = 0
        for number in sorted(self.sizes):
            part_crc, part_size = self.sizes[number]
            crc, size = checksums.crc64_combine(crc, part_crc, part_size), size + part_size
        await self.uploads.complete(self.key, self.upload_id, sorted(self.done, key=lambda p: p.number), size, crc)
        self.upload_id = None

    async def abort(self) -> None:
        if self.upload_id is None:
            return
        try:
            await self.uploads.abort(self.key, self.upload_id)
        except ObjckptError as err:
            logger.warning("multipart upload %s of %s could not be aborted: %s", self.upload_id, self.key, err)


def first_error(err: BaseException) -> BaseException:
    """The first real failure inside an exception group; cancellation only when there is nothing else."""
    if not isinstance(err, BaseExceptionGroup):
        return err
    leaves: list[BaseException] = []
    with contextlib.suppress(IndexError):
        stack = [err]
        while True:
            for inner in stack.pop().exceptions:
                if isinstance(inner, BaseExceptionGroup):
                    stack.append(inner)
                else:
                    leaves.append(inner)
    return next((e for e in leaves if not isinstance(e, asyncio.CancelledError)), leaves[0])
