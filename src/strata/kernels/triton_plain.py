"""What kernels call in Triton's interpreter instead of inline assembly: same bits, by NumPy.

Knows no kernels. Compiled kernels never reach these functions. In the interpreter a tensor holds a
NumPy array, and one call here stands for dozens of interpreted operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.language.core import TRITON_BUILTIN
from triton.runtime.interpreter import TensorHandle

from strata.kernels.numerics import fma32


def _host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let kernels name the function: Triton skips what bears this mark when it hashes a kernel."""
    setattr(function, TRITON_BUILTIN, True)
    return function


def _tensor(data: NDArray[Any], dtype: Any, *like: Any) -> Any:
    """An interpreted tensor; a scalar when all arguments were."""
    if any(not isinstance(x, int) and x.type.is_block() for x in like):
        return tl.core.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
    return tl.core.tensor(TensorHandle(data, dtype), dtype)


def _same_shape(*values: Any) -> list[NDArray[Any]]:
    """Arrays of tensors or int32 numbers, broadcast and contiguous."""
    arrays = [np.int32(v) if isinstance(v, int) else v.handle.data for v in values]
    return [np.ascontiguousarray(x) for x in np.broadcast_arrays(*arrays)]


@_host
def plain_fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once, f32."""
    x, y, z = _same_shape(a, b, c)
    return _tensor(fma32(x, y, z), tl.float32, a, b, c)


@_host
def plain_dp4a(a: Any, b: Any, c: Any) -> Any:
    """c + sum of the products of four signed bytes of int32 a and b."""
    return _dots(np.int8, a, b, c)


@_host
def plain_dp4a_unsigned(a: Any, b: Any, c: Any) -> Any:
    """c + sum of the products of four unsigned bytes of int32 a and signed bytes of b."""
    return _dots(np.uint8, a, b, c)


def _dots(byte: type, a: Any, b: Any, c: Any) -> Any:
    x, y, z = _same_shape(a, b, c)
    products = x.view(byte).astype(np.int32) * y.view(np.int8)
    total = z + products.reshape(*z.shape, 4).sum(axis=-1, dtype=np.int32)
    return _tensor(total.astype(np.int32), tl.int32, a, b, c)


@_host
def plain_prmt(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes out of the eight of int32 (a, b), as PTX's prmt.

    Byte i is number ``selector >> 4 i & 7``, or eight copies of its sign when bit 3 is set too.
    """
    x, y, s = _same_shape(a, b, selector)
    table = np.stack((x, y), axis=-1).view(np.uint8)
    field = s[..., None] >> np.arange(0, 16, 4, dtype=np.int32)
    chosen = np.take_along_axis(table, field & 7, axis=-1)
    signs = (chosen.view(np.int8) >> 7).view(np.uint8)
    result = np.ascontiguousarray(np.where(field & 8, signs, chosen))
    return _tensor(result.view(np.int32).reshape(s.shape), tl.int32, a, b, selector)
