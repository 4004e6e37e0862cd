"""The latent attention mixer against transformers' DeepSeek V3 attention."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from strata.core.errors import FormatError
from strata.kernels.ops import reference_ops
from strata.models import rotary
from strata.models.mla import Mla
from strata.models.spec import MlaSpec
from tests.models.harness import (
    assert_parts_touch_what_they_declare,
    assert_within,
    f32_weight,
    fill,
    run_at_once,
    run_windows,
    schedule,
)
from tests.models.test_attention import causal_mask

D, T, H, NOPE, ROPE, V, RANK = 48, 150, 4, 12, 8, 10, 20
YARN = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8}


class Case:
    """A transformers DeepSeek V3 attention layer, with or without a low-rank query and YaRN."""

    def __init__(self, dtype: torch.dtype, q_rank: int | None, yarn: bool) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4}
        if yarn:
            rope = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}  # type: ignore[dict-item]
            rope["original_max_position_embeddings"] = 256  # type: ignore[assignment]
        config = DeepseekV3Config(
            hidden_size=D,
            num_attention_heads=H,
            num_key_value_heads=H,
            q_lora_rank=q_rank,
            kv_lora_rank=RANK,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=V,
            max_position_embeddings=1024,
            rope_parameters=rope,
        )
        config._attn_implementation = "eager"
        self.module = modeling_deepseek_v3.DeepseekV3Attention(config, 0)
        fill(self.module, 3, dtype, 2.0)
        self.embedding = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
        self.dtype = dtype
        scale = (NOPE + ROPE) ** -0.5
        frequencies = rotary.plain(1e4, ROPE, "pairs")
        if yarn:
            frequencies = rotary.yarn(1e4, ROPE, original_context=256, pairing="pairs", **YARN)  # type: ignore[arg-type]
            scale *= rotary.yarn_mscale(4.0, 0.8) ** 2
        self.spec = MlaSpec(H, q_rank, RANK, NOPE, ROPE, V, frequencies, scale)

    def expected(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The module over the whole sequence at once."""
        with torch.no_grad():
            cos_sin = self.embedding(x_TD[None], torch.arange(len(x_TD))[None])
            mask = causal_mask(len(x_TD), None, x_TD.dtype)
            return self.module(x_TD[None], cos_sin, mask)[0][0]

    def roles(self) -> dict[str, object]:
        """Our roles; kv_b is split per head into its key and its value rows."""
        m = self.module
        k_b, v_b = m.kv_b_proj.weight.data.view(H, NOPE + V, RANK).split([NOPE, V], 1)
        roles: dict[str, object] = {
            "mla.kv_a": f32_weight(m.kv_a_proj_with_mqa.weight),
            "mla.kv_a_norm": m.kv_a_layernorm.weight.data,
            "mla.k_b": k_b,
            "mla.v_b": v_b,
            "mla.o": f32_weight(m.o_proj.weight),
        }
        if m.q_lora_rank is None:
            return roles | {"mla.q": f32_weight(m.q_proj.weight)}
        return roles | {
            "mla.q_a": f32_weight(m.q_a_proj.weight),
            "mla.q_a_norm": m.q_a_layernorm.weight.data,
            "mla.q_b": f32_weight(m.q_b_proj.weight),
        }

    def mixer(self, kv_dtype: torch.dtype | None = None) -> Mla:
        """Our layer from the same numbers."""
        ops = reference_ops(self.dtype)
        return Mla(1, self.spec, D, 1e-6, self.roles(), ops, kv_dtype or self.dtype)  # type: ignore[arg-type]


def _x(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(T, D).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q_rank,yarn", [(None, False), (24, False), (24, True)])
def test_equals_transformers(dtype: torch.dtype, q_rank: int | None, yarn: bool) -> None:
    """Expectation: transformers 5.24 (expanded keys and values) within 1e-5, in any cut."""
    case, x = Case(dtype, q_rank, yarn), _x(dtype)
    mixer = case.mixer()
    at_once = run_at_once(mixer, x)
    assert_within(at_once, case.expected(x))
    for seed, first in ((1, 0), (2, 100)):
        out = run_windows(mixer, x, list(schedule(T, seed, first)))
        assert torch.equal(out, at_once), "the cut into windows changed a bit"


def test_half_precision_cache() -> None:
    """Expectation: the bits of a chunk in any cut, and transformers within float16's rounding."""
    case, x = Case(torch.float32, 24, True), _x(torch.float32)
    mixer = case.mixer(torch.float16)
    at_once = run_at_once(mixer, x)
    assert torch.equal(run_windows(mixer, x, list(schedule(T, 3, 64))), at_once)
    assert_within(at_once, case.expected(x), 2e-3)


def test_matrices_instead_of_tensors() -> None:
    """Expectation: k_b and v_b as Weights [H * rows, rank] give the bits of the tensors."""
    case, x = Case(torch.float32, None, False), _x(torch.float32)[:20]
    roles = case.roles()
    for role in ("mla.k_b", "mla.v_b"):
        roles[role] = f32_weight(roles[role].flatten(0, 1))  # type: ignore[attr-defined]
    mixer = Mla(1, case.spec, D, 1e-6, roles, reference_ops(), torch.float32)  # type: ignore[arg-type]
    assert torch.equal(run_at_once(mixer, x), run_at_once(case.mixer(), x))


def test_state_is_one_row_per_token() -> None:
    """Expectation: DeepSeek's point, kv_lora_rank + rope_dim numbers a token."""
    assert Case(torch.float32, None, False).mixer().state()["latent"].n_bytes(1000) == 1000 * 28 * 4


def test_parts_touch_what_they_declare() -> None:
    """Expectation: the names a part asks for are its reads and writes."""
    mixer = Case(torch.float32, 24, False).mixer()
    assert_parts_touch_what_they_declare(mixer, _x(torch.float32)[:12], 7)


def test_misshapen_key_matrix_is_refused() -> None:
    """Expectation: FormatError with the role and both shapes."""
    case = Case(torch.float32, None, False)
    roles = case.roles()
    roles["mla.k_b"] = roles["mla.k_b"][:, 1:]  # type: ignore[index]
    with pytest.raises(FormatError, match=r"mla.k_b.*\[4, 11, 20\].*\[48, 20\]"):
        Mla(1, case.spec, D, 1e-6, roles, reference_ops(), torch.float32)  # type: ignore[arg-type]
