"""Reading a checkpoint that somebody removes meanwhile: a clear error in place of what is missing then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from objckpt.errors import IntegrityError, NotCommittedError, NotFoundError, ObjckptError
from objckpt.format.records import Commit
from objckpt.log import read_log
from objckpt.store import Store


@contextmanager
def unless_removed(store: Store, commit: Commit) -> Iterator[None]:
    """Around reading a checkpoint: NotCommittedError when its objects are missing because it was removed meanwhile."""
    try:
        yield
    except (IntegrityError, NotFoundError) as err:
        try:
            gone = commit.seq in read_log(store).retired
        except ObjckptError:
            gone = False
        if not gone:
            raise
        raise NotCommittedError(
            f"step {commit.step}@{commit.seq} was removed from {store.url} while it was being read, by retention or "
            "`objckpt rm`; take another one",
            url=store.url,
            step=commit.step,
        ) from err
