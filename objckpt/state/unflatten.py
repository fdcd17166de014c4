"""The neutral tree back to what the user gave."""

from __future__ import annotations

import pickle as pickling
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from objckpt.errors import FormatError, UsageError
from objckpt.format.fqn import to_fqn
from objckpt.format.values import Pickled, TensorLeaf, TorchDevice, TorchDtype, TorchSize
from objckpt.state.dtypes import dtype_of

Path = tuple[Any, ...]


def to_python(tree: Any, tensor_of: Callable[[Path, TensorLeaf], Any], *, pickle: bool = False, path: Path = ()) -> Any:
    """The tree with torch's own types in place of the neutral ones, and `tensor_of(path, leaf)` for each tensor.

    UsageError, naming the path, for a pickled value unless `pickle`.
    """
    kind = type(tree)
    if kind is TensorLeaf:
        return tensor_of(path, tree)
    if kind in (dict, OrderedDict):
        out: Any = kind((k, to_python(v, tensor_of, pickle=pickle, path=(*path, k))) for k, v in tree.items())
        if hasattr(tree, "_metadata"):
            out._metadata = tree._metadata
        return out
    if kind in (list, tuple):
        return kind(to_python(v, tensor_of, pickle=pickle, path=(*path, i)) for i, v in enumerate(tree))
    if kind is TorchDtype:
        return dtype_of(tree.name, to_fqn(path))
    if kind is TorchDevice:
        try:
            return torch.device(tree.name)
        except RuntimeError as err:
            raise FormatError(f"{to_fqn(path)}: this torch knows no device {tree.name!r}", fqn=to_fqn(path)) from err
    if kind is TorchSize:
        return torch.Size(tree.dims)
    if kind is Pickled:
        if not pickle:
            raise UsageError(
                f"{to_fqn(path)}: this value is pickled, and to unpickle it runs code; if you trust the checkpoint, "
                "pass pickle=True (SaveOptions(pickle=True) of a Checkpointer, --pickle on the command line)",
                fqn=to_fqn(path),
            )
        return pickling.loads(tree.data)
    return tree
