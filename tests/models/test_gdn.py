"""Gated DeltaNet as a mixer, against transformers' modules and against itself in other windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as next_modeling
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as exp_modeling
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from strata.core.errors import FormatError
from strata.kernels.ops import reference_ops
from strata.memory.frame import BufferSpec
from strata.memory.state import SequenceState
from strata.models.gdn import Gdn
from strata.models.roles import Roles
from strata.models.spec import GdnSpec
from tests.models.kit import bits_equal, frame, in_float64, randomize, run, sequence, weight

D, HEADS, K_DIM, V_DIM = 24, (2, 6), 12, 20
SPEC = GdnSpec(*HEADS, K_DIM, V_DIM, 4, "grouped", "sigmoid")
EPS = 1e-6


def hf_exp(gate: str) -> torch.nn.Module:
    config = Qwen4ExpTextConfig(
        hidden_size=D, num_hidden_layers=1, layer_types=["linear_attention"], ple_layer_ids=[],
        linear_num_key_heads=HEADS[0], linear_num_value_heads=HEADS[1], linear_key_head_dim=K_DIM,
        linear_value_head_dim=V_DIM, linear_conv_kernel_dim=4, output_gate_type=gate,
        rms_norm_eps=EPS,
    )  # fmt: skip
    return randomize(exp_modeling.Qwen4ExpTextGatedDeltaNet(config, 0), 1)


def roles_of(module: Any) -> dict[str, Any]:
    """The module's weights under our names."""
    return {
        "gdn.qkv": weight(module.in_proj_qkv.weight),
        "gdn.z": weight(module.in_proj_z.weight),
        "gdn.a": weight(module.in_proj_a.weight),
        "gdn.b": weight(module.in_proj_b.weight),
        "gdn.out": weight(module.out_proj.weight),
        "gdn.conv": module.conv1d.weight.detach().squeeze(1),
        "gdn.decay": -module.A_log.detach().double().exp(),
        "gdn.dt_bias": module.dt_bias.detach(),
        "gdn.norm": module.norm.weight.detach(),
    }


def mixer(roles: Roles, spec: GdnSpec = SPEC, dtype: torch.dtype = torch.float64) -> Gdn:
    return Gdn(0, spec, D, EPS, roles, reference_ops(dtype))


def buffers(gdn: Gdn) -> dict[str, BufferSpec]:
    wide = BufferSpec((D,), gdn.ops.dtype)
    return {"x": wide, "mixer_out": wide, **gdn.buffers()}


def step(
    gdn: Gdn, state: SequenceState, x_TD: torch.Tensor, n: int | None = None, keep: bool = True
) -> torch.Tensor:
    """One window over x, of which n tokens are committed (default: all); its output."""
    on = frame(buffers(gdn), x_TD.shape[0], state, keep_inputs=keep)
    on["x"].copy_(x_TD)
    run(gdn.parts(), on)
    n = x_TD.shape[0] if n is None else n
    gdn.commit(on, n)
    state.tokens += [0] * n
    return on["mixer_out"].clone()


def tokens(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_a_prompt_equals_the_hf_module_in_float64(
    gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Qwen4ExpTextGatedDeltaNet (its chunked form) made to compute in float64."""
    module = hf_exp(gate)
    gdn = mixer(roles_of(module), replace(SPEC, output_gate=gate))
    x = tokens(75)
    in_float64(monkeypatch, exp_modeling)
    with torch.no_grad():
        expected = module.double()(x[None])[0]
    got = step(gdn, sequence([gdn.state()]), x, keep=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_a_prompt_equals_the_hf_module_in_float32() -> None:
    """Against Qwen4ExpTextGatedDeltaNet as it is; it sums in another order."""
    module = hf_exp("sigmoid")
    gdn = mixer(roles_of(module), dtype=torch.float32)
    x = tokens(75, torch.float32)
    with torch.no_grad():
        expected = module(x[None])[0]
    got = step(gdn, sequence([gdn.state()]), x, keep=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_qwen3_next_with_its_fused_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against Qwen3NextGatedDeltaNet, whose rows lie per key head as q, k, v.., z.. and b.., a.."""
    config = Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_key_heads=HEADS[0], linear_num_value_heads=HEADS[1], linear_key_head_dim=K_DIM,
        linear_value_head_dim=V_DIM, linear_conv_kernel_dim=4, rms_norm_eps=EPS,
    )  # fmt: skip
    module: Any = randomize(next_modeling.Qwen3NextGatedDeltaNet(config, 0), 2)
    ratio = HEADS[1] // HEADS[0]
    fused = module.in_proj_qkvz.weight.detach().view(HEADS[0], -1, D)
    q, k, v, z = fused.split([K_DIM, K_DIM, ratio * V_DIM, ratio * V_DIM], dim=1)
    b, a = module.in_proj_ba.weight.detach().view(HEADS[0], -1, D).split([ratio, ratio], dim=1)
    parts = {"gdn.qkv": torch.cat([t.reshape(-1, D) for t in (q, k, v)]), "gdn.z": z.reshape(-1, D)}
    parts |= {"gdn.a": a.reshape(-1, D), "gdn.b": b.reshape(-1, D)}
    roles = {
        **{role: weight(rows) for role, rows in parts.items()},
        "gdn.out": weight(module.out_proj.weight),
        "gdn.conv": module.conv1d.weight.detach().squeeze(1),
        "gdn.decay": -module.A_log.detach().double().exp(),
        "gdn.dt_bias": module.dt_bias.detach(),
        "gdn.norm": module.norm.weight.detach(),
    }
    gdn = mixer(roles, replace(SPEC, output_gate="silu"))
    x = tokens(70)
    in_float64(monkeypatch, next_modeling)
    with torch.no_grad():
        expected = module.double()(x[None])[0]
    got = step(gdn, sequence([gdn.state()]), x, keep=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_interleaved_heads_are_grouped_heads_in_another_order() -> None:
    """A GGUF stores value head 3 k + j as head 2 j + k: same outputs from permuted rows."""
    roles = roles_of(hf_exp("sigmoid"))
    n_k, n_v = HEADS
    order = torch.tensor([k * (n_v // n_k) + j for j in range(n_v // n_k) for k in range(n_k)])
    wide = (order[:, None] * V_DIM + torch.arange(V_DIM)).flatten()
    channels = torch.cat([torch.arange(2 * n_k * K_DIM), 2 * n_k * K_DIM + wide])

    def rows(role: str, index: torch.Tensor) -> Any:
        found = roles[role]
        if isinstance(found, torch.Tensor):
            return found[index]
        return replace(found, data=found.data[index])

    moved = {r: rows(r, channels) for r in ("gdn.qkv", "gdn.conv")} | {"gdn.z": rows("gdn.z", wide)}
    moved |= {r: rows(r, order) for r in ("gdn.a", "gdn.b", "gdn.decay", "gdn.dt_bias")}
    out = roles["gdn.out"].data.view(torch.float32)
    moved |= {"gdn.out": weight(out[:, wide]), "gdn.norm": roles["gdn.norm"]}
    grouped, interleaved = mixer(roles), mixer(moved, replace(SPEC, head_order="interleaved"))
    x = tokens(20)
    a = step(grouped, sequence([grouped.state()]), x, keep=False)
    b = step(interleaved, sequence([interleaved.state()]), x, keep=False)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_with_any_commit_have_the_bits_of_one_long_chunk(dtype: torch.dtype) -> None:
    """Against the same tokens in one chunk: outputs, ring and matrices, whatever was rejected."""
    gdn = mixer(roles_of(hf_exp("sigmoid")), dtype=dtype)
    x = tokens(150, dtype)
    whole = sequence([gdn.state()])
    expected = step(gdn, whole, x, keep=False)
    draw = torch.Generator().manual_seed(3)

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    state = sequence([gdn.state()])
    while state.length < len(x):
        start = state.length
        n_tokens = min(random(1, 16), len(x) - start)
        n = random(0, n_tokens)
        window = x[start : start + n_tokens].clone()
        window[n:] = 3.0  # rejected drafts
        got = step(gdn, state, window, n)
        assert bits_equal(got[:n], expected[start : start + n])
        state.back(0, "recurrent").fill_(float("nan"))
    assert bits_equal(state.front(0, "recurrent"), whole.front(0, "recurrent"))
    last = [(len(x) - i) % state.tensor(0, "conv").shape[0] for i in (1, 2, 3)]
    assert bits_equal(state.tensor(0, "conv")[last], whole.tensor(0, "conv")[last])


def test_chunks_and_single_tokens_have_the_same_bits() -> None:
    """Against one chunk of 500: pieces of uneven lengths, then tokens one by one."""
    gdn = mixer(roles_of(hf_exp("silu")), dtype=torch.float32)
    x = tokens(500, torch.float32)
    expected = step(gdn, sequence([gdn.state()]), x, keep=False)
    state = sequence([gdn.state()])
    cuts = [0, 1, 3, 40, 41, 260, 455, *range(456, 501)]
    pieces = [
        step(gdn, state, x[a:b], keep=False) for a, b in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    assert bits_equal(torch.cat(pieces), expected)


def test_positions_before_the_start_are_zeros_whatever_the_ring_holds() -> None:
    """A first token sees no past: the poisoned ring of ``sequence`` equals a ring of zeros."""
    gdn = mixer(roles_of(hf_exp("silu")))
    x = tokens(3)
    clean = step(gdn, sequence([gdn.state()], poison=False), x)
    assert bits_equal(step(gdn, sequence([gdn.state()], poison=True), x), clean)


def test_weights_of_another_shape_are_refused_with_both_shapes() -> None:
    """The message names the role, the shape found and the shape that the spec implies."""
    roles = roles_of(hf_exp("silu"))
    with pytest.raises(FormatError, match=r"gdn\.z has shape \[120, 24\].*implies \[240, 24\]"):
        mixer(roles | {"gdn.qkv": weight(torch.zeros(288, D))}, replace(SPEC, v_dim=40))
    del roles["gdn.decay"]
    with pytest.raises(FormatError, match=r"no tensor gdn\.decay"):
        mixer(roles)
