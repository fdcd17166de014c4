"""Names and descriptions between torch.distributed.checkpoint and a checkpoint's tree. Pure; nothing is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from objckpt.errors import SaveError
from objckpt.format import values
from objckpt.format.fqn import to_fqn
from objckpt.format.values import TensorLeaf
from objckpt.geometry import Box
from objckpt.restore.open import Checkpoint
from objckpt.state.dtypes import dtype_of

Path = tuple[Any, ...]


def named_by(metadata: Metadata) -> set[MetadataIndex]:
    """What a checkpoint must have to be what its metadata says."""
    out = set()
    for fqn, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            out |= {MetadataIndex(fqn, chunk.offsets) for chunk in about.chunks}
        else:
            out.add(MetadataIndex(fqn))
    return out


def tree_of(metadata: Metadata, packed: dict[str, bytes | None]) -> dict[Any, Any]:
    """The nested tree from DCP's flat names. Containers whose keys are numbers are lists: DCP makes text of a mapping's."""
    paths: dict[str, Path] = metadata.planner_data or {}
    root = _Node()
    for fqn, about in metadata.state_dict_metadata.items():
        path = tuple(paths.get(fqn, (fqn,)))
        value = packed.get(fqn)
        if isinstance(about, TensorStorageMetadata):
            leaf: Any = TensorLeaf(to_fqn(path))
        elif value is not None:
            leaf = values.unpack(value, fqn)
        else:
            raise SaveError(f"{fqn}: its value reached nobody")
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
        node[path[-1]] = leaf
    return {key: _with_lists(child) for key, child in root.items()}


class _Node(dict[Any, Any]):
    """A container of the tree; a plain dict is a value."""


def _with_lists(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    made = {key: _with_lists(child) for key, child in node.items()}
    if all(type(key) is int for key in made):
        return [made.get(number, {}) for number in range(max(made) + 1)]  # DCP has no name for an empty mapping
    return made


def named(node: Any, path: Path, theirs: Path) -> Iterator[tuple[Path, Path, Any]]:
    """Path, DCP's path and leaf of what DCP has names for, as its planner walks a state: mappings are entered, and lists that
    hold tensors or mappings; any other list and every tuple is one value. One name too many, and it takes the checkpoint
    for one of torch 2.3.
    """
    if isinstance(node, dict):
        for key, child in node.items():
            yield from named(child, (*path, key), (*theirs, str(key)))
    elif type(node) is list and not _is_one_value(node):
        inside = [list(named(child, (*path, n), (*theirs, n))) for n, child in enumerate(node)]
        while inside and not inside[-1]:
            inside.pop()
        for number, found in enumerate(inside):
            # What it has no name for it would not miss; but the planner of a load takes such a place for a value.
            yield from found or [((*path, number), (*theirs, number), node[number])]
    else:
        yield path, theirs, node


def _is_one_value(node: list[Any]) -> bool:
    return not any(
        isinstance(child, dict) or is_tensor(child) or (type(child) is list and not _is_one_value(child))
        for child in node
    )


def is_tensor(node: Any) -> bool:
    """Arrays are none for DCP."""
    return type(node) is TensorLeaf and not node.numpy


def dcp_name(path: Path) -> str:
    """The name that DCP's planner gives to a path."""
    return ".".join(map(str, path))


def describe(leaf: Any, checkpoint: Checkpoint) -> TensorStorageMetadata | BytesStorageMetadata:
    if not is_tensor(leaf):
        return BytesStorageMetadata()
    dtype, shape = checkpoint.describe(leaf)
    if leaf.view is None:
        boxes = [shard.entry.box for shard in checkpoint.tensors[leaf.fqn].shards]
    else:
        boxes = [Box((0,) * len(shape), shape)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_of(dtype, leaf.fqn)),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes],
    )
