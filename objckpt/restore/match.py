"""Which leaves of a checkpoint's tree are wanted. Pure; what a state given to `restore` wants is `state/template`'s."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from objckpt.format.fqn import to_fqn

Path = tuple[Any, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and value of every leaf; an empty container is a leaf."""
    if isinstance(tree, dict) and tree:
        for key, child in tree.items():
            yield from leaves(child, (*path, key))
    elif type(tree) in (list, tuple) and tree:
        for i, child in enumerate(tree):
            yield from leaves(child, (*path, i))
    else:
        yield path, tree


def prune(tree: dict[Any, Any], wanted: Callable[[str], bool]) -> dict[Any, Any] | None:
    """The tree without the leaves that are not wanted; None when there is no other.

    A list or tuple stays whole when one of its leaves is wanted: the places of its members mean something.
    """
    found, kept = _prune(tree, wanted, ())
    return kept if found else None


def _prune(node: Any, wanted: Callable[[str], bool], path: Path) -> tuple[bool, Any]:
    if isinstance(node, dict) and node:
        out: dict[Any, Any] = OrderedDict() if isinstance(node, OrderedDict) else {}
        for key, child in node.items():
            found, kept = _prune(child, wanted, (*path, key))
            if found:
                out[key] = kept
        if hasattr(node, "_metadata"):
            out._metadata = node._metadata  # type: ignore[attr-defined]
        return bool(out), out
    return any(wanted(to_fqn(leaf)) for leaf, _ in leaves(node, path)), node
