"""A training session as far as log and store see it: small packs and indexes, opens and commits; no agent, no torch.

run = Run(store); first = run.save(1); run.save(2, first.seq); lost = run.upload(3)
"""

from __future__ import annotations

from objckpt.format import keys
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import ChunkTable
from objckpt.save.commit import LogWriter, Sizes, index_object
from objckpt.store import Store


class Run:
    """Session number `n`; it takes its epoch at once. `conditional`: what is recorded of the store, which is not probed."""

    def __init__(self, store: Store, n: int = 0, *, conditional: bool = True) -> None:
        self.store = store
        self.writer = LogWriter(store, f"{n:026d}", 1, 5.0, warn=lambda text: None)
        self.writer.open({"conditional_put": conditional})
        self.saves = 0

    def upload(self, step: int) -> Index:
        """All of a save but the commit."""
        self.saves += 1
        attempt = keys.attempt(step, self.writer.session, self.saves)
        pack = keys.pack(attempt, 0, 0)
        self.store.put(pack, b"data of " + attempt.encode())
        index = Index(step, attempt, 0, 1, [(pack, 8)], [], ChunkTable.from_rows([]), ["raw"], b"\x80")
        self.store.put(*index_object(index))
        return index

    def commit(self, index: Index, parent: int | None = None) -> Commit:
        """The rest of it."""
        key, data = index_object(index)
        named = keys.parse_index(key)
        assert named is not None
        sizes = Sizes(raw_bytes=8, stored_bytes=8, tensors=0)
        return self.writer.commit(index, [(named.digest, len(data))], parent, None, sizes)

    def save(self, step: int, parent: int | None = None) -> Commit:
        """A whole checkpoint."""
        return self.commit(self.upload(step), parent)
