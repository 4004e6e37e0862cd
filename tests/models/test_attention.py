"""The attention mixer against transformers' attention modules, in windows with rejected tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from transformers import Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from strata.core.errors import FormatError, SettingError
from strata.kernels.kv_quant import decode
from strata.kernels.ops import reference_ops
from strata.models import rotary
from strata.models.attention import Attention
from strata.models.kv import KvCache
from strata.models.roles import Roles
from strata.models.spec import AttentionSpec
from tests.models.harness import (
    assert_parts_touch_what_they_declare,
    assert_within,
    f32_weight,
    fill,
    make_frame,
    poisoned_state,
    run_at_once,
    run_windows,
    schedule,
)

D, T = 48, 70


def causal_mask(n: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive [1, 1, n, n] as transformers' eager attention takes it."""
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    if window is not None:
        seen &= torch.ones(n, n, dtype=torch.bool).triu(1 - window)
    mask = torch.zeros(n, n, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return mask[None, None]


def roles_of(module: torch.nn.Module) -> dict[str, object]:
    """Our roles from a transformers attention module (plain norm weights)."""
    roles: dict[str, object] = {}
    for ours in ("q", "k", "v", "o"):
        linear = getattr(module, f"{ours}_proj")
        roles[f"attn.{ours}"] = f32_weight(linear.weight)
        if linear.bias is not None:
            roles[f"attn.{ours}_bias"] = linear.bias.data
    for ours in ("q_norm", "k_norm"):
        if hasattr(module, ours):
            roles[f"attn.{ours}"] = getattr(module, ours).weight.data
    if hasattr(module, "sinks"):
        roles["attn.sinks"] = module.sinks.data
    return roles


@dataclass
class Case:
    """A transformers module, what it computes for x, and our spec and weights of it."""

    module: torch.nn.Module
    embedding: torch.nn.Module
    spec: AttentionSpec
    eps: float

    def expected(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The module over the whole sequence at once."""
        positions = torch.arange(len(x_TD))[None]
        mask = causal_mask(len(x_TD), self.spec.window_tokens, x_TD.dtype)
        with torch.no_grad():
            cos_sin = self.embedding(x_TD[None], positions)
            return self.module(x_TD[None], cos_sin, mask)[0][0]

    def mixer(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Attention:
        """Our mixer, at a layer that is not the first."""
        roles: Roles = roles_of(self.module)  # type: ignore[assignment]
        return Attention(2, self.spec, D, self.eps, roles, reference_ops(dtype), kv_dtype or dtype)


def qwen3_moe(dtype: torch.dtype) -> Case:
    """q/k norms, grouped heads, full rotary."""
    config = Qwen3MoeConfig(
        hidden_size=D, num_attention_heads=6, num_key_value_heads=2, head_dim=16, rope_theta=1e4
    )
    config._attn_implementation = "eager"
    module = modeling_qwen3_moe.Qwen3MoeAttention(config, 0)
    fill(module, 1, dtype, 2.0)
    spec = AttentionSpec(6, 2, 16, rotary.plain(1e4, 16), 16**-0.5, qk_norm=True)
    embedding = modeling_qwen3_moe.Qwen3MoeRotaryEmbedding(config)
    return Case(module, embedding, spec, config.rms_norm_eps)


def glm4_moe(dtype: torch.dtype) -> Case:
    """Biases, q/k norms, rotary over half of the head."""
    config = Glm4MoeConfig(
        hidden_size=D,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    )
    config._attn_implementation = "eager"
    module = modeling_glm4_moe.Glm4MoeAttention(config, 0)
    fill(module, 2, dtype, 2.0)
    spec = AttentionSpec(4, 2, 16, rotary.plain(1e4, 8), 16**-0.5, bias=True, qk_norm=True)
    embedding = modeling_glm4_moe.Glm4MoeRotaryEmbedding(config)
    return Case(module, embedding, spec, config.rms_norm_eps)


def gpt_oss(dtype: torch.dtype, layer: int) -> Case:
    """Biases everywhere, sinks, YaRN without rounding; even layers slide over 12 tokens."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    }
    config = GptOssConfig(
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=12,
        rope_parameters=yarn,
    )
    config._attn_implementation = "eager"
    module = modeling_gpt_oss.GptOssAttention(config, layer)
    fill(module, 3, dtype, 2.0)
    frequencies = rotary.yarn(150000.0, 16, 4.0, 1024, truncate=False)
    window = module.sliding_window
    assert (window == 12) == (layer == 0)
    spec = AttentionSpec(
        6, 2, 16, frequencies, 0.25, bias=True, o_bias=True, sinks=True, window_tokens=window
    )
    return Case(module, modeling_gpt_oss.GptOssRotaryEmbedding(config), spec, 1e-6)


CASES = {
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "gpt_oss_sliding": lambda dtype: gpt_oss(dtype, 0),
    "gpt_oss_full": lambda dtype: gpt_oss(dtype, 1),
}


def _x(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(T, D).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, dtype: torch.dtype) -> None:
    """Expectation: transformers 5.24 over all tokens; once for the chunk, once in windows."""
    case, x = CASES[name](dtype), _x(dtype)
    expected = case.expected(x)
    mixer = case.mixer(dtype)
    at_once = run_at_once(mixer, x)
    assert_within(at_once, expected)
    for seed, first in ((1, 0), (2, 30)):
        out = run_windows(mixer, x, list(schedule(T, seed, first)))
        assert torch.equal(out, at_once), "the cut into windows changed a bit"


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
def test_half_precision_cache(kv_dtype: torch.dtype) -> None:
    """Expectation: the bits of a chunk in any cut, and transformers within the cache's rounding."""
    case, x = qwen3_moe(torch.float32), _x(torch.float32)
    mixer = case.mixer(torch.float32, kv_dtype)
    assert mixer.state()["k"].dtype == kv_dtype
    at_once = run_at_once(mixer, x)
    assert torch.equal(run_windows(mixer, x, list(schedule(T, 3))), at_once)
    assert_within(at_once, case.expected(x), 2 * torch.finfo(kv_dtype).eps)


@pytest.mark.parametrize("kv_dtype, room", [(torch.int8, 0.02), (torch.uint8, 0.3)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss_sliding"])
def test_encoded_cache(name: str, kv_dtype: torch.dtype, room: float) -> None:
    """Expectation: the bits of a chunk in any cut with rejected tokens; transformers within two
    steps of the codes, a step being 1/127 or 1/8 of a head's largest number."""
    case, x = CASES[name](torch.float32), _x(torch.float32)
    mixer = case.mixer(torch.float32, kv_dtype)
    at_once = run_at_once(mixer, x)
    assert torch.equal(run_windows(mixer, x, list(schedule(T, 3))), at_once)
    assert_within(at_once, case.expected(x), room)


def test_encoded_cache_is_attention_over_decoded_numbers() -> None:
    """Expectation: an f16 cache with the codes' decoded numbers in it, bit for bit."""
    case, x = qwen3_moe(torch.float32), _x(torch.float32)
    codes, halves = (case.mixer(torch.float32, dtype) for dtype in (torch.int8, torch.float16))
    states = [poisoned_state(mixer, T) for mixer in (codes, halves)]
    outs = []
    for mixer, state in zip((codes, halves), states, strict=True):
        frame = make_frame(mixer, state, T, D, whole=True)
        frame["x"].copy_(x)
        for part in mixer.parts():
            if part.name == "attention" and mixer is halves:
                for name in "kv":
                    decoded = decode(
                        states[0].tensor(2, name), states[0].tensor(2, f"{name}_scale")
                    )
                    state.tensor(2, name).copy_(decoded)
            part.run(frame)
        outs.append(frame["mixer_out"].clone())
    assert torch.equal(outs[0], outs[1])


def test_heads_too_odd_for_codes_are_refused() -> None:
    """20 numbers share scales in fours."""
    with pytest.raises(SettingError, match="--kv q4: heads of 20 numbers would need a scale for"):
        KvCache(0, 2, 20, torch.uint8)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("name", CASES)
def test_parts_touch_what_they_declare(name: str, kv_dtype: torch.dtype | None) -> None:
    """Expectation: the names a part asks for are its reads and writes."""
    mixer = CASES[name](torch.float32).mixer(torch.float32, kv_dtype)
    assert_parts_touch_what_they_declare(mixer, _x(torch.float32)[:12], 7)


def test_pairs_and_half_rotary_agree_on_permuted_weights() -> None:
    """Expectation: rows of q and k permuted from halves to pairs give the same attention.

    That is how llama.cpp stores the "half" models it rotates as pairs.
    """
    case, x = gpt_oss(torch.float64, 1), _x(torch.float64)
    half = run_at_once(case.mixer(torch.float64), x)
    order = torch.arange(16).view(2, 8).t().reshape(-1)
    for linear in (case.module.q_proj, case.module.k_proj):
        for p in (linear.weight, linear.bias):
            p.data.copy_(p.data.view(-1, 16, *p.shape[1:])[:, order].reshape(p.shape))
    pairs = dataclasses.replace(case.spec.rotary, pairing="pairs")
    case.spec = dataclasses.replace(case.spec, rotary=pairs)
    out = run_at_once(case.mixer(torch.float64), x)
    torch.testing.assert_close(out, half, rtol=1e-10, atol=1e-10)


def test_missing_and_misshapen_weights_are_refused() -> None:
    """Expectation: FormatError with the role and both shapes."""
    case = qwen3_moe(torch.float32)
    roles = roles_of(case.module)
    ops = reference_ops()
    narrow = dataclasses.replace(case.spec, n_kv_heads=3)
    with pytest.raises(FormatError, match=r"attn.k.*\[32, 48\].*\[48, 48\]"):
        Attention(0, narrow, D, 1e-6, roles, ops, torch.float32)  # type: ignore[arg-type]
    del roles["attn.q_norm"]
    with pytest.raises(FormatError, match="attn.q_norm"):
        Attention(0, case.spec, D, 1e-6, roles, ops, torch.float32)  # type: ignore[arg-type]
