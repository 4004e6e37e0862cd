"""What tests of single parts share: weights and float64 modules of HF, and frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState, StateSpec
from strata.models.parts import Part

CPU = torch.device("cpu")

# what the engine sets: with more, torch cuts long tensors where vectors do not end
torch.set_num_threads(1)


def weight(matrix: torch.Tensor) -> Weight:
    """A float matrix as an F32 Weight."""
    data = matrix.detach().to(torch.float32).contiguous()
    n_rows, n_cols = data.shape
    return Weight("F32", n_rows, n_cols, data.view(torch.uint8).view(n_rows, 4 * n_cols))


def packed(type_name: str, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> Weight:
    """Rows of raw bytes as a Weight of that type."""
    n_rows, row_bytes = raw.shape
    kind = TYPES[type_name]
    n_cols = row_bytes // kind.block_bytes * kind.block_weights
    return Weight(type_name, n_rows, n_cols, torch.from_numpy(raw))


def randomize(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Seeded float32 numbers in every parameter, spread like those of a trained module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("A_log"):
                p.copy_(torch.log(0.5 + 7 * torch.rand(p.shape, generator=generator)))
            elif p.ndim == 1:
                p.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 0.5))
            else:
                p.copy_(1.5 * noise / p.shape[-1] ** 0.5)
    return module.eval()


def in_float64(monkeypatch: pytest.MonkeyPatch, modeling: ModuleType) -> None:
    """Make an HF modeling file compute in float64 where it asks for float32."""

    class Double:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(modeling, "torch", Double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def sequence(specs: Sequence[Mapping[str, StateSpec]], poison: bool = True) -> SequenceState:
    """Fresh state; what a window must not read (the copies beside the committed ones) is NaN."""
    state = SequenceState(specs, 4096, CPU)
    if poison:
        for layer, group in enumerate(specs):
            for name, spec in group.items():
                if spec.kind == "recurrent":
                    state.back(layer, name).fill_(float("nan"))
                elif spec.kind == "ring":
                    state.tensor(layer, name).fill_(float("nan"))
    return state


def frame(
    specs: Mapping[str, BufferSpec],
    n_tokens: int,
    state: SequenceState,
    *,
    keep_inputs: bool = True,
    n_active: int = 1,
    layer: int = 0,
) -> Frame:
    """A frame full of NaN for one layer, at the end of the state's tokens."""
    own = {name: (layer,) for name, spec in specs.items() if spec.per_layer}
    made = Frame(n_tokens, n_active, specs, own, state, CPU, keep_inputs=keep_inputs)
    for tensor in made.tensors().values():
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0)
    made.start = state.length
    return made


def run(parts: Sequence[Part], on: Frame) -> None:
    """Run parts in order; a buffer is poisoned once no later part reads it."""
    for i, part in enumerate(parts):
        part.run(on)
        later = {name for p in parts[i + 1 :] for name in p.reads}
        for name in set(part.reads) - later - set(part.writes):
            tensor = on.tensors().get(name)
            if tensor is not None and tensor.dtype.is_floating_point:
                tensor.fill_(float("nan"))


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and bits; NaN is never equal, so a leaked NaN fails."""
    return a.shape == b.shape and bool(torch.equal(a, b))
