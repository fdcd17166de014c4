"""The neutral tree back to Python."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from objckpt.errors import UnsupportedDtypeError, UsageError
from objckpt.format.values import Pickled, TensorLeaf, TorchDevice, TorchDtype, TorchSize
from objckpt.state.unflatten import to_python


def no_tensor(path: tuple[Any, ...], leaf: TensorLeaf) -> Any:
    raise AssertionError(path)


def test_torch_values_and_containers() -> None:
    tree = {"t": (TorchDtype("bfloat16"), [TorchDevice("cuda:1")]), 1: TorchSize((2, 3)), "o": OrderedDict(a=None)}
    back = to_python(tree, no_tensor)
    assert back == {"t": (torch.bfloat16, [torch.device("cuda:1")]), 1: torch.Size([2, 3]), "o": OrderedDict(a=None)}
    assert type(back[1]) is torch.Size and type(back["o"]) is OrderedDict and back is not tree


def test_each_tensor_is_asked_for_with_its_own_path() -> None:
    asked = []
    to_python(
        {"a": [TensorLeaf("x")], "b": TensorLeaf("x")}, lambda path, leaf: asked.append((path, leaf.fqn)), path=("m",)
    )
    assert asked == [(("m", "a", 0), "x"), (("m", "b"), "x")]


def test_nothing_is_unpickled_unless_asked() -> None:
    tree = {"cfg": [Pickled(b"cbuiltins\nprint\n.")]}
    with pytest.raises(UsageError, match=r"cfg/%\(0\): this value is pickled.*pickle=True"):
        to_python(tree, no_tensor)
    assert to_python(tree, no_tensor, pickle=True) == {"cfg": [print]}


def test_a_dtype_of_a_newer_torch() -> None:
    with pytest.raises(UnsupportedDtypeError, match=r"cfg/dt: .*upgrade torch"):
        to_python({"cfg": {"dt": TorchDtype("float2")}}, no_tensor)
