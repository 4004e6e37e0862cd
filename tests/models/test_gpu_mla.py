"""The GPU's latent attention mixer against the plain one, windows of several sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from strata.kernels.ops import reference_ops
from strata.kernels.weight import Weight
from strata.memory.frame import Frame
from strata.memory.state import SequenceState
from strata.models.gpu.frame import DeviceState, GpuFrame
from strata.models.gpu.mla import GpuMla
from strata.models.gpu.roles import to_device
from strata.models.gpu.rows import row_specs
from strata.models.mla import Mla
from strata.models.rotary import plain
from strata.models.spec import MlaSpec

D, H, NOPE, ROPE, V, RANK = 48, 2, 16, 8, 16, 32


def weight(n_rows: int, n_cols: int, make: torch.Generator) -> Weight:
    values = torch.randn(n_rows, n_cols, generator=make) * n_cols**-0.5
    return Weight("F32", n_rows, n_cols, values.view(torch.uint8))


def roles(q_rank: int | None, make: torch.Generator) -> dict[str, Weight | torch.Tensor]:
    """Random weights; k_b as GGUF files give it, a plain tensor."""
    shapes = {"kv_a": (RANK + ROPE, D), "o": (D, H * V), "v_b": (H * V, RANK)}
    q = (H * (NOPE + ROPE), D if q_rank is None else q_rank)
    shapes |= {"q": q} if q_rank is None else {"q_a": (q_rank, D), "q_b": q}
    found: dict[str, Weight | torch.Tensor] = {
        f"mla.{name}": weight(*shape, make) for name, shape in shapes.items()
    }
    found["mla.k_b"] = torch.randn(H * NOPE, RANK, generator=make) * RANK**-0.5
    found["mla.kv_a_norm"] = torch.rand(RANK, generator=make) + 0.5
    if q_rank is not None:
        found["mla.q_a_norm"] = torch.rand(q_rank, generator=make) + 0.5
    return found


@pytest.mark.parametrize(("q_rank", "windows"), [(None, ((1, 1),)), (24, ((2, 1), (1, 1)))])
def test_windows_equal_the_plain_mixer(
    q_rank: int | None, windows: tuple[tuple[int, int], ...], triton_device: torch.device
) -> None:
    """Expectation: models/mla on the CPU. Of a window of 2 one token stays, then one more comes."""
    d, make = triton_device, torch.Generator().manual_seed(7)
    spec = MlaSpec(H, q_rank, RANK, NOPE, ROPE, V, plain(1e4, ROPE, "pairs"), 0.2)
    weights = roles(q_rank, make)
    on_cpu = Mla(0, spec, D, 1e-6, weights, reference_ops(), torch.float32)
    mixer = GpuMla(0, spec, 1e-6, to_device(weights, d), torch.float32, 64, d)
    plain_state = SequenceState([on_cpu.state()], 64, torch.device("cpu"))
    state = DeviceState([mixer.state()], 64, d)
    extra = {**row_specs("x", D), **row_specs("mixer_out", D)}
    for size, kept in windows:
        x = torch.randn(size, D, generator=make)
        start = plain_state.length
        wanted = Frame(size, 1, {**on_cpu.buffers(), **extra}, {}, plain_state, torch.device("cpu"))
        got = GpuFrame(size, 1, {**mixer.buffers(), **extra}, {}, state, d)
        wanted.start = start
        got.pos_T.copy_(torch.arange(start, start + size, dtype=torch.int32))
        for frame, one in ((wanted, on_cpu), (got, mixer)):
            frame["x"].copy_(x)
            for part in one.parts():
                part.run(frame)
        torch.testing.assert_close(
            got["mixer_out"].cpu(), wanted["mixer_out"], rtol=2e-4, atol=2e-5
        )
        for one_state in (plain_state, state):
            one_state.tokens.extend([0] * kept)
