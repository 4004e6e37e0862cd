"""Residual paths: against transformers' gated residual and RMS norm, and against other windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from strata.core.errors import FormatError
from strata.kernels.ops import reference_ops
from strata.memory.frame import Frame
from strata.models.residual import HyperResidual, PlainResidual, Residual, build_residual
from strata.models.roles import Roles
from strata.models.spec import DenseFfnSpec, GdnSpec, LayerSpec, ModelSpec
from tests.models.kit import bits_equal, frame, in_float64, randomize, sequence, weight

D, VOCAB, RANK, EPS = 21, 30, 10, 1e-6
LAYER = LayerSpec(GdnSpec(1, 1, 4, 4, 4, "grouped", "silu"), DenseFfnSpec(8))


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(streams: int) -> ModelSpec:
    rank = RANK if streams > 1 else 0
    return ModelSpec("test", D, VOCAB, (LAYER, LAYER), EPS, 64, streams=streams, hc_rank=rank)


def plain_roles() -> dict[str, Any]:
    roles: dict[str, Any] = {"embed": weight(draw(VOCAB, D)), "final_norm": draw(D, seed=9)}
    for layer in range(2):
        roles[f"layers.{layer}.attn_norm"] = draw(D, seed=10 + layer)
        roles[f"layers.{layer}.ffn_norm"] = draw(D, seed=20 + layer)
    return roles


def hyper_modules(streams: int) -> dict[str, Any]:
    """One HF module per read: four of two layers, and the head's."""
    config = Qwen4ExpTextConfig(
        hidden_size=D, hc_count=streams, hc_lowrank=RANK, rms_norm_eps=EPS, ple_layer_ids=[]
    )
    names = [f"layers.{layer}.{site}_read" for layer in range(2) for site in ("attn", "ffn")]
    made = {
        name: randomize(hf.Qwen4ExpTextGatedResidual(config, name != "head_read"), seed)
        for seed, name in enumerate([*names, "head_read"])
    }
    return made


def hyper_roles(modules: dict[str, Any]) -> dict[str, Any]:
    roles: dict[str, Any] = {"embed": weight(draw(VOCAB, D))}
    for name, module in modules.items():
        roles[f"{name}.norm"] = 1 + module.hc_norm.weight.detach().double()
        roles[f"{name}.down"] = weight(module.input_mix_weight_down.weight)
        roles[f"{name}.up"] = weight(module.input_mix_weight_up.weight)
        if module.block_inject_weight is not None:
            roles[f"{name}.inject"] = weight(module.block_inject_weight.weight)
    return roles


def build(streams: int, roles: Roles, dtype: torch.dtype = torch.float64) -> Residual:
    return build_residual(model(streams), roles, reference_ops(dtype))


def fresh(residual: Residual, n_tokens: int) -> Frame:
    return frame(residual.buffers(), n_tokens, sequence([]))


def test_the_spec_chooses_the_kind() -> None:
    """One stream is the plain residual, more are hyper-connections."""
    assert isinstance(build(1, plain_roles()), PlainResidual)
    assert isinstance(build(4, hyper_roles(hyper_modules(4))), HyperResidual)


@pytest.mark.parametrize("streams", [1, 4])
def test_every_stream_starts_as_the_embedding_row(streams: int) -> None:
    """Against F.embedding."""
    residual = build(streams, plain_roles() if streams == 1 else hyper_roles(hyper_modules(4)))
    on = fresh(residual, 3)
    on["ids"].copy_(torch.tensor([7, 0, 29]))
    residual.embed().run(on)
    rows = torch.nn.functional.embedding(on["ids"], draw(VOCAB, D).double())
    for stream in on["residual"].view(3, streams, D).unbind(1):
        assert torch.equal(stream, rows)


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_hyper_reads_and_writes_equal_transformers(
    streams: int, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against Qwen4ExpTextGatedResidual and the writes of its decoder layer, at every site."""
    modules = hyper_modules(streams)
    residual = build(streams, hyper_roles(modules), dtype)
    if dtype == torch.float64:
        in_float64(monkeypatch, hf)
    on = fresh(residual, 6)
    on["residual"].copy_(draw(6, streams, D, seed=5))
    flat = on["residual"].flatten(1).clone()
    for layer in range(2):
        for site, x, y in (("attn", "x", "mixer_out"), ("ffn", "ffn_x", "ffn_out")):
            module = modules[f"layers.{layer}.{site}_read"].to(dtype)
            with torch.no_grad():
                expected_x, raw, coeff = module(flat)
            residual.read(site, layer).run(on)
            torch.testing.assert_close(on[x], expected_x, rtol=0, atol=atol)
            on[y].copy_(draw(6, D, seed=layer))
            residual.write(site, layer).run(on)
            flat = raw + (on[y].unsqueeze(-2) * coeff.unsqueeze(-1)).flatten(-2)
            torch.testing.assert_close(on["residual"].flatten(1), flat, rtol=0, atol=atol)
    residual.head().run(on)
    with torch.no_grad():
        expected = modules["head_read"].to(dtype)(flat)
    torch.testing.assert_close(on["head_x"], expected, rtol=0, atol=atol)


def test_plain_reads_and_writes_equal_transformers() -> None:
    """Against Qwen3MoeRMSNorm and plain additions."""
    roles = plain_roles()
    residual = build(1, roles, torch.float32)

    def norm(role: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3MoeRMSNorm(D, EPS)
        module.weight.data = roles[role]
        return module(x).detach()

    on = fresh(residual, 6)
    stream = draw(6, D, seed=5)
    on["residual"].copy_(stream)
    for layer in range(2):
        for site, x, y in (("attn", "x", "mixer_out"), ("ffn", "ffn_x", "ffn_out")):
            residual.read(site, layer).run(on)
            expected = norm(f"layers.{layer}.{site}_norm", stream)
            torch.testing.assert_close(on[x], expected, rtol=0, atol=1e-5)
            on[y].copy_(draw(6, D, seed=layer))
            residual.write(site, layer).run(on)
            stream = stream + on[y]
            assert torch.equal(on["residual"], stream)
    residual.head().run(on)
    torch.testing.assert_close(on["head_x"], norm("final_norm", stream), rtol=0, atol=1e-5)


@pytest.mark.parametrize("streams", [1, 4])
def test_a_late_part_adds_up_to_the_whole_write(streams: int) -> None:
    """The write is linear in the block's output: a part now, the rest later, equals one write."""
    residual = build(streams, plain_roles() if streams == 1 else hyper_roles(hyper_modules(4)))
    whole, split = fresh(residual, 4), fresh(residual, 4)
    on_time, late = draw(4, D, seed=3).double(), draw(4, D, seed=4).double()
    for on in (whole, split):
        on["residual"].copy_(draw(*on["residual"].shape, seed=5))
        residual.read("ffn", 0).run(on)
    whole["ffn_out"].copy_(on_time + late)
    split["ffn_out"].copy_(on_time)
    for on in (whole, split):
        residual.write("ffn", 0).run(on)
    coeff = split["coeff_ffn"] if streams > 1 else None
    residual.add_late(split["residual"], coeff, late)
    torch.testing.assert_close(split["residual"], whole["residual"], rtol=0, atol=1e-14)


@pytest.mark.parametrize("streams", [1, 4])
def test_one_token_has_the_bits_of_the_same_token_among_600(streams: int) -> None:
    """Against all tokens in one frame, across the blocks that a read is cut into."""
    roles = plain_roles() if streams == 1 else hyper_roles(hyper_modules(4))
    residual = build(streams, roles, torch.float32)
    start, out = draw(600, streams, D, seed=5), draw(600, D, seed=6)

    def through(rows: slice) -> dict[str, torch.Tensor]:
        on = fresh(residual, len(start[rows]))
        on["residual"].copy_(start[rows].view_as(on["residual"]))
        on["mixer_out"].copy_(out[rows])
        on["ffn_out"].copy_(out[rows])
        for part in (residual.read("attn", 1), residual.write("attn", 1), residual.read("ffn", 1)):
            part.run(on)
        residual.write("ffn", 1).run(on)
        residual.head().run(on)
        return {name: on[name] for name in ("residual", "x", "ffn_x", "head_x")}

    whole = through(slice(0, 600))
    for t in (0, 255, 256, 599):
        for name, value in through(slice(t, t + 1)).items():
            assert bits_equal(value, whole[name][t : t + 1]), name


def test_parts_declare_what_they_touch() -> None:
    """The names that the window builder orders by, for both kinds."""
    plain, hyper = build(1, plain_roles()), build(4, hyper_roles(hyper_modules(4)))
    for residual, coeff in ((plain, False), (hyper, True)):
        read, write = residual.read("ffn", 0), residual.write("attn", 0)
        assert (read.name, write.name) == ("ffn_read", "attn_write")
        assert read.reads == ("residual",) and write.writes == ("residual",)
        assert set(read.writes) == {"ffn_x", *(["coeff_ffn"] if coeff else [])}
        assert set(write.reads) == {"residual", "mixer_out", *(["coeff_attn"] if coeff else [])}
        assert residual.embed().reads == ("ids",) and residual.head().writes == ("head_x",)
        assert set(residual.buffers()) >= set(read.writes) | set(write.reads)


def test_a_missing_norm_is_named() -> None:
    """The message names the role."""
    roles = plain_roles()
    del roles["layers.1.ffn_norm"]
    with pytest.raises(FormatError, match=r"no tensor layers\.1\.ffn_norm \[21\]"):
        build(1, roles)
