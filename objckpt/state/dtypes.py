"""torch dtypes by name, and the bit views by which tensors of any dtype are copied."""

from __future__ import annotations

import torch

from objckpt.errors import UnsupportedDtypeError
from objckpt.format.dtypes import ITEMSIZE

# Found in torch itself: a table kept by hand lags behind it. A name that this torch lacks is an error when it is met.
_BY_NAME: dict[str, torch.dtype] = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
# A dtype of the same item size whose copy is implemented for every layout.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype, fqn: str) -> str:
    """The name in the format. UnsupportedDtypeError, naming the leaf, for dtypes without plain bits."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise UnsupportedDtypeError(
            f"{fqn}: dtype {dtype} is not stored; dequantise the tensor, or save its integers and scales apart",
            fqn=fqn,
            dtype=name,
        )
    return name


def dtype_of(name: str, fqn: str) -> torch.dtype:
    """The dtype of a stored tensor. UnsupportedDtypeError when this torch does not have it."""
    if name not in _BY_NAME:
        raise UnsupportedDtypeError(
            f"{fqn}: stored as {name}, which torch {torch.__version__} does not have: upgrade torch",
            fqn=fqn,
            dtype=name,
        )
    return _BY_NAME[name]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements seen as integers of the same size (complex128 for 16 bytes); same strides, no copy."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8, 1-d; no copy."""
    # Not reshape(-1): a tensor of one element is contiguous with any stride, and keeps it, which view() refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
