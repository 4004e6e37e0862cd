"""gdn: the reference against transformers' own functions, torch's convolution, and other splits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from strata.kernels import gdn
from tests.models.kit import in_float64

H, J, K, V = 2, 6, 12, 20
KEY_HEAD_J = torch.arange(J) // (J // H)
DTYPES = [torch.float32, torch.float64]


def inputs(n_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, keep, beta of random tokens."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(n_tokens, *shape, generator=generator, dtype=torch.float64)

    q, k = gdn.l2_norm(draw(H, K)) / K**0.5, gdn.l2_norm(draw(H, K))
    made = [q, k, draw(J, V), torch.exp(-draw(J).abs()), torch.sigmoid(draw(J))]
    return [t.to(dtype) for t in made]


def start(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(J, K, V, generator=generator, dtype=torch.float64).to(dtype)


def run(args: list[torch.Tensor], state_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the new state, from a state_out full of NaN."""
    state_out = torch.full_like(state_in, float("nan"))
    o = gdn.recurrence(*args, KEY_HEAD_J, state_in, state_out)
    return o, state_out


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_recurrence_equals_transformers_token_rule(
    dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch_recurrent_gated_delta_rule, which takes q and k unscaled and log decays."""
    q, k, v, keep, beta = inputs(40, dtype)
    if dtype == torch.float64:
        in_float64(monkeypatch, hf)
    o, state = run([q, k, v, keep, beta], start(dtype))
    expected_o, expected_state = hf.torch_recurrent_gated_delta_rule(
        (q * K**0.5)[None],
        k[None],
        v[None],
        g=keep.log()[None],
        beta=beta[None],
        initial_state=start(dtype)[None],
        output_final_state=True,
    )
    torch.testing.assert_close(o, expected_o[0], rtol=0, atol=atol)
    torch.testing.assert_close(state, expected_state[0], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_split_of_the_tokens_has_the_same_bits(dtype: torch.dtype) -> None:
    """Against one run over 500 tokens: pieces, and the state updated in place."""
    args = inputs(500, dtype)
    expected_o, expected_state = run(args, start(dtype))
    state, pieces = start(dtype), []
    cuts = [0, 1, 2, 9, 100, 499, 500]
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        pieces.append(gdn.recurrence(*[t[a:b] for t in args], KEY_HEAD_J, state, state))
    assert torch.equal(torch.cat(pieces), expected_o)
    assert torch.equal(state, expected_state)


def test_value_heads_use_the_key_heads_they_are_told() -> None:
    """Against the same op with the key heads laid out one per value head beforehand."""
    q, k, v, keep, beta = inputs(10, torch.float64)
    order = torch.tensor([1, 0, 1, 1, 0, 0])
    expected, got = torch.empty_like(start(torch.float64)), torch.empty_like(start(torch.float64))
    a = gdn.recurrence(
        q[:, order], k[:, order], v, keep, beta, torch.arange(J), start(torch.float64), expected
    )
    b = gdn.recurrence(q, k, v, keep, beta, order, start(torch.float64), got)
    assert torch.equal(a, b) and torch.equal(expected, got)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv_equals_torch(dilation: int, taps: int) -> None:
    """Against F.conv1d with groups and dilation, then silu."""
    generator = torch.Generator().manual_seed(8)
    n_past, width = dilation * (taps - 1), 10
    columns = torch.randn(n_past + 30, width, generator=generator, dtype=torch.float64)
    taps_PN = torch.randn(taps, width, generator=generator, dtype=torch.float64)
    conv = F.conv1d(columns.t(), taps_PN.t().unsqueeze(1), groups=width, dilation=dilation)
    got = gdn.causal_conv(columns[:n_past], columns[n_past:], taps_PN, dilation)
    torch.testing.assert_close(got, F.silu(conv).t(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_has_the_bits_of_the_same_token_among_500(dtype: torch.dtype) -> None:
    """Against the functions on 500 tokens at once; widths are no multiples of a vector."""
    generator = torch.Generator().manual_seed(9)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, taps, past = draw(500, 37), draw(4, 37), draw(3, 37)
    columns = torch.cat([past, x])
    a, b, decay, bias = draw(500, J), draw(500, J), -draw(J).abs(), draw(J)
    o, z, w = draw(500, J, V), draw(500, J, V), draw(V)
    heads = draw(500, 3, 7)
    whole = (
        gdn.causal_conv(past, x, taps),
        *gdn.gates(a, b, decay, bias),
        gdn.l2_norm(heads),
        gdn.gated_norm(o, z, w, 1e-6, "silu"),
        gdn.gated_norm(o, z, w, 1e-6, "sigmoid"),
    )
    for t in (0, 1, 250, 499):
        one = slice(t, t + 1)
        alone = (
            gdn.causal_conv(columns[t : t + 3], x[one].clone(), taps),
            *gdn.gates(a[one].clone(), b[one].clone(), decay, bias),
            gdn.l2_norm(heads[one].clone()),
            gdn.gated_norm(o[one].clone(), z[one].clone(), w, 1e-6, "silu"),
            gdn.gated_norm(o[one].clone(), z[one].clone(), w, 1e-6, "sigmoid"),
        )
        assert all(torch.equal(p, q[one]) for p, q in zip(alone, whole, strict=True))


def test_gates_at_the_ends() -> None:
    """By hand: a far below zero keeps everything, far above forgets; b likewise for writing."""
    big = torch.tensor([[-1000.0, 1000.0]], dtype=torch.float64)
    keep, beta = gdn.gates(big, big, torch.tensor([-2.0, -2.0]), torch.zeros(2))
    assert keep.tolist() == [[1.0, 0.0]] and beta.tolist() == [[0.0, 1.0]]
