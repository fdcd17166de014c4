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
from objckpt.geometry import Box, whole
from objckpt.restore.match import leaves, prune
from objckpt.restore.open import Checkpoint
from objckpt.restore.place import Filler, NewTensors, boxes_of, device_of, half_restored, new_like, parts_of, window_of
from objckpt.state import template
from objckpt.state.shards import is_distributed
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
        MismatchError: a pattern of `only` matches no leaf.
        IntegrityError, StoreError: as `fetch`.
        UsageError: a value is pickled and `pickle` is not set, or `device` is none.
    """
    place = device_of(device)
    tree = checkpoint.tree
    if only is not None:
        wanted = template.patterns(only)
        _check_patterns(only, None, checkpoint)
        tree = prune(tree, wanted)
    new = NewTensors(checkpoint, place)
    state = to_python(tree, new.tensor_of, pickle=pickle)
    if place.type != "meta":
        filler = Filler(store, checkpoint, progress)
        for fqn, tensor in new.stored.items():
            filler.add(checkpoint.tensors[fqn], tensor)
        filler.run()
    return state


class Restoration:
    """Fills `into` from the checkpoint, step by step, so that ranks can agree between the steps.

    The constructor matches everything and touches nothing; `fetch` brings all bytes into the tensors; `hand_over` replaces
    values and calls `load_state_dict`. When fetching fails, tensors hold a mixture of old and new bytes.

    Every pattern of `only` must match a leaf that both sides have, whatever `strict` says: one that matches nothing is a
    misspelt one, and what it should have restored would stay random.
    """

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        into: Mapping[Any, Any],
        *,
        strict: bool = True,
        only: str | list[str] | None = None,
        cast: bool = False,
        pickle: bool = False,
        progress: Progress = ignore,
    ) -> None:
        """Raises MismatchError, and UsageError for pickled values."""
        self.checkpoint, self._pickle = checkpoint, pickle
        found = template.match(into, checkpoint.tree, checkpoint.describe, only=only, cast=cast)
        template.check(found, strict=strict, step=checkpoint.commit.step)
        if only is not None:
            _check_patterns(only, _taken(found), checkpoint)
        self.report = Report(found.missing, found.unexpected)
        self._new = NewTensors(checkpoint, device_of("cpu"))
        self._store, self._progress = store, progress
        # Trees become Python values before any tensor is touched: they may be refused (pickled values, unknown dtypes).
        self._assigns = [
            (parent, key, to_python(tree, self._new.tensor_of, pickle=pickle, path=path))
            for parent, key, path, tree in found.assigns
        ]
        fills = [(target, leaf) for _, target, leaf in found.fills]
        self._loads = [(item.owner, self._state_for(item, fills)) for item in found.loads]
        self._tied = _tied(found.fills)
        if checkpoint.complete:
            _refuse_ties(self._tied, checkpoint)
        self.fills = fills + [(tensor, TensorLeaf(fqn)) for fqn, tensor in self._new.stored.items()]

    def wanted(self) -> dict[str, list[Box]]:
        """What has to be at hand before `fetch`, by FQN; see `opened_for`."""
        out: dict[str, list[Box]] = {}
        for target, leaf in self.fills:
            out.setdefault(leaf.fqn, []).extend(boxes_of(self.checkpoint, leaf, target))
        for _, *leaves_ in self._tied:
            for leaf in leaves_:
                out.setdefault(leaf.fqn, []).append(whole(self.checkpoint.tensors[leaf.fqn].shape))
        return out

    def use(self, checkpoint: Checkpoint) -> None:
        """Go on with the same checkpoint, opened for what is wanted. Raises MismatchError."""
        self.checkpoint = checkpoint
        _refuse_ties(self._tied, checkpoint)

    def fetch(self) -> None:
        """Bring the bytes of `fills` into their tensors. Blocks. Raises IntegrityError and StoreError."""
        filler = Filler(self._store, self.checkpoint, self._progress)
        for target, leaf in self.fills:
            filler.add_leaf(leaf, target)
        with half_restored():
            filler.run()

    def hand_over(self) -> None:
        """After `fetch`: values to their mappings, states to their owners."""
        for parent, key, value in self._assigns:
            parent[key] = value
        for owner, state in self._loads:
            owner.load_state_dict(state)

    def _state_for(self, item: template.Load, fills: list[tuple[torch.Tensor, TensorLeaf]]) -> Any:
        if item.tree is None:
            return item.state

        def tensor_of(path: Path, leaf: TensorLeaf) -> Any:
            if path in item.reuse:
                return item.reuse[path]
            param = item.param_of(path)
            dtype, shape = self.checkpoint.describe(leaf)
            if param is None or not is_distributed(param) or tuple(param.shape) != shape:
                return self._new.tensor_of(path, leaf)
            fills.append((new_like(param, dtype, to_fqn(path)), leaf))  # the state of a sharded parameter is sharded
            return fills[-1][0]

        return to_python(item.tree, tensor_of, pickle=self._pickle, path=item.path)


def restore_into(store: Store, checkpoint: Checkpoint, into: Mapping[Any, Any], **options: Any) -> Report:
    """Match, fetch, fill; see `Restoration`. Blocks."""
    work = Restoration(store, checkpoint, into, **options)
    work.fetch()
    work.hand_over()
    return work.report


def _taken(found: template.Match) -> set[str]:
    """The FQNs that the state takes from the checkpoint."""
    names = {to_fqn(path) for path, _, _ in found.fills} | {to_fqn(path) for _, _, path, _ in found.assigns}
    trees = [(path, tree) for _, _, path, tree in found.assigns]
    trees += [(item.path, item.tree) for item in found.loads if item.tree is not None]
    return names | {to_fqn(leaf) for path, tree in trees for leaf, _ in leaves(tree, path)}


def _check_patterns(only: str | list[str], taken: set[str] | None, checkpoint: Checkpoint) -> None:
    """MismatchError for patterns that match none of the leaves `taken`, or none of the checkpoint's."""
    stored = [to_fqn(path) for path, _ in leaves(checkpoint.tree)]
    lines = []
    for pattern in [only] if isinstance(only, str) else only:
        wanted = template.patterns(pattern)
        matching = [name for name in stored if wanted(name)]
        if taken is not None and matching and not any(map(wanted, taken)):
            lines.append(f"{pattern!r} matches {_some(matching)} in the checkpoint, and nothing in the state given")
        elif not matching and not (taken and any(map(wanted, taken))):
            lines.append(f"{pattern!r} matches no leaf of the checkpoint, which has {_some(list(checkpoint.tree))}")
    if lines:
        raise MismatchError(
            f"step {checkpoint.commit.step}: no leaf matches only={only!r}; nothing was changed\n"
            + "\n".join(f"  {line}" for line in lines),
            step=checkpoint.commit.step, only=only,
        )  # fmt: skip


def _some(names: list[Any]) -> str:
    shown = ", ".join(map(str, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _tied(fills: list[tuple[Path, torch.Tensor, TensorLeaf]]) -> list[tuple[str, TensorLeaf, TensorLeaf]]:
    """Tensors that are one in the state and have two names in the checkpoint; the first of each says what is wrong then."""
    seen: dict[Any, tuple[Path, TensorLeaf]] = {}
    out = []
    for path, target, leaf in fills:
        parts = [tensor for tensor, _ in parts_of(target, to_fqn(path)) if tensor.numel()]
        if not parts:
            continue
        first = seen.setdefault(window_of(parts[0]), (path, leaf))
        if first[1] != leaf:
            line = f"{to_fqn(path)}: shares its memory with {to_fqn(first[0])} in the state, not in the checkpoint"
            out.append((line, first[1], leaf))
    return out


def _refuse_ties(tied: list[tuple[str, TensorLeaf, TensorLeaf]], checkpoint: Checkpoint) -> None:
    """MismatchError for tensors that are one in the state but had different bytes when they were saved."""
    lines = [line for line, a, b in tied if _identity(a, checkpoint) != _identity(b, checkpoint)]
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
