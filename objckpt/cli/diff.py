"""`objckpt diff`: which leaves differ between two checkpoints. Reads indexes only, no tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objckpt.cli import output
from objckpt.cli.ls import describe
from objckpt.cli.options import Json, Url, takes_store
from objckpt.cli.plain import plain, short
from objckpt.config import StoreOptions

if TYPE_CHECKING:
    from objckpt.format.records import Commit
    from objckpt.format.values import TensorLeaf
    from objckpt.restore import Checkpoint
    from objckpt.restore.open import StoredTensor

_DIFFERENT = 1
_SIGNS = {"added": "+", "removed": "-", "changed": "~", "not_compared": "?"}

First = Annotated[str, typer.Argument(metavar="A", help="The one: STEP, STEP@SEQ or a tag.", show_default=False)]
Second = Annotated[
    str | None,
    typer.Argument(metavar="B", help="The other, likewise; the newest by default.", show_default=False),
]
With = Annotated[
    str | None, typer.Option("--with", metavar="URL", help="Where B is, when it is not under the first URL.")
]


@takes_store
def command(
    url: Url,
    first: First,
    second: Second = None,
    other: With = None,
    json: Json = False,
    *,
    options: StoreOptions,
) -> int:
    """Tell which leaves were added, removed or changed from checkpoint A to B.

    Compares dtypes and shapes, the bytes of tensors by their recorded digests (64 bits), and other values by value;
    downloads no tensor. Digests belong to shards: tensors that were cut differently are compared only where each
    shard is a run of whole rows; else the line says "layout differs, bytes not compared".

    The exit code is 0 when the two are the same, and 1 when they differ or something could not be compared.
    """
    from objckpt.log import read_log
    from objckpt.restore import open_checkpoint
    from objckpt.restore.removed import unless_removed
    from objckpt.store import open_store

    store = open_store(url, options)
    log = read_log(store)
    store_b = store if other is None else open_store(other, options)
    log_b = log if other is None else read_log(store_b)
    one, other_one = log.find(first), log_b.find(second)
    with unless_removed(store, one):
        before = open_checkpoint(store, one)
    with unless_removed(store_b, other_one):
        after = open_checkpoint(store_b, other_one)
    changes = list(compare(before, after))
    if json:
        found = {change: [row for row in changes if row["change"] == change] for change in _SIGNS}
        ends = {"a": describe(before.commit), "b": describe(after.commit)}
        output.document({"url": store.url, "with": store_b.url, "same": not changes} | ends | found)
    else:
        _print(before.commit, after.commit, changes)
    return _DIFFERENT if changes else 0


def compare(before: Checkpoint, after: Checkpoint) -> Iterator[dict[str, Any]]:
    """One object for each leaf that differs, or may, in the order of the leaves: of `before`, then those only in `after`.

    Its fields: "fqn"; "change", one of added, removed, changed, not_compared; "what" is different, as a list; "a" and
    "b", what it is there. Pure.
    """
    old, new = (dict(_nodes(c.tree)) for c in (before, after))
    for fqn in old | new:
        a, b = _Node(before, old[fqn]) if fqn in old else None, _Node(after, new[fqn]) if fqn in new else None
        if a is None or b is None:
            only = a or b
            if only is not None and only.is_leaf:
                yield _row(fqn, "removed" if b is None else "added", [], a, b)
            continue
        what = _differences(a, b)
        if what:
            yield _row(fqn, "not_compared" if what[0].endswith("not compared") else "changed", what, a, b)


class _Node:
    """A container, value or tensor of one of the two."""

    def __init__(self, checkpoint: Checkpoint, value: Any) -> None:
        from objckpt.format.values import TensorLeaf

        self.checkpoint, self.value = checkpoint, value
        self.tensor: TensorLeaf | None = value if type(value) is TensorLeaf else None
        self.is_container = isinstance(value, dict) or type(value) in (list, tuple)
        self.is_leaf = not (self.is_container and value)

    def plain(self) -> Any:
        """As data for JSON."""
        if self.tensor is None:
            return {"container": type(self.value).__name__} if self.is_container else {"value": plain(self.value)}
        dtype, shape = self.checkpoint.describe(self.tensor)
        return {"array" if self.tensor.numpy else "tensor": {"dtype": dtype, "shape": list(shape)}}


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """FQN and value of every leaf and every container below the top."""
    from objckpt.format.fqn import to_fqn

    if path:
        yield to_fqn(path), tree
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _nodes(child, (*path, key))
    elif type(tree) in (list, tuple):
        for i, child in enumerate(tree):
            yield from _nodes(child, (*path, i))


def _differences(a: _Node, b: _Node) -> list[str]:
    if (a.tensor is None) != (b.tensor is None) or a.is_container != b.is_container:
        return ["kind"]
    if a.tensor is not None and b.tensor is not None:
        return _tensor_differences(a, a.tensor, b, b.tensor)
    from objckpt.format import values

    if a.is_container:
        if type(a.value) is not type(b.value):
            return ["kind"]
        meta, other = (values.pack(getattr(node.value, "_metadata", None)) for node in (a, b))  # versions of modules
        return [] if meta == other else ["metadata"]
    # By their bytes: as Python compares, 1 is True and 1.0, NaN is no NaN, and arrays are neither.
    return [] if values.pack(a.value) == values.pack(b.value) else ["value"]


def _tensor_differences(a: _Node, left: TensorLeaf, b: _Node, right: TensorLeaf) -> list[str]:
    (dtype, shape), (other_dtype, other_shape) = a.checkpoint.describe(left), b.checkpoint.describe(right)
    what = ["kind"] * (left.numpy != right.numpy) + ["dtype"] * (dtype != other_dtype)
    what += ["shape"] * (shape != other_shape)
    if what:
        return what
    stored, other = a.checkpoint.tensors[left.fqn], b.checkpoint.tensors[right.fqn]
    same = _same_bytes(stored, other)
    if _is_whole(left, stored) and _is_whole(right, other):
        return ["layout differs, bytes not compared"] if same is None else [] if same else ["bytes"]
    # Views of a tensor that other leaves share: its digest says nothing about the part that they see.
    return [] if same and left.view == right.view else ["a view of larger memory, bytes not compared"]


def _is_whole(leaf: TensorLeaf, stored: StoredTensor) -> bool:
    """Whether the bytes of the leaf are those of the stored tensor, in that order."""
    from objckpt.format.dtypes import ITEMSIZE

    view = leaf.view
    if view is None:
        return True
    strides = [math.prod(view.shape[d + 1 :]) for d in range(len(view.shape))]
    dense = all(n == 1 or s == t for n, s, t in zip(view.shape, view.stride, strides, strict=True))
    return dense and view.byte_offset == 0 and math.prod(view.shape) * ITEMSIZE[view.dtype] == stored.nbytes


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool | None:
    """None when the digests cannot tell."""
    if a.nbytes != b.nbytes:
        return False
    cut, other_cut = ({s.entry.box: s.entry.digest for s in t.shards if s.entry.nbytes} for t in (a, b))
    if a.itemsize == b.itemsize and cut.keys() == other_cut.keys() and a.shape == b.shape:
        return cut == other_cut
    digest, other_digest = _digest(a), _digest(b)
    return None if digest is None or other_digest is None else digest == other_digest


def _digest(stored: StoredTensor) -> int | None:
    """The digest of all its bytes, combined from those of its shards; None unless each is a run of rows."""
    from objckpt.format import checksums

    pieces = []
    for shard in stored.shards:
        entry, d = shard.entry, 0
        while d < len(entry.shape) and entry.shape[d] == 1:
            d += 1
        if entry.nbytes and entry.shape[d + 1 :] != stored.shape[d + 1 :]:
            return None
        if entry.nbytes:
            pieces.append((entry.offset, entry.digest, entry.nbytes))
    total = 0
    for _, digest, nbytes in sorted(pieces):  # the tiles of a tensor that are runs lie in the order of their offsets
        total = checksums.crc64_combine(total, digest, nbytes)
    return total


def _row(fqn: str, change: str, what: list[str], a: _Node | None, b: _Node | None) -> dict[str, Any]:
    return {"fqn": fqn, "change": change, "what": what, "a": a and a.plain(), "b": b and b.plain()}


# ---- text ----------------------------------------------------------------------------------------------------------


def _print(before: Commit, after: Commit, changes: list[dict[str, Any]]) -> None:
    rows = [(_SIGNS[row["change"]], row["fqn"], _text(row)) for row in changes]
    for line in output.table(("", "LEAF", "IS"), rows) if rows else ():
        output.line(line)
    counts = Counter(row["change"] for row in changes)
    told = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in _SIGNS if counts[name])
    ends = f"step {before.step}@{before.seq} and step {after.step}@{after.seq}"
    output.line(f"{ends}: {told or 'the same'}")


def _text(row: dict[str, Any]) -> str:
    a, b = (_short(row[end]) for end in ("a", "b"))
    if row["change"] == "removed":
        return a
    return ": ".join([b, *row["what"]]) if a == b or row["change"] == "added" else f"{a} → {b}"


def _short(node: dict[str, Any] | None) -> str:
    if node is None:
        return ""
    ((kind, is_),) = node.items()
    if kind == "value":
        return short(is_)
    if kind == "container":
        return str(is_)
    shape = "×".join(map(str, is_["shape"])) or "scalar"
    return f"{is_['dtype']} {shape}{' numpy' if kind == 'array' else ''}"
