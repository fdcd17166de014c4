"""`objckpt verify`: reads whole checkpoints and compares them with what was recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objckpt.cli import output
from objckpt.cli.options import Json, Step, Url, takes_store
from objckpt.config import StoreOptions
from objckpt.errors import FormatError, IntegrityError, NotCommittedError, UsageError

if TYPE_CHECKING:
    from objckpt.events import Progress
    from objckpt.format.index import Index
    from objckpt.format.records import Commit
    from objckpt.format.tables import ShardEntry
    from objckpt.log import Log
    from objckpt.restore import Checkpoint
    from objckpt.store import Store

All = Annotated[bool, typer.Option("--all", help="Every committed checkpoint; bytes that several share are read once.")]


@takes_store
def command(
    url: Url,
    step: Step = None,
    all: All = False,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Download a checkpoint and check every byte.

    Checksums and lengths of all chunks, and the digest of each tensor, are compared with those recorded. Prints a line
    for each problem; the exit code is then 5. With --all a damaged checkpoint, or a log record that cannot be read,
    does not stop the rest.
    """
    from objckpt.log import read_log
    from objckpt.store import open_store

    if all and step is not None:
        raise UsageError("--all and --step exclude each other")
    store = open_store(url, options)
    log = read_log(store)
    return _verify_all(store, log, json) if all else _verify_one(store, log, log.find(step), json)


def _verify_one(store: Store, log: Log, commit: Commit, json: bool) -> int:
    verifier = _Verifier(store, ())
    with output.progress("verify") as progress:
        problems = verifier.check(commit, progress)
    if problems and not verifier.is_live(commit, log):
        raise NotCommittedError(f"step {commit.step}@{commit.seq} was removed from {store.url} while it was being read")
    if json:
        output.document({"url": store.url, "step": commit.step} | _result(commit, problems))
    else:
        _print(commit, f"step {commit.step}", problems)
    return IntegrityError.exit_code if problems else 0


def _verify_all(store: Store, log: Log, json: bool) -> int:
    if not log.damaged:
        log.newest()  # nothing to verify is an error: a job that watches over a store must notice
    verifier, rows, damaged, done_bytes = _Verifier(store, log.checkpoints), [], 0, 0
    total_bytes = sum(commit.stored_bytes for commit in log.checkpoints)
    with output.progress("verify") as progress:
        for commit in log.checkpoints:
            start = done_bytes

            def listener(stage: str, done: int, total: int, start: int = start) -> None:
                progress(stage, start + done, total_bytes)

            problems = verifier.check(commit, listener)
            done_bytes += commit.stored_bytes
            progress("verify", done_bytes, total_bytes)
            if problems and not verifier.is_live(commit, log):
                output.message(f"step {commit.step}@{commit.seq} was removed meanwhile")
                continue
            damaged += bool(problems)
            rows.append({"step": commit.step, "seq": commit.seq} | _result(commit, problems))
            if not json:
                _print(commit, f"step {commit.step}@{commit.seq}", problems)
    records = [{"seq": seq, "message": str(why)} for seq, why in log.damaged]
    if json:
        ok = not damaged and not records
        output.document({"url": store.url, "ok": ok, "checkpoints": rows, "damaged_records": records})
    else:
        for record in records:
            output.line(output.printable(f"log record {record['seq']} cannot be read: {record['message']}"))
        told = f"{len(rows)} checkpoints: {len(rows) - damaged} as recorded, {damaged} damaged"
        output.line(told + (f"; {len(records)} log records cannot be read" if records else ""))
    return IntegrityError.exit_code if damaged or records else 0


class _Verifier:
    """Verifies checkpoints one after the other; shards in packs that several of them refer to are read only once."""

    def __init__(self, store: Store, commits: Iterable[Commit]) -> None:
        self.store = store
        self.shared_packs = {pack for commit in commits for pack in commit.foreign_packs}
        self.good: set[tuple[Any, ...]] = set()  # what is known of shards in them

    def check(self, commit: Commit, progress: Progress) -> list[dict[str, Any]]:
        """The problems of a checkpoint, as data for JSON. Blocks."""
        from objckpt.restore import open_checkpoint, verify

        try:
            checkpoint = open_checkpoint(self.store, commit)
            problems = verify(self.store, self._without_known(checkpoint), progress=progress)
        except (FormatError, IntegrityError) as err:  # of an index: nothing behind it can be read
            key = err.context.get("key")
            return [{"kind": err.kind, "key": key, "fqn": None, "rank": None, "message": str(err)}]
        bad = {(p.rank, p.fqn) for p in problems}
        for index in checkpoint.indexes:
            shared = [s for s in index.shards if (index.rank, s.fqn) not in bad] if self.shared_packs else []
            self.good |= {place for shard in shared if (place := self._place(index, shard)) is not None}
        return [{"kind": p.kind, "key": p.key, "fqn": p.fqn, "rank": p.rank, "message": p.message} for p in problems]

    def is_live(self, commit: Commit, log: Log) -> bool:
        """Whether it still is: one that was retired since `log` was read may have lost its bytes by now."""
        from objckpt.log import read_log

        return any(c.seq == commit.seq for c in read_log(self.store, log).checkpoints)

    def _without_known(self, checkpoint: Checkpoint) -> Checkpoint:
        if not self.good:
            return checkpoint
        indexes = [
            replace(index, shards=[s for s in index.shards if self._place(index, s) not in self.good])
            for index in checkpoint.indexes
        ]
        return replace(checkpoint, indexes=indexes)

    def _place(self, index: Index, shard: ShardEntry) -> tuple[Any, ...] | None:
        """All that the verdict on a shard depends on; None when no other checkpoint refers to its packs."""
        chunks, rows = index.chunks, slice(shard.first_chunk, shard.first_chunk + shard.chunk_count)
        packs = [index.packs[n][0] for n in chunks.pack[rows]]
        if not packs or not self.shared_packs.issuperset(packs):
            return None
        columns = (chunks.offset, chunks.stored, chunks.raw, chunks.crc)
        names = [index.codecs[n] for n in chunks.codec[rows]]
        return (*packs, *names, *(c[rows].tobytes() for c in columns), shard.digest, shard.itemsize)


def _result(commit: Commit, problems: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = {"stored_bytes": commit.stored_bytes, "tensors": commit.tensors}
    return {"ok": not problems} | sizes | {"problems": problems}


def _print(commit: Commit, name: str, problems: list[dict[str, Any]]) -> None:
    for problem in problems:
        output.line(output.printable(f"{name}: {problem['kind']}: {problem['message']}"))
    if not problems:
        output.line(f"{name}: {commit.tensors} tensors, {output.human(commit.stored_bytes)}: every byte is as recorded")
