"""Small writers of the log, and commits of theirs without any data.

by = writer(store); first = commit(by, 1); commit(by, 2, first.seq)
"""

from __future__ import annotations

from objckpt.format import keys
from objckpt.format.index import Index
from objckpt.format.records import Commit
from objckpt.format.tables import ChunkTable
from objckpt.save.commit import LogWriter, Sizes
from objckpt.store import Store


def session(n: int = 0) -> str:
    return f"{n:026d}"


def index(step: int, who: int = 0) -> Index:
    """Of the attempt that `commit` commits."""
    attempt = keys.attempt(step, session(who), step)
    return Index(step, attempt, 0, 1, [], [], ChunkTable.from_rows([]), ["raw"], b"\x80")


def writer(store: Store, who: int = 0, *, conditional: bool = True) -> LogWriter:
    """It has its epoch. `conditional`: what is recorded of the store, which is not probed."""
    made = LogWriter(store, session(who), 1, 5.0, warn=lambda text: None)
    made.open({"conditional_put": conditional})
    return made


def commit(by: LogWriter, step: int, parent: int | None = None) -> Commit:
    return by.commit(index(step, int(by.session)), [("0" * 32, 10)], parent, None, Sizes(64, 64, 1))
