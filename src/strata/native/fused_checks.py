"""Loads the extension of small operations and checks what its functions are pointed at."""

from __future__ import annotations

import torch

from strata.core.errors import EngineError
from strata.native import _fused

F32 = torch.float32
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _refuse(name: str, tensor: torch.Tensor, dtype: torch.dtype, n: int) -> EngineError:
    return EngineError(
        f"{name} is {tensor.dtype} {list(tensor.shape)} (strides {list(tensor.stride())}) on "
        f"{tensor.device}, expected {n} contiguous numbers of {dtype} on cpu"
    )


def at(tensor: torch.Tensor, n: int, name: str, dtype: torch.dtype = F32) -> int:
    """Address of n contiguous numbers; EngineError when they are not that."""
    if (
        tensor.dtype is not dtype
        or tensor.numel() != n
        or not tensor.is_contiguous()
        or not tensor.is_cpu
    ):
        raise _refuse(name, tensor, dtype, n)
    return tensor.data_ptr()


def kind_of(tensor: torch.Tensor, name: str) -> int:
    """Code of a cache's float kind; its last axis must be contiguous."""
    kind = _KINDS.get(tensor.dtype)
    if kind is None or tensor.stride(-1) != 1 or not tensor.is_cpu:
        raise EngineError(
            f"{name} is {tensor.dtype} with strides {list(tensor.stride())} on {tensor.device}, "
            f"expected f32, f16 or bf16 rows on cpu"
        )
    return kind


def fused_ops(isa: str) -> _fused.Ops:
    """The operations for one instruction set, as a CpuPool calls it ("avx512" runs "avx2" here)."""
    return _fused.Ops("avx2" if isa != "portable" and _fused.has_avx2() else "portable")
