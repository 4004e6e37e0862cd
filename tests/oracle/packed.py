"""Rounds weights to what a packed form can hold and packs them: block FP8, gpt-oss MXFP4.

Rounded weights stay exact in bfloat16, so the reference forward runs on the bfloat16 layout of the
same values.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 128
FP8_MAX = 448.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_KEPT = ("embed_tokens", "lm_head", "mlp.gate.weight", "norm", "kv_a_proj")


def is_fp8_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Which matrices a block-FP8 release packs."""
    return tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0 and not any(k in name for k in _KEPT)


def _fp8_scales(matrix: torch.Tensor) -> torch.Tensor:
    """A power of two per block of 128 x 128, so that value * scale is exact in bfloat16."""
    rows, cols = (-(-n // BLOCK) for n in matrix.shape)
    scales = torch.empty(rows, cols)
    for i in range(rows):
        for j in range(cols):
            block = matrix[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scales[i, j] = torch.exp2(torch.ceil(torch.log2(block.abs().max() / FP8_MAX)))
    return scales


def _spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return whole[: shape[0], : shape[1]]


def pack_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [n, k], weight_scale_inv f32 [ceil(n/128), ceil(k/128)])."""
    values = matrix.to(torch.float32)
    scales = _fp8_scales(values)
    return (values / _spread(scales, values.shape)).to(torch.float8_e4m3fn), scales


def round_fp8(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix as block FP8 holds it, in its own dtype."""
    packed, scales = pack_fp8(matrix)
    return (packed.to(torch.float32) * _spread(scales, matrix.shape)).to(matrix.dtype)


def pack_mxfp4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 [..., n] as gpt-oss (blocks uint8 [..., n/32, 16], scales uint8 [..., n/32]).

    Byte j of a block holds weight 2j in its low half and 2j + 1 in its high half; scale 127 means
    1.
    """
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / np.exp2(exponent)[..., None]
    code = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    code |= (scaled < 0).astype(np.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The inverse, f32 [..., n]."""
    code = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    value = E2M1[code & 7] * np.where(code & 8, -1.0, 1.0).astype(np.float32)
    scaled = value * np.exp2(scales.astype(np.float32) - 127)[..., None]
    result: np.ndarray = scaled.reshape(*scales.shape[:-1], -1)
    return result


def rounded(stored: dict[str, torch.Tensor], storage: str) -> dict[str, torch.Tensor]:
    """The bfloat16 layout with every packable weight rounded."""
    found = dict(stored)
    for name, tensor in stored.items():
        if storage == "fp8" and is_fp8_matrix(name, tensor):
            found[name] = round_fp8(tensor)
        elif storage == "mxfp4" and name.endswith((".gate_up_proj", ".down_proj")):
            rows = tensor.to(torch.float32).transpose(-1, -2).numpy()
            exact = torch.from_numpy(unpack_mxfp4(*pack_mxfp4(rows)))
            found[name] = exact.transpose(-1, -2).contiguous().to(tensor.dtype)
    return found


def packed(stored: dict[str, torch.Tensor], storage: str) -> dict[str, torch.Tensor]:
    """The packed layout of ``rounded`` weights."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if storage == "fp8" and is_fp8_matrix(name, tensor):
            found[name], found[name + "_scale_inv"] = pack_fp8(tensor)
        elif storage == "mxfp4" and name.endswith((".gate_up_proj", ".down_proj")):
            blocks, scales = pack_mxfp4(tensor.to(torch.float32).transpose(-1, -2).numpy())
            found[name + "_blocks"] = torch.from_numpy(np.ascontiguousarray(blocks))
            found[name + "_scales"] = torch.from_numpy(np.ascontiguousarray(scales))
        else:
            found[name] = tensor
    return found


def claim(storage: str) -> dict[str, object]:
    """What config.json says about the packing."""
    if storage == "fp8":
        kind = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        return {"quantization_config": {**kind, "activation_scheme": "dynamic"}}
    return {"quantization_config": {"quant_method": "mxfp4"}}
