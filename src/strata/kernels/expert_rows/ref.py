"""The expert feed-forward from a blob: bit-exact by the numerics contract, and plain in torch."""

from __future__ import annotations

import torch

from strata.kernels.expert_rows.shape import ExpertShape
from strata.kernels.linear.ref import linear, linear_contract
from strata.kernels.numerics import silu_c, swiglu_oai_c
from strata.kernels.weight import Weight


def expert_rows_contract(
    shape: ExpertShape, blob: torch.Tensor, x_TD: torch.Tensor
) -> torch.Tensor:
    """Unweighted rows f32 [T, D] with the contract's bits (section 5).

    blob: uint8 [blob_bytes]; x_TD: f32. The activation between is quantized again when down is.
    """
    gate, up, down = matrices(shape, blob)
    g_TF = _add_bias(linear_contract(x_TD, gate), blob, shape.gate_bias_offset)
    u_TF = _add_bias(linear_contract(x_TD, up), blob, shape.up_bias_offset)
    if shape.activation == "swiglu_oai":
        h = swiglu_oai_c(g_TF.numpy(), u_TF.numpy(), shape.swiglu_limit)
    else:
        h = silu_c(g_TF.numpy()) * u_TF.numpy()
    return _add_bias(linear_contract(torch.from_numpy(h), down), blob, shape.down_bias_offset)


def expert_rows_plain(
    shape: ExpertShape, blob: torch.Tensor, x_TD: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Unweighted rows [T, D]: dequantize, then multiply, all in dtype (float32 or float64)."""
    gate, up, down = matrices(shape, blob)
    g_TF = _add_bias(linear(x_TD, gate, dtype), blob, shape.gate_bias_offset)
    u_TF = _add_bias(linear(x_TD, up, dtype), blob, shape.up_bias_offset)
    if shape.activation == "swiglu_oai":
        g_TF = g_TF.clamp(max=shape.swiglu_limit)
        u_TF = u_TF.clamp(-shape.swiglu_limit, shape.swiglu_limit)
        h_TF = g_TF * torch.sigmoid(1.702 * g_TF) * (u_TF + 1)
    else:
        h_TF = torch.nn.functional.silu(g_TF) * u_TF
    return _add_bias(linear(h_TF, down, dtype), blob, shape.down_bias_offset)


def matrices(shape: ExpertShape, blob: torch.Tensor) -> tuple[Weight, Weight, Weight]:
    """Gate [F, D], up [F, D] and down [D, F] as views of the blob."""
    assert blob.dtype == torch.uint8 and tuple(blob.shape) == (shape.blob_bytes,), (
        f"blob {blob.dtype} {tuple(blob.shape)}, expected uint8 [{shape.blob_bytes}]"
    )
    scales = _floats(blob, shape.scale_offset, 3)
    factors = (1.0, 1.0, 1.0) if scales is None else tuple(scales.tolist())

    def view(i: int, n_rows: int, n_cols: int, start: int) -> Weight:
        data, layout = blob[start : start + shape.matrix_bytes[i]], shape.layouts[i]
        data = data.view(n_rows, -1) if layout == "native" else data
        return Weight(shape.types[i], n_rows, n_cols, data, factors[i], layout)

    d, f = shape.d_model, shape.d_expert
    return (
        view(0, f, d, shape.gate_offset),
        view(1, f, d, shape.up_offset),
        view(2, d, f, shape.down_offset),
    )


def _floats(blob: torch.Tensor, offset: int, count: int) -> torch.Tensor | None:
    """f32 [count] at that byte of the blob; None for offset -1."""
    return None if offset < 0 else blob[offset : offset + 4 * count].view(torch.float32)


def _add_bias(y_TN: torch.Tensor, blob: torch.Tensor, offset: int) -> torch.Tensor:
    """y plus the bias at that offset, if any."""
    bias_N = _floats(blob, offset, y_TN.shape[1])
    return y_TN if bias_N is None else y_TN + bias_N.to(y_TN.dtype)
