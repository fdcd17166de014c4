"""`objckpt show`: one checkpoint's record, tensors and values. Reads indexes only, no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objckpt.cli import output
from objckpt.cli.ls import Standing, describe, utc
from objckpt.cli.options import Json, Step, Url, takes_store
from objckpt.cli.plain import plain, short
from objckpt.config import StoreOptions
from objckpt.errors import IntegrityError, NotCommittedError
from objckpt.format.records import Commit, Retire

if TYPE_CHECKING:
    from objckpt.log import Log
    from objckpt.restore import Checkpoint

Tensors = Annotated[bool, typer.Option("--tensors/--no-tensors", help="The table of tensors.")]
Values = Annotated[bool, typer.Option("--values/--no-values", help="The values that are not tensors.")]


@takes_store
def command(
    url: Url,
    step: Step = None,
    tensors: Tensors = True,
    values: Values = True,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Show what is in a checkpoint.

    Prints its commit record, its tensors and its other values; downloads no tensor. Names are those that
    `restore --only` understands. A tensor that shares the memory of another one is stored once. One that was removed
    is shown when it is named by STEP@SEQ, as `ls --all` lists it.
    """
    from objckpt.log import read_log
    from objckpt.restore import open_checkpoint
    from objckpt.restore.removed import unless_removed
    from objckpt.store import open_store

    store = open_store(url, options)
    log = read_log(store)
    standing = Standing(log)
    commit = _find(log, step)
    live = commit.seq in standing.live
    removals = [r for r in log.records if isinstance(r, Retire) and commit.seq in r.seqs]
    try:
        with unless_removed(store, commit) if live else nullcontext():
            checkpoint: Checkpoint | None = open_checkpoint(store, commit) if live or tensors or values else None
    except IntegrityError:
        if live:
            raise
        checkpoint = None
        output.message("its data is deleted: tensors and values are not known any more")
    rows = list(_tensors(checkpoint)) if tensors and checkpoint is not None else []
    others = list(_values(checkpoint.tree)) if values and checkpoint is not None else []
    if json:
        document = describe(commit) | standing.describe(commit) | {"url": store.url, "meta": plain(commit.meta)}
        document["capabilities"] = plain(_capabilities(commit, log))
        document["removed"] = [{"time": utc(r.time_s), "host": r.host, "reason": r.reason} for r in removals]
        if tensors:
            document["tensor_list"] = rows
        if values:
            document["value_list"] = [{"fqn": fqn, "value": plain(value)} for fqn, value in others]
        output.document(document)
        return 0
    for name, text in _record(commit, log, standing):
        output.line(f"{name + ':':<11} {output.printable(text)}")
    for record in removals:
        output.line(output.printable(f"removed:    {utc(record.time_s) or '?'} UTC by {record.host}: {record.reason}"))
    if tensors and checkpoint is not None:
        _print_tensors(rows)
    if others:
        output.line()
        for line in output.table(("VALUE", "IS"), [(fqn, short(value)) for fqn, value in others]):
            output.line(line)
    return 0


def _find(log: Log, which: str | None) -> Commit:
    """Exactly named, also one that is not live any more."""
    try:
        return log.find(which)
    except NotCommittedError:
        for commit in (*log.commits, *log.fenced):
            if which == f"{commit.step}@{commit.seq}":
                return commit
        raise


def _capabilities(commit: Commit, log: Log) -> dict[str, Any]:
    """What the store could do when the session of this checkpoint began."""
    found = [o for o in log.opens if o.session == commit.session and o.seq < commit.seq]
    return found[-1].capabilities if found else {}


def _record(commit: Commit, log: Log, standing: Standing) -> Iterator[tuple[str, str]]:
    yield "url", log.url
    yield "step", " ".join(filter(None, [str(commit.step), standing.notes(commit)]))
    yield "committed", f"{utc(commit.time_s) or '?'} UTC by {commit.host}"
    parents = [f"step {c.step}@{c.seq}" for c in log.commits if c.seq == commit.parent]
    parent = parents[0] if parents else "none" if commit.parent is None else f"seq {commit.parent}"
    yield "log", f"seq {commit.seq}, epoch {commit.epoch}, parent {parent}"
    yield "attempt", commit.attempt
    yield "ranks", str(commit.world_size)
    yield (
        "size",
        f"{output.human(commit.raw_bytes)} in {commit.tensors} tensors, stored in {output.human(commit.stored_bytes)}",
    )
    if commit.meta is not None:
        yield "metadata", short(commit.meta)
    found = {n: v for n, v in _capabilities(commit, log).items() if n != "url" and not n.endswith("_evidence")}
    if found:
        yield "store", ", ".join(f"{name} {short(value)}" for name, value in sorted(found.items()))


def _tensors(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    from objckpt.format.dtypes import ITEMSIZE
    from objckpt.format.fqn import to_fqn
    from objckpt.format.values import TensorLeaf
    from objckpt.restore.match import leaves

    for path, leaf in leaves(checkpoint.tree):
        if type(leaf) is TensorLeaf:
            fqn = to_fqn(path)
            dtype, shape = checkpoint.describe(leaf)
            yield {
                "fqn": fqn,
                "dtype": dtype,
                "shape": list(shape),
                "bytes": math.prod(shape) * ITEMSIZE[dtype],
                "shares": leaf.fqn if leaf.fqn != fqn else None,
            }


def _print_tensors(rows: list[dict[str, Any]]) -> None:
    output.line()
    cells = [
        (
            row["fqn"],
            row["dtype"],
            "×".join(map(str, row["shape"])) or "scalar",
            output.human(row["bytes"]),
            f"shares {row['shares']}" if row["shares"] else "",
        )
        for row in rows
    ]
    for line in output.table(("TENSOR", "DTYPE", "SHAPE", "SIZE", ""), cells, ("SIZE",)):
        output.line(line)


def _values(tree: Any) -> Iterator[tuple[str, Any]]:
    from objckpt.format.fqn import to_fqn
    from objckpt.format.values import TensorLeaf
    from objckpt.restore.match import leaves

    for path, leaf in leaves(tree):
        if path and type(leaf) is not TensorLeaf:
            yield to_fqn(path), leaf
