"""What a checkpoint claims about its quantization, held against what its tensors are.

Knows the claims we can load (block FP8, gpt-oss MXFP4) and refuses the others by name. A claim
without the tensors to match is refused too: casting would give a model that nobody published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.tensor_info import TensorInfo
from strata.formats.text import quoted

_FP8_BLOCK = [128, 128]
_REMEDY = "use the unquantized checkpoint, its block-FP8 or MXFP4 form, or a GGUF"
_NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "mlx": "MLX",
}


def check_quantization_claim(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> None:
    """Refuse what we cannot read (UnsupportedError) or the tensors contradict (FormatError)."""
    claim = _claim(path, config)
    if claim is None:
        _refuse_packed_tensors(path, tensors)
        return
    method = str(claim.get("quant_method", "")).lower()
    if method == "fp8":
        _check_fp8(path, claim, tensors)
    elif method == "mxfp4":
        _check_mxfp4(path, tensors)
    elif method:
        raise UnsupportedError(
            f"{path}: {_NAMES.get(method, quoted(method))} quantization (quantization_config in "
            f"config.json) is not supported: {_reason(tensors)}; {_REMEDY}"
        )
    else:
        raise UnsupportedError(
            f"{path}: config.json claims a quantization without a quant_method "
            f"({str(dict(claim))[:120]!r}); {_REMEDY}"
        )


def _claim(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of the model or its text part, or None."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        claim = holder.get("quantization_config") or holder.get("compression_config")
        if claim and not isinstance(claim, dict):
            raise FormatError(f"{path}: quantization_config in config.json is not an object")
        if claim:
            return dict(claim)
        if isinstance(holder.get("quantization"), dict):
            return {"quant_method": "mlx"}
    return None


def _reason(tensors: Mapping[str, TensorInfo]) -> str:
    if _is_plain(tensors):
        return f"it claims packed weights, but its tensors are plain {_plain_type(tensors)}"
    return "there is no decoder for its packed weights"


def _is_plain(tensors: Mapping[str, TensorInfo]) -> bool:
    return all(
        t.type.name in ("F32", "F16", "BF16", "F64", "I64", "BOOL") for t in tensors.values()
    )


def _plain_type(tensors: Mapping[str, TensorInfo]) -> str:
    types = [t.type.name for t in tensors.values()]
    return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(
        max(set(types), key=types.count, default="floats"), "floats"
    )


def _check_fp8(path: Path, claim: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    if claim.get("weight_block_size") != _FP8_BLOCK:
        raise UnsupportedError(
            f"{path}: FP8 with weight_block_size {claim.get('weight_block_size')!r} is not "
            f"supported, only blocks of 128 x 128; {_REMEDY}"
        )
    if not any(t.type.name == "F8_E4M3" for t in tensors.values()):
        raise FormatError(
            f"{path}: config.json claims FP8 weights, but no tensor is FP8 (they are "
            f"{_plain_type(tensors)}); remove quantization_config or download the right weights"
        )


def _check_mxfp4(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    packed = [n for n, t in tensors.items() if n.endswith("_blocks") and t.type.name == "U8"]
    if not packed:
        raise FormatError(
            f"{path}: config.json claims MXFP4 weights, but there are no packed *_blocks tensors "
            f"(they are {_plain_type(tensors)}); remove quantization_config or download the right "
            "weights"
        )
    lonely = [n for n in packed if n.removesuffix("_blocks") + "_scales" not in tensors]
    if lonely:
        raise FormatError(
            f"{path}: tensor {quoted(lonely[0])} has no *_scales tensor beside it; download the "
            "checkpoint again"
        )


def _refuse_packed_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """AWQ and GPTQ checkpoints whose config does not say so are known by their tensor names."""
    for name in tensors:
        if name.endswith((".qweight", ".qzeros")):
            raise UnsupportedError(
                f"{path}: tensor {quoted(name)} is packed the AWQ or GPTQ way, which is not "
                f"supported: there is no decoder for it; {_REMEDY}"
            )
