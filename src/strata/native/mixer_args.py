"""Attention and recurrence arguments: checked tensors become addresses, strides and sizes."""

from __future__ import annotations

import torch

from strata.core.errors import EngineError
from strata.native.checks import check_tensor, run
from strata.native.extension import _native

_FLOAT_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def attention_args(
    q_THd: torch.Tensor,
    k_nGd: torch.Tensor,
    v_nGv: torch.Tensor,
    start: int,
    scale: float,
    window_tokens: int,
    sinks_H: torch.Tensor | None,
    selected_Tn: torch.Tensor | None,
    out_THv: torch.Tensor,
) -> _native.AttentionArgs:
    """EngineError when the tensors do not belong together. The caller keeps them alive."""
    n_tokens, n_heads, dk = q_THd.shape
    n, groups, dv = v_nGv.shape
    check_tensor(q_THd, "attention: q", torch.float32, (n_tokens, n_heads, dk))
    kind = _FLOAT_KINDS.get(k_nGd.dtype)
    fits = k_nGd.shape == (n, groups, dk) and n == start + n_tokens and n_heads % groups == 0
    plain = k_nGd.stride(2) == 1 and v_nGv.stride(2) == 1
    if kind is None or v_nGv.dtype != k_nGd.dtype or not fits or not plain:
        raise EngineError(
            f"attention: q {list(q_THd.shape)}, k {k_nGd.dtype} {list(k_nGd.shape)} and "
            f"v {v_nGv.dtype} {list(v_nGv.shape)} at start {start} do not belong together"
        )
    if sinks_H is not None:
        check_tensor(sinks_H, "attention: sinks", torch.float32, (n_heads,))
    if selected_Tn is not None:
        dtype = torch.uint8 if selected_Tn.dtype == torch.uint8 else torch.bool
        check_tensor(selected_Tn, "attention: selected", dtype, (n_tokens, n))
    return _native.attention_args(
        q_THd.data_ptr(),
        k_nGd.data_ptr(),
        v_nGv.data_ptr(),
        kind,
        [k_nGd.stride(0), k_nGd.stride(1), v_nGv.stride(0), v_nGv.stride(1)],
        [n_tokens, n_heads, groups, dk, dv],
        start,
        scale,
        window_tokens,
        0 if sinks_H is None else sinks_H.data_ptr(),
        0 if selected_Tn is None else selected_Tn.data_ptr(),
        out_THv.data_ptr(),
    )


def gdn_args(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TJV: torch.Tensor,
    keep_TJ: torch.Tensor,
    beta_TJ: torch.Tensor,
    key_head_J: torch.Tensor,
    state_in_JKV: torch.Tensor,
    state_out_JKV: torch.Tensor,
    out_TJV: torch.Tensor,
) -> _native.GdnArgs:
    """EngineError when the tensors do not belong together. The caller keeps them alive."""
    n_tokens, n_value_heads, dv = v_TJV.shape
    n_key_heads, dk = q_THK.shape[1:]
    for name, tensor, size in (
        ("q", q_THK, (n_tokens, n_key_heads, dk)),
        ("k", k_THK, (n_tokens, n_key_heads, dk)),
        ("v", v_TJV, (n_tokens, n_value_heads, dv)),
        ("keep", keep_TJ, (n_tokens, n_value_heads)),
        ("beta", beta_TJ, (n_tokens, n_value_heads)),
        ("state_in", state_in_JKV, (n_value_heads, dk, dv)),
        ("state_out", state_out_JKV, (n_value_heads, dk, dv)),
    ):
        check_tensor(tensor, f"gdn: {name}", torch.float32, size)
    check_tensor(key_head_J, "gdn: key_head", torch.int32, (n_value_heads,))
    args: _native.GdnArgs = run(
        _native.gdn_args,
        q_THK.data_ptr(),
        k_THK.data_ptr(),
        v_TJV.data_ptr(),
        keep_TJ.data_ptr(),
        beta_TJ.data_ptr(),
        key_head_J.data_ptr(),
        state_in_JKV.data_ptr(),
        state_out_JKV.data_ptr(),
        out_TJV.data_ptr(),
        [n_tokens, n_key_heads, n_value_heads, dk, dv],
    )
    return args
