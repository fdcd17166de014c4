"""The two verbs of a restore: `load` makes a state, `restore_into` fills the caller's.

Imports torch by way of `place`; names it only in annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from objckpt.errors import MismatchError
from objckpt.events import Progress, ignore
from objckpt.format.fqn import to_fqn
from objckpt.format.values import TensorLeaf
from objckpt.restore.match import prune
from objckpt.restore.open import Checkpoint
from objckpt.restore.place import Filler, NewTensors, device_of, window_of
from objckpt.state import template
from objckpt.state.unflatten import to_python
from objckpt.store import Store

if TYPE_CHECKING:
    import torch

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Leaves that `strict=False` left out: in the state only, in the checkpoint only. FQNs."""

    missing: list[str]
    unexpected: list[str]


def load(
    store: Store,
    checkpoint: Checkpoint,
    *,
    device: str | torch.device = "cpu",
    only: str | list[str] | None = None,
    pickle: bool = False,
    progress: Progress = ignore,
) -> Any:
    """The nested state as new tensors on `device`; ties and views share memory again. Blocks.

    `device="meta"` gives shapes and dtypes without any data. With `only`, mappings keep the leaves that match; a list
    or tuple comes whole when one of its leaves matches.

    Raises:
        MismatchError: no leaf matches `only`.
        IntegrityError, StoreError: as `fetch`.
        UsageError: a value is pickled and `pickle` is not set, or `device` is none.
    """
    place = device_of(device)
    tree = checkpoint.tree if only is None else prune(checkpoint.tree, template.patterns(only))
    if tree is None:
        raise MismatchError(f"step {checkpoint.commit.step}: no leaf matches only={only!r}", only=only)
    new = NewTensors(checkpoint, place)
    state = to_python(tree, new.tensor_of, pickle=pickle)
    if place.type != "meta":
        filler = Filler(store, checkpoint, progress)
        for fqn, tensor in new.stored.items():
            filler.add(checkpoint.tensors[fqn], tensor)
        filler.run()
    return state


def restore_into(
    store: Store,
    checkpoint: Checkpoint,
    into: Mapping[Any, Any],
    *,
    strict: bool = True,
    only: str | list[str] | None = None,
    cast: bool = False,
    pickle: bool = False,
    progress: Progress = ignore,
) -> Report:
    """Fill `into` from the checkpoint; see `Checkpointer.restore`. Blocks.

    The order is: match everything, fetch all bytes into the tensors, replace values, call `load_state_dict`. Before the
    match has succeeded nothing is touched. When fetching fails, tensors hold a mixture of old and new bytes.
    """
    commit = checkpoint.commit
    found = template.match(into, checkpoint.tree, checkpoint.describe, only=only, cast=cast)
    template.check(found, strict=strict, step=commit.step)
    new = NewTensors(checkpoint, device_of("cpu"))
    filler = Filler(store, checkpoint, progress)
    # Trees become Python values before any tensor is touched: they may be refused (pickled values, unknown dtypes).
    assigns = [
        (parent, key, to_python(tree, new.tensor_of, pickle=pickle, path=path))
        for parent, key, path, tree in found.assigns
    ]
    loads = []
    for item in found.loads:
        state = item.state
        if item.tree is not None:
            reuse = item.reuse

            def tensor_of(path: Path, leaf: TensorLeaf, reuse: dict[Path, torch.Tensor] = reuse) -> Any:
                return reuse[path] if path in reuse else new.tensor_of(path, leaf)

            state = to_python(item.tree, tensor_of, pickle=pickle, path=item.path)
        loads.append((item.owner, state))
    _refuse_ties(found.fills, checkpoint)
    for _, target, leaf in found.fills:
        filler.add_leaf(leaf, target)
    for fqn, tensor in new.stored.items():
        filler.add(checkpoint.tensors[fqn], tensor)
    try:
        filler.run()
    except BaseException as err:
        err.add_note("The tensors given to restore() hold a mixture of old and new bytes now; restore them again.")
        raise
    for parent, key, value in assigns:
        parent[key] = value
    for owner, state in loads:
        owner.load_state_dict(state)
    return Report(found.missing, found.unexpected)


def _refuse_ties(fills: list[tuple[Path, torch.Tensor, TensorLeaf]], checkpoint: Checkpoint) -> None:
    """MismatchError for tensors that are one in the state but had different bytes when they were saved."""
    seen: dict[Any, tuple[Path, TensorLeaf]] = {}
    lines = []
    for path, target, leaf in fills:
        if not target.numel():
            continue
        first = seen.setdefault(window_of(target), (path, leaf))
        if first[1] != leaf and _identity(first[1], checkpoint) != _identity(leaf, checkpoint):
            lines.append(
                f"{to_fqn(path)}: shares its memory with {to_fqn(first[0])} in the state, not in the checkpoint"
            )
    if lines:
        raise MismatchError(
            f"the checkpoint of step {checkpoint.commit.step} and the state differ in {len(lines)} leaves; nothing was "
            "changed\n" + "\n".join(f"  {line}" for line in lines),
            step=checkpoint.commit.step, missing=[], unexpected=[], wrong=lines,
        )  # fmt: skip


def _identity(leaf: TensorLeaf, checkpoint: Checkpoint) -> Any:
    """Equal for leaves that are known to have equal bytes."""
    if leaf.view is not None:
        return leaf
    shards = checkpoint.tensors[leaf.fqn].shards
    return sorted((s.entry.offset, s.entry.shape, s.entry.digest) for s in shards)
