"""Router, shared expert and dense feed-forward as parts, against transformers' blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from strata.core.errors import FormatError
from strata.kernels.ops import reference_ops
from strata.memory.frame import BufferSpec, Frame
from strata.models.moe import DenseFfn, MoeFfn
from strata.models.spec import DenseFfnSpec, MoeSpec
from tests.models.kit import bits_equal, frame, in_float64, randomize, sequence, weight

D, E, K, F, SHARED = 20, 12, 3, 10, 14
QWEN = MoeSpec(E, K, F, "softmax", True, shared_width=SHARED, shared_gate=True)


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frame_of(x_TD: torch.Tensor, n_active: int = K) -> Frame:
    """A window over ffn_x with n_active routed rows a token."""
    wide = BufferSpec((D,), x_TD.dtype)
    specs = {
        "ffn_x": wide,
        "ffn_out": wide,
        "shared_out": wide,
        "expert": BufferSpec((), torch.int32, lead="R"),
        "weight": BufferSpec((), x_TD.dtype, lead="R"),
    }
    on = frame(specs, len(x_TD), sequence([]), n_active=n_active)
    on["ffn_x"].copy_(x_TD)
    return on


def qwen_block() -> tuple[Any, dict[str, Any]]:
    """HF's block of Qwen4-Exp and its weights under our names."""
    config = Qwen4ExpTextConfig(
        hidden_size=D, num_experts=E, num_experts_per_tok=K, moe_intermediate_size=F,
        shared_expert_intermediate_size=SHARED,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block: Any = randomize(qwen4.Qwen4ExpTextSparseMoeBlock(config), 4)
    return block, {
        "moe.router": weight(block.gate.weight),
        "shared.gate": weight(block.shared_expert.gate_proj.weight),
        "shared.up": weight(block.shared_expert.up_proj.weight),
        "shared.down": weight(block.shared_expert.down_proj.weight),
        "shared.gate_inp": weight(block.shared_expert_gate.weight),
    }


def routed(on: Frame, block: Any, n_active: int = K) -> torch.Tensor:
    """The routed sum of the rows in the frame, with HF's expert matrices."""
    y_TD = torch.zeros_like(on["ffn_x"])
    for row, (expert, w) in enumerate(zip(on["expert"].tolist(), on["weight"], strict=True)):
        x_D = on["ffn_x"][row // n_active]
        gate, up = (block.experts.gate_up_proj[expert] @ x_D).chunk(2)
        h = torch.nn.functional.silu(gate) * up
        y_TD[row // n_active] += w * (block.experts.down_proj[expert] @ h)
    return y_TD


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_router_and_shared_expert_complete_the_block_of_qwen4_exp(
    dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Qwen4ExpTextSparseMoeBlock: its output = routed rows by our routing + our shared."""
    block, roles = qwen_block()
    ffn = MoeFfn(0, QWEN, roles, reference_ops(dtype))
    if dtype == torch.float64:
        in_float64(monkeypatch, qwen4)
    on = frame_of(draw(9, D).to(dtype))
    shared = ffn.shared_part()
    assert shared is not None
    ffn.router_part().run(on)
    shared.run(on)
    with torch.no_grad():
        block = block.to(dtype)
        expected = block(on["ffn_x"][None])[0]
        got = routed(on, block) + on["shared_out"]
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_a_shared_expert_without_gate_as_in_deepseek_v3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against DeepseekV3MLP; and its router with correction and groups."""
    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, moe_intermediate_size=SHARED,
    )  # fmt: skip
    router: Any = deepseek.DeepseekV3TopkRouter(config)
    router.weight.data, router.e_score_correction_bias = draw(E, D, seed=2), draw(E, seed=3) * 0.3
    shared: Any = randomize(deepseek.DeepseekV3MLP(config, intermediate_size=SHARED), 5)
    spec = MoeSpec(
        E, K, F, "sigmoid", True, scale=2.5, correction=True, n_groups=4, groups_kept=2,
        shared_width=SHARED,
    )  # fmt: skip
    roles = {
        "moe.router": weight(router.weight),
        "moe.correction": router.e_score_correction_bias,
        "shared.gate": weight(shared.gate_proj.weight),
        "shared.up": weight(shared.up_proj.weight),
        "shared.down": weight(shared.down_proj.weight),
    }
    ffn = MoeFfn(0, spec, roles, reference_ops(torch.float64))
    in_float64(monkeypatch, deepseek)
    on = frame_of(draw(9, D).double())
    part = ffn.shared_part()
    assert part is not None
    part.run(on)
    ffn.router_part().run(on)
    with torch.no_grad():
        expected_shared = shared.double()(on["ffn_x"])
        _, weights, experts = router.double()(on["ffn_x"])
    torch.testing.assert_close(on["shared_out"], expected_shared, rtol=0, atol=1e-12)
    by_expert = torch.zeros(9, E, dtype=torch.float64).scatter(1, experts, weights)
    got = torch.zeros(9, E, dtype=torch.float64)
    got.scatter_(1, on["expert"].view(9, K).long(), on["weight"].view(9, K))
    torch.testing.assert_close(got, by_expert, rtol=0, atol=1e-12)


def test_a_router_with_bias_as_in_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against GptOssTopKRouter, rank by rank; there is no shared expert."""
    config = GptOssConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=K)
    router: Any = gpt_oss.GptOssTopKRouter(config)
    router.weight.data, router.bias.data = draw(E, D, seed=2), draw(E, seed=3)
    spec = MoeSpec(E, K, F, "softmax_topk", False, router_bias=True)
    roles = {"moe.router": weight(router.weight), "moe.router_bias": router.bias.detach()}
    ffn = MoeFfn(0, spec, roles, reference_ops(torch.float64))
    assert ffn.shared_part() is None
    on = frame_of(draw(9, D).double())
    ffn.router_part().run(on)
    with torch.no_grad():
        _, weights, experts = router.double()(on["ffn_x"])
    assert on["expert"].view(9, K).tolist() == experts.tolist()
    torch.testing.assert_close(on["weight"].view(9, K), weights, rtol=0, atol=1e-12)


def test_dense_ffn_equals_transformers() -> None:
    """Against Qwen4ExpTextMLP."""
    config = Qwen4ExpTextConfig(hidden_size=D)
    mlp: Any = randomize(qwen4.Qwen4ExpTextMLP(config, intermediate_size=30), 6)
    names = {"ffn.gate": mlp.gate_proj, "ffn.up": mlp.up_proj, "ffn.down": mlp.down_proj}
    roles = {role: weight(linear.weight) for role, linear in names.items()}
    ffn = DenseFfn(0, DenseFfnSpec(30), roles, reference_ops(torch.float64))
    on = frame_of(draw(9, D).double())
    ffn.part().run(on)
    with torch.no_grad():
        expected = mlp.double()(on["ffn_x"])
    torch.testing.assert_close(on["ffn_out"], expected, rtol=0, atol=1e-12)


def test_rows_beyond_a_layers_own_number_of_experts_are_left_alone() -> None:
    """A frame is sized for the layer with the most experts per token; this one uses 3 of 4 rows."""
    _, roles = qwen_block()
    on = frame_of(draw(5, D), n_active=4)
    on["expert"].fill_(-7)
    MoeFfn(0, QWEN, roles, reference_ops()).router_part().run(on)
    assert (on["expert"][: 5 * K] >= 0).all() and (on["expert"][5 * K :] == -7).all()
    assert not on["weight"][: 5 * K].isnan().any() and on["weight"][5 * K :].isnan().all()


def test_one_token_has_the_bits_of_the_same_token_among_300() -> None:
    """Against all tokens in one frame."""
    _, roles = qwen_block()
    ffn = MoeFfn(0, QWEN, roles, reference_ops())
    shared = ffn.shared_part()
    assert shared is not None
    x = draw(300, D)

    def through(rows: slice) -> Frame:
        on = frame_of(x[rows])
        ffn.router_part().run(on)
        shared.run(on)
        return on

    whole = through(slice(0, 300))
    for t in (0, 17, 299):
        one = through(slice(t, t + 1))
        assert bits_equal(one["shared_out"], whole["shared_out"][t : t + 1])
        for name in ("expert", "weight"):
            assert bits_equal(one[name], whole[name][t * K : (t + 1) * K])


def test_missing_and_misshapen_weights_are_named() -> None:
    """The message names the role and what the spec implies."""
    _, roles = qwen_block()
    with pytest.raises(FormatError, match=r"no matrix moe\.router of 12 rows"):
        MoeFfn(0, QWEN, {}, reference_ops())
    roles["shared.down"] = weight(draw(D, SHARED + 1))
    with pytest.raises(FormatError, match=r"shared\.down has shape \[20, 15\].*\[20, 14\]"):
        MoeFfn(0, QWEN, roles, reference_ops())
