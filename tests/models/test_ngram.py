"""The n-gram block: hashing and block against transformers, windows against one long chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from strata.core.errors import FormatError
from strata.kernels.ops import reference_ops
from strata.kernels.weight import Weight
from strata.memory.frame import BufferSpec
from strata.memory.state import SequenceState
from strata.models.ngram import Ngram, gather, ngram_constants, row_ids
from strata.models.spec import DenseFfnSpec, GdnSpec, LayerSpec, ModelSpec, NgramSpec
from tests.models.kit import bits_equal, frame, in_float64, packed, randomize, sequence, weight

D, C, VOCAB, EOS, EPS = 24, 4, 50, 7, 1e-6
SIZE, HEADS, BASE = 3, 2, 40


def config(**changes: Any) -> Qwen4ExpTextConfig:
    values = {
        "hidden_size": D, "vocab_size": VOCAB, "hc_count": C, "ple_embed_dim": D,
        "ple_conv_kernel_size": 4, "ngram_size": SIZE, "heads_per_ngram": HEADS,
        "ngram_vocab_size_base": BASE, "make_ngram_vocab_size_divisible_by": 16, "seed": 1234,
        "eos_token_id": EOS, "rms_norm_eps": EPS, "ple_layer_ids": [1], "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
    }  # fmt: skip
    return Qwen4ExpTextConfig(**(values | changes))


def ngram_spec(block_index: int = 0, size: int = SIZE) -> NgramSpec:
    c = ngram_constants(
        n_vocab=VOCAB, ngram_size=size, heads_per_ngram=HEADS, vocab_base=BASE, divisible_by=16,
        seed=1234, block_index=block_index,
    )  # fmt: skip
    head_dim = D // len(c.head_vocab)
    return NgramSpec(
        size, HEADS, head_dim, 4, size, c.multipliers, c.head_vocab, c.head_offset, EOS
    )


def hf_layer(**changes: Any) -> Any:
    return randomize(hf.Qwen4ExpTextPLELayer(config(**changes), 0, 0), 3)


def block(layer: Any, dtype: torch.dtype = torch.float64, streams: int = C) -> Ngram:
    roles = {
        "ngram.key": weight(layer.key_proj.weight),
        "ngram.value": weight(layer.value_proj.weight),
        "ngram.norm_key": 1 + layer.norm_key.weight.detach().double(),
        "ngram.norm_query": 1 + layer.norm_query.weight.detach().double(),
        "ngram.norm_conv": 1 + layer.norm_conv.weight.detach().double(),
        "ngram.conv": layer.conv1d.weight.detach().squeeze(1),
        "ngram.table": weight(layer.ple_embedding.ngram_embedding.weight),
    }
    mixer = GdnSpec(1, 1, 4, 4, 4, "grouped", "silu")
    spec = ModelSpec("test", D, VOCAB, (LayerSpec(mixer, DenseFfnSpec(8)),), EPS, 64, streams)
    return Ngram(0, ngram_spec(), spec, roles, reference_ops(dtype))


def some_tokens(n: int) -> list[int]:
    """Random ids with EOS every now and then, also two in a row, and a repeated n-gram."""
    ids = torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(11)).tolist()
    for at in (5, 6, 20, n // 2):
        ids[at] = EOS
    ids[31:34] = ids[28:31]
    return ids


@pytest.mark.parametrize("block_index", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_constants_equal_transformers(block_index: int, size: int) -> None:
    """Against the buffers of Qwen4ExpTextNGramEmbedding, for the first and a second block."""
    embedding = hf.Qwen4ExpTextNGramEmbedding(config(ngram_size=size), 24, 0, block_index)
    spec = ngram_spec(block_index, size)
    assert list(spec.multipliers) == embedding.layer_multipliers.tolist()
    assert list(spec.head_vocab) == embedding.head_vocab_sizes
    assert list(spec.head_offset) == embedding.head_offsets


def test_constants_of_the_released_model() -> None:
    """Against the numbers that its GGUF files store (vocab 248320, base 20,000,000, 16 heads)."""
    c = ngram_constants(
        n_vocab=248320, ngram_size=3, heads_per_ngram=8, vocab_base=20_000_000, divisible_by=128,
        seed=1234,
    )  # fmt: skip
    assert c.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert c.head_vocab[:3] == (20000003, 20000023, 20000033) and c.head_vocab[-1] == 20000171
    assert c.head_offset[:2] == (0, 20000003) and sum(c.head_vocab) == 320_001_446
    assert c.n_table_rows == 320_001_536


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_equal_transformers_in_any_cut(size: int) -> None:
    """Against the ids that HF's module looks up; pieces with their history equal the whole."""
    embedding = hf.Qwen4ExpTextNGramEmbedding(config(ngram_size=size), 24, 0, 0)
    seen: list[torch.Tensor] = []
    embedding.ngram_embedding.register_forward_pre_hook(lambda m, args: seen.append(args[0][0]))
    tokens, spec = some_tokens(80), ngram_spec(size=size)
    with torch.no_grad():
        embedding(torch.tensor([tokens]), None)
    expected = seen[0].numpy()
    assert np.array_equal(row_ids(spec, [], tokens), expected)
    for a, b in ((0, 1), (1, 2), (6, 9), (7, 8), (21, 60), (79, 80)):
        assert np.array_equal(row_ids(spec, tokens[:a], tokens[a:b]), expected[a:b])
        short = tokens[max(0, a - size + 1) : a]
        assert np.array_equal(row_ids(spec, short, tokens[a:b]), expected[a:b])


def test_an_eos_cuts_what_follows_it_but_not_its_own_past() -> None:
    """By hand from the rule: hash = xor of token * multiplier, modulo the head's vocabulary."""
    spec = ngram_spec()
    m0, m1, m2 = spec.multipliers

    def rows(now: int, back1: int, back2: int) -> list[int]:
        two = now * m0 ^ back1 * m1
        hashes = [two] * HEADS + [two ^ back2 * m2] * HEADS
        both = zip(hashes, spec.head_vocab, spec.head_offset, strict=True)
        return [h % vocab + offset for h, vocab, offset in both]

    got = row_ids(spec, [], [3, 4, EOS, 5, 6, 8]).tolist()
    assert got == [
        rows(3, EOS, EOS), rows(4, 3, EOS), rows(EOS, 4, 3), rows(5, EOS, EOS),
        rows(6, 5, EOS), rows(8, 6, 5),
    ]  # fmt: skip


def test_hashes_need_all_64_bits() -> None:
    """Against Python's integers modulo 2^64: multipliers of a GGUF file may use the top bit."""
    spec = NgramSpec(2, 1, 4, 4, 2, (2**63 + 12345, 2**64 - 59), (1009,), (3,), EOS)
    got = row_ids(spec, [40], [49, 2])
    assert np.array_equal(row_ids(spec, [40], [49, 2] * 4)[:2], got)  # few tokens go another way
    expected = [
        ((49 * spec.multipliers[0] % 2**64) ^ (40 * spec.multipliers[1] % 2**64)) % 1009 + 3,
        ((2 * spec.multipliers[0] % 2**64) ^ (49 * spec.multipliers[1] % 2**64)) % 1009 + 3,
    ]
    assert got[:, 0].tolist() == expected


def test_gather_reads_rows_of_a_mapped_table(tmp_path: Path) -> None:
    """Against the rows in the file: heads side by side, offsets beyond 32 bits, a sparse file."""
    n_rows, dim = 300_000_000, 8  # 4.8 GB, of which two rows exist
    path = tmp_path / "table.bin"
    values = np.arange(2 * dim, dtype=np.float16).reshape(2, dim)
    with path.open("wb") as file:
        for row, value in zip((5, n_rows - 1), values, strict=True):
            file.seek(row * dim * 2)
            file.write(value.tobytes())
    mapped = np.memmap(path, dtype=np.uint8, mode="r+", shape=(n_rows, dim * 2))
    spec = NgramSpec(2, 2, dim, 4, 2, (1, 1), (1, 1), (0, 0), EOS)
    ids = np.array([[5, n_rows - 1], [n_rows - 1, 6]])
    got = gather(spec, packed("F16", mapped), ids)
    zeros = np.zeros(dim)
    expected = np.array([np.concatenate(values), np.concatenate([values[1], zeros])])
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), expected)


def step(
    ngram: Ngram, state: SequenceState, streams: torch.Tensor, tokens: list[int], n: int, keep: bool
) -> torch.Tensor:
    """One window of which n tokens are committed; the residual after the block."""
    dtype = ngram.ops.dtype
    specs = {
        "residual": BufferSpec(tuple(streams.shape[1:]), dtype),
        "ngram_rows": BufferSpec((ngram.row_width,), torch.float32),
    }
    on = frame(specs, len(tokens), state, keep_inputs=keep)
    on["residual"].copy_(streams)
    on["ngram_rows"].copy_(ngram.rows(state.tokens, tokens))
    ngram.part().run(on)
    state.tokens += tokens[:n]
    return on["residual"].clone()


def streams_of(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, C, D, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_a_prompt_equals_transformers(
    dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against S + Qwen4ExpTextPLELayer(S)."""
    layer = hf_layer()
    ngram = block(layer, dtype)
    if dtype == torch.float64:
        in_float64(monkeypatch, hf)
    tokens, streams = some_tokens(70), streams_of(70, dtype)
    with torch.no_grad():
        added = layer.to(dtype)(streams.flatten(1)[None], torch.tensor([tokens]), None)[0]
    expected = streams + added.view_as(streams)
    got = step(ngram, sequence([ngram.state()]), streams, tokens, 70, keep=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_token_by_token_equals_transformers_with_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the HF layer decoding through a cache: conv columns and token history carry over."""
    layer = hf_layer()
    ngram = block(layer)
    in_float64(monkeypatch, hf)
    layer = layer.double()
    cache = DynamicCache(config=config())
    state = sequence([ngram.state()])
    tokens, streams = some_tokens(40), streams_of(40, torch.float64)
    for t in range(40):
        with torch.no_grad():
            added = layer(streams[t : t + 1].flatten(1)[None], torch.tensor([[tokens[t]]]), cache)
        got = step(ngram, state, streams[t : t + 1], tokens[t : t + 1], 1, keep=True)
        expected = streams[t] + added[0, 0].view(C, D)
        torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_windows_with_any_commit_have_the_bits_of_one_long_chunk(dtype: torch.dtype) -> None:
    """Against 600 tokens in one chunk (three blocks); rejected tokens leave no trace."""
    ngram = block(hf_layer(), dtype)
    tokens, streams = some_tokens(600), streams_of(600, dtype)
    expected = step(ngram, sequence([ngram.state()]), streams, tokens, 600, keep=False)
    draw = torch.Generator().manual_seed(2)
    state = sequence([ngram.state()])
    while state.length < 600:
        start = state.length
        n_tokens = min(int(torch.randint(1, 17, (), generator=draw)), 600 - start)
        n = int(torch.randint(0, n_tokens + 1, (), generator=draw))
        rows = slice(start, start + n_tokens)
        window, drafts = streams[rows].clone(), list(tokens[rows])
        window[n:] = 2.0
        drafts[n:] = [1] * (n_tokens - n)
        got = step(ngram, state, window, drafts, n, keep=True)
        assert bits_equal(got[:n], expected[start : start + n])


def test_a_table_that_is_too_short_is_refused() -> None:
    """The message gives both sizes; padding rows beyond the hashed ones are fine."""
    layer = hf_layer()
    needed = sum(ngram_spec().head_vocab)
    assert block(layer).table.n_rows >= needed
    rows = layer.ple_embedding.ngram_embedding.weight.detach()[: needed - 1]
    layer.ple_embedding.ngram_embedding.weight = torch.nn.Parameter(rows)
    with pytest.raises(FormatError, match=rf"ngram\.table is \({needed - 1}, 6\).*\[{needed}, 6\]"):
        block(layer)


def test_the_table_stays_in_its_own_type() -> None:
    """A quantized table is decoded row by row; against the whole table decoded by gguf."""
    values = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    decoded = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    spec = NgramSpec(2, 2, 32, 4, 2, (1, 1), (1, 1), (0, 0), EOS)
    table: Weight = packed("Q8_0", raw)
    ids = np.array([[0, 63], [17, 17]])
    got = gather(spec, table, ids).numpy()
    assert np.array_equal(got, decoded[ids].reshape(2, 64))
