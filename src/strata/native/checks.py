"""Checks before the extension, which reads raw memory: what passes here is safe to point at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import EngineError, UnsupportedError
from strata.formats.weight_types import TYPES
from strata.native.rows import KERNEL_TYPES


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    rows_apart: bool = False,
) -> None:
    """EngineError unless the tensor is as said and contiguous.

    rows_apart: each row must be, but rows may lie apart.
    """
    if tensor.dtype is dtype and tensor.shape == size and tensor.is_cpu and tensor.is_contiguous():
        return
    plain = tensor.is_contiguous()
    if rows_apart and tensor.dim() == 2:
        plain = tensor.stride(1) == 1 or tensor.shape[1] == 1
    if (
        tensor.dtype != dtype
        or tuple(tensor.shape) != size
        or tensor.device.type != "cpu"
        or not plain
    ):
        raise EngineError(
            f"{name} is {'' if plain else 'non-contiguous '}{tensor.dtype} {list(tensor.shape)} on "
            f"{tensor.device}, expected contiguous {dtype} {list(size)} on cpu"
        )


def check_array(array: npt.NDArray[Any], name: str, dtype: type[np.generic], *size: int) -> None:
    """EngineError unless the array is contiguous, of that size and dtype."""
    if array.dtype != dtype or array.shape != size or not array.flags.c_contiguous:
        raise EngineError(
            f"{name} is {array.dtype} {list(array.shape)}, expected contiguous "
            f"{np.dtype(dtype)} {list(size)}"
        )


def check_index(index: npt.NDArray[np.int32], name: str, end: int) -> None:
    """EngineError unless all of the array lies in 0 .. end - 1."""
    if index.size and (int(index.min()) < 0 or int(index.max()) >= end):
        raise EngineError(
            f"{name} holds {int(index.min())} .. {int(index.max())}, allowed is 0 .. {end - 1}"
        )


def row_bytes(type_name: str, n_cols: int) -> int:
    """Bytes of a row of a type that has kernels; UnsupportedError, EngineError for half blocks."""
    if type_name not in KERNEL_TYPES:
        raise UnsupportedError(f"no row kernels for weight type {type_name}")
    try:
        return TYPES[type_name].row_bytes(n_cols)
    except ValueError as error:
        raise EngineError(str(error)) from None


def run(call: Callable[..., Any], *args: Any) -> Any:
    """Call the extension; its errors become ours."""
    try:
        return call(*args)
    except (RuntimeError, ValueError, MemoryError) as error:
        raise EngineError(str(error) or type(error).__name__) from None
