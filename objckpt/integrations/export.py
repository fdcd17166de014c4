"""States as files of other libraries: torch's `.pt` and `.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

import torch

from objckpt.errors import UnsupportedDtypeError, UsageError


def write_pt(state: Any, file: IO[bytes]) -> None:
    """Write with `torch.save`. Tensors that share memory do so again after `torch.load`."""
    torch.save(state, file)


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str]) -> None:
    """Write dense tensors; each has bytes of its own in the file, shared memory or not. Replaces the file at `path`.

    Raises:
        UsageError: the package safetensors is not installed.
        UnsupportedDtypeError: the file format has no name for a dtype; nothing was written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as err:
        raise UsageError("the package safetensors is not installed: pip install 'objckpt[safetensors]'") from err
    seen: set[int] = set()
    dense: dict[str, torch.Tensor] = {}
    for fqn, tensor in tensors.items():
        # safetensors refuses shared memory, as it could not restore it; the copies are what any reader expects.
        storage = tensor.untyped_storage().data_ptr()
        alone = tensor.is_contiguous() and storage not in seen and tensor.nbytes == tensor.untyped_storage().nbytes()
        dense[fqn] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(storage)
    try:
        save_file(dense, path, dict(metadata))
    except KeyError as err:  # its table of dtypes
        names = [f"{fqn} ({t.dtype})" for fqn, t in dense.items() if t.dtype == err.args[0]]
        raise UnsupportedDtypeError(
            f"{names[0] if names else err}: .safetensors has no such dtype; write a .pt file, or leave it out by --only"
        ) from err
    except SafetensorError as err:
        raise UsageError(f"{path}: {err}") from err
