"""`objckpt show`: one checkpoint's record, tensors and values. Reads indexes only, no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objckpt.cli import output
from objckpt.cli.ls import describe, utc
from objckpt.cli.options import (
    Addressing,
    CaBundle,
    Debug,
    EndpointUrl,
    Json,
    Profile,
    Region,
    Step,
    Url,
    store_options,
)
from objckpt.cli.plain import plain, short
from objckpt.format.records import Commit

if TYPE_CHECKING:
    from objckpt.restore import Checkpoint

Tensors = Annotated[bool, typer.Option("--tensors/--no-tensors", help="The table of tensors.")]
Values = Annotated[bool, typer.Option("--values/--no-values", help="The values that are not tensors.")]


def command(
    url: Url,
    step: Step = None,
    tensors: Tensors = True,
    values: Values = True,
    json: Json = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    addressing: Addressing = "path",
    ca_bundle: CaBundle = None,
    debug: Debug = False,
) -> int:
    """Show what is in a checkpoint.

    Prints its commit record, its tensors and its other values; downloads no tensor. Names are those that
    `restore --only` understands. A tensor that shares the memory of another one is stored once.
    """
    from objckpt.log import read_log
    from objckpt.restore import open_checkpoint
    from objckpt.store import open_store

    store = open_store(url, store_options(endpoint_url, region, profile, addressing, ca_bundle))
    commit = read_log(store).find(step)
    checkpoint = open_checkpoint(store, commit)
    rows = list(_tensors(checkpoint)) if tensors else []
    others = list(_values(checkpoint.tree)) if values else []
    if json:
        document = describe(commit) | {"url": store.url, "meta": plain(commit.meta)}
        if tensors:
            document["tensor_list"] = rows
        if values:
            document["value_list"] = [{"fqn": fqn, "value": plain(value)} for fqn, value in others]
        output.document(document)
        return 0
    for name, text in _record(commit, store.url):
        output.line(f"{name + ':':<11} {output.printable(text)}")
    if tensors:
        _print_tensors(rows)
    if others:
        output.line()
        for line in output.table(("VALUE", "IS"), [(fqn, short(value)) for fqn, value in others]):
            output.line(line)
    return 0


def _record(commit: Commit, url: str) -> Iterator[tuple[str, str]]:
    yield "url", url
    yield "step", str(commit.step)
    yield "committed", f"{utc(commit.time_s) or '?'} UTC by {commit.host}"
    yield "log", f"seq {commit.seq}, epoch {commit.epoch}, parent {'none' if commit.parent is None else commit.parent}"
    yield "attempt", commit.attempt
    yield "ranks", str(commit.world_size)
    yield (
        "size",
        f"{output.human(commit.raw_bytes)} in {commit.tensors} tensors, stored in {output.human(commit.stored_bytes)}",
    )
    if commit.meta is not None:
        yield "metadata", short(commit.meta)


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
