"""router: experts and weights against transformers' routers, ties, window independence."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from strata.kernels.router import route
from tests.models.kit import in_float64

D, E, K = 20, 24, 5
DTYPES = [(torch.float32, 1e-6), (torch.float64, 1e-13)]


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(
    modeling: ModuleType,
    router: Any,
    dtype: torch.dtype,
    atol: float,
    monkeypatch: pytest.MonkeyPatch,
    **rule: Any,
) -> None:
    """Feed the router's own logits to route and compare experts (as sets) and their weights."""
    if dtype == torch.float64:
        in_float64(monkeypatch, modeling)
    with torch.no_grad():
        logits, weight, expert = router.to(dtype)(draw(200, D).to(dtype))
    got_expert, got_weight = route(logits.to(dtype), n_active=K, **rule)
    assert got_expert.dtype == torch.int32 and got_expert.shape == (200, K)
    expected, got = torch.zeros(200, E, dtype=dtype), torch.zeros(200, E, dtype=dtype)
    expected.scatter_(1, expert, weight.to(dtype))
    got.scatter_(1, got_expert.long(), got_weight)
    assert torch.equal(got != 0, expected != 0)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_as_qwen3_moe(
    normalize: bool, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Qwen3MoeTopKRouter."""
    config = Qwen3MoeConfig(
        hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalize
    )
    router = qwen3.Qwen3MoeTopKRouter(config)
    router.weight.data = draw(E, D, seed=2)
    rule = {"scoring": "softmax", "normalize": normalize}
    compare(qwen3, router, dtype, atol, monkeypatch, **rule)


def test_softmax_as_qwen4_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Qwen4ExpTextTopKRouter with its defaults (weights renormalised)."""
    router = qwen4.Qwen4ExpTextTopKRouter(
        Qwen4ExpTextConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K)
    )
    router.weight.data = draw(E, D, seed=2)
    rule = {"scoring": "softmax", "normalize": True}
    compare(qwen4, router, torch.float64, 1e-13, monkeypatch, **rule)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
def test_softmax_over_the_chosen_as_gpt_oss(
    dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against GptOssTopKRouter; its logits already hold the bias."""
    router = gpt_oss.GptOssTopKRouter(
        GptOssConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=K)
    )
    router.weight.data, router.bias.data = draw(E, D, seed=2), draw(E, seed=3)
    rule = {"scoring": "softmax_topk", "normalize": False}
    compare(gpt_oss, router, dtype, atol, monkeypatch, **rule)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 3), (12, 3)])
def test_sigmoid_in_groups_as_deepseek_v3(
    groups: tuple[int, int],
    normalize: bool,
    dtype: torch.dtype,
    atol: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against DeepseekV3TopkRouter with a correction that changes the selection."""
    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=groups[0],
        topk_group=groups[1], norm_topk_prob=normalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = deepseek.DeepseekV3TopkRouter(config)
    router.weight.data, router.e_score_correction_bias = draw(E, D, seed=2), draw(E, seed=3) * 0.3
    rule = {
        "scoring": "sigmoid", "normalize": normalize, "scale": 2.5, "n_groups": groups[0],
        "groups_kept": groups[1], "correction_E": router.e_score_correction_bias.to(dtype),
    }  # fmt: skip
    compare(deepseek, router, dtype, atol, monkeypatch, **rule)


def test_sigmoid_as_glm4_moe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Glm4MoeTopkRouter."""
    config = Glm4MoeConfig(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.7,
    )  # fmt: skip
    router = glm.Glm4MoeTopkRouter(config)
    router.weight.data, router.e_score_correction_bias = draw(E, D, seed=2), draw(E, seed=3) * 0.3
    rule = {"scoring": "sigmoid", "normalize": True, "scale": 1.7}
    rule["correction_E"] = router.e_score_correction_bias.double()
    compare(glm, router, torch.float64, 1e-13, monkeypatch, **rule)


def test_ranks_fall_by_score_and_ties_go_to_the_lower_expert() -> None:
    """By hand: experts 1, 3 and 4 share the best score, 0 and 2 the next."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0]])
    for scoring in ("softmax", "softmax_topk", "sigmoid"):
        expert, weight = route(logits, n_active=4, scoring=scoring, normalize=True)
        assert expert.tolist() == [[1, 3, 4, 0]]
        assert weight[0, 0] == weight[0, 1] == weight[0, 2] > weight[0, 3]


def test_tied_groups_go_to_the_lower_group() -> None:
    """By hand: three groups with the same two best scores, two are kept."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0, 1.0]])
    expert, _ = route(
        logits, n_active=3, scoring="sigmoid", normalize=True, n_groups=3, groups_kept=2
    )
    assert expert.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_has_the_bits_of_the_same_token_among_500(
    scoring: Any, dtype: torch.dtype
) -> None:
    """Against 500 tokens at once, for several numbers of experts and ranks."""
    for n_experts, n_active in ((7, 2), (24, 5), (128, 8), (512, 10)):
        logits = draw(500, n_experts).to(dtype)
        for normalize in (True, False):
            rule = {"n_active": n_active, "scoring": scoring, "normalize": normalize}
            expert, weight = route(logits, **rule)
            for t in (0, 1, 250, 499):
                one_expert, one_weight = route(logits[t : t + 1].clone(), **rule)
                assert torch.equal(one_expert[0], expert[t])
                assert torch.equal(one_weight[0], weight[t])


@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
def test_nan_logits_give_nan_weights_and_valid_experts(scoring: Any) -> None:
    """A NaN must reach the output (where it is reported) and never become an address."""
    logits = draw(2, 9)
    logits[1] = float("nan")
    expert, weight = route(logits, n_active=3, scoring=scoring, normalize=True)
    assert weight[1].isnan().all() and not weight[0].isnan().any()
    assert expert.min() >= 0 and expert.max() < 9


def test_large_logits_do_not_overflow() -> None:
    """By hand: a lead of 200 takes all the weight, also near the end of f32's exponent range."""
    logits = torch.tensor([[1000.0, 800.0, -1000.0]])
    _, weight = route(logits, n_active=2, scoring="softmax", normalize=True)
    assert weight.tolist() == [[1.0, 0.0]]
