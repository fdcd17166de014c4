"""The size of parts: large for bytes that are sent from where they lie, small for compressed copies."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.memory_store import MemoryBucket, MemoryUploads

from objckpt import SaveOptions, StoreOptions, limits
from objckpt.format import keys
from objckpt.save.commit import LeafMeta
from objckpt.save.journey import Journey, Snapshot


@pytest.mark.parametrize(("compression", "sizes"), [("none", [64, 64, 64, 64, 4]), ("zstd", [16] * 16 + [4])])
def test_part_sizes(compression: str, sizes: list[int]) -> None:
    block, nbytes = memoryview(os.urandom(limits.MiB)), 260 * limits.MiB
    snapshot = Snapshot(
        [LeafMeta(("w",), "uint8", (nbytes,), (0,), (nbytes,))],
        [nbytes],
        [1],
        lambda start, nbytes: [block] * (nbytes // len(block)),
    )
    sent: dict[int, int] = {}

    class Uploads(MemoryUploads):
        async def part(self, key, upload_id, number, pieces, crc):  # type: ignore[no-untyped-def]
            sent[number] = sum(map(len, pieces)) // limits.MiB
            return await super().part(key, upload_id, number, pieces, crc)

    async def main() -> None:
        journey = Journey(StoreOptions(connections=1), SaveOptions(compression=compression))
        attempt = keys.attempt(1, "0" * 26, 1)
        try:
            await journey.upload(
                Uploads(MemoryBucket()),
                snapshot,
                step=1,
                attempt=attempt,
                rank=0,
                world_size=1,
                tree=b"",
                replicated=[],
            )
        finally:
            journey.close()

    asyncio.run(main())
    assert [sent[number] for number in sorted(sent)] == sizes
