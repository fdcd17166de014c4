"""The whole engine over a `MemoryBucket`: every place that opens a store gets one in memory. Thread mode only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from support.memory_store import MemoryBucket, MemoryStore, MemoryUploads

import objckpt.agent.server
import objckpt.checkpointer
import objckpt.flights


@contextmanager
def memory_engine(bucket: MemoryBucket) -> Iterator[None]:
    """`with memory_engine(bucket): Checkpointer(url, options=SaveOptions(uploader="thread"))`."""

    def store(url: str, options: object = None) -> MemoryStore:
        return MemoryStore(bucket, url)

    def uploads(url: str, options: object = None) -> MemoryUploads:
        return MemoryUploads(bucket, url)

    with ExitStack() as patches:
        for module in (objckpt.checkpointer, objckpt.flights, objckpt.agent.server):
            patches.enter_context(mock.patch.object(module, "open_store", store))
        patches.enter_context(mock.patch.object(objckpt.agent.server, "open_uploads", uploads))
        yield
