"""Seeded weights that are not degenerate, each exactly representable in bfloat16."""

from __future__ import annotations

import math

import torch

# how much larger than 1/sqrt(fan in) a projection is drawn, so that routing and gates vary
GAINS = (
    ("router", 2.5),
    ("mlp.gate.weight", 2.5),
    ("shared_expert_gate", 2.0),
    ("q_proj", 1.7),
    ("k_proj", 1.7),
    ("index_qk", 1.5),
    ("block_inject", 6.0),
    ("input_mix_weight", 2.5),
    ("lm_head", 2.0),
    ("in_proj_a", 2.0),
    ("in_proj_b", 2.0),
)


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float, mean: float = 0.0) -> torch.Tensor:
        return mean + std * torch.randn(shape, generator=self.generator)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)


def fill(model: torch.nn.Module, seed: int, centered: tuple[str, ...]) -> None:
    """Draw every float parameter and buffer of the model, in the order of their names.

    centered: parts of the class names of norms whose stored weight is an offset from 1.
    """
    draw = _Draw(seed)
    owners: dict[str, tuple[torch.nn.Module, torch.Tensor]] = {}
    for module_name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            owners[f"{module_name}.{name}" if module_name else name] = (module, tensor)
    for name in sorted(owners):
        module, tensor = owners[name]
        if tensor.dtype.is_floating_point and not name.endswith("inv_freq"):
            value = _value(draw, name, type(module).__name__, tensor, centered)
            tensor.copy_(value.to(torch.bfloat16).to(tensor.dtype))


def _value(
    draw: _Draw, name: str, owner: str, tensor: torch.Tensor, centered: tuple[str, ...]
) -> torch.Tensor:
    leaf, shape = name.rsplit(".", 1)[-1], tuple(tensor.shape)
    if leaf == "A_log":
        return torch.log(draw.uniform(shape, 0.5, 8.0))
    if leaf == "dt_bias":
        return draw.uniform(shape, -4.0, -0.5)
    if "Norm" in owner:
        offset = "Gated" not in owner and any(part in owner for part in centered)
        return draw.normal(shape, 0.2, 0.0 if offset else 1.0)
    spreads = {"sinks": 1.0, "e_score_correction_bias": 0.1}
    if leaf in spreads:
        return draw.normal(shape, spreads[leaf])
    if "conv1d" in name:
        return draw.normal(shape, 0.4)
    if owner == "Embedding":
        return draw.normal(shape, 1.0)
    if leaf.endswith("bias"):
        return draw.normal(shape, 0.3)
    if leaf in ("gate_up_proj", "down_proj") and tensor.ndim == 3:
        fan_in = shape[1] if owner.startswith("GptOss") else shape[2]
        return draw.normal(shape, 1.4 / math.sqrt(fan_in))
    gain = next((g for part, g in reversed(GAINS) if part in name), 1.0)
    return draw.normal(shape, gain / math.sqrt(shape[-1]))


def to_disk(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is stored: floats as bfloat16 (exactly), integers as they are."""
    tensor = tensor.detach().contiguous()
    if not tensor.dtype.is_floating_point:
        return tensor.clone()
    stored = tensor.to(torch.bfloat16)
    assert torch.equal(stored.to(tensor.dtype), tensor), "weight is not exact in bfloat16"
    return stored.clone()
