"""The QSA layer (attention plus indexer) against transformers' qwen4_exp, selection included."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from strata.core.errors import FormatError
from strata.kernels.ops import reference_ops
from strata.models import attention as attention_module
from strata.models import rotary
from strata.models.attention import Attention
from strata.models.qsa import Indexer
from strata.models.roles import Roles
from strata.models.spec import AttentionSpec, IndexerSpec
from tests.models.harness import (
    Window,
    assert_parts_touch_what_they_declare,
    assert_within,
    f32_weight,
    fill,
    make_frame,
    poisoned_state,
    run_at_once,
    run_window,
    run_windows,
    schedule,
)
from tests.models.test_attention import causal_mask

D, T, HEAD, INDEX = 48, 90, 32, 24


class Case:
    """A transformers QSA layer with many index heads (few would tie scores at zero)."""

    def __init__(self, dtype: torch.dtype, ratio: int, budget: int) -> None:
        config = Qwen4ExpTextConfig(
            hidden_size=D,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=HEAD,
            indexer_n_heads=12,
            indexer_kv_heads=1,
            indexer_head_dim=INDEX,
            indexer_budget=budget,
            indexer_compress_ratio=ratio,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        )
        config._attn_implementation = "eager"
        self.module = modeling_qwen4_exp.Qwen4ExpTextAttention(config, 3)
        fill(self.module, 7, dtype, 1.5)
        self.embedding = modeling_qwen4_exp.Qwen4ExpTextRotaryEmbedding(config)
        self.dtype = dtype
        self.spec = AttentionSpec(
            6,
            2,
            HEAD,
            rotary.plain(1e4, 8),
            HEAD**-0.5,
            qk_norm=True,
            gate=True,
            indexer=IndexerSpec(12, INDEX, budget, ratio),
        )

    def expected(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Result [T, D] and the tokens each query sees, bool [T, T]."""
        positions = torch.arange(len(x_TD)).view(1, 1, -1).expand(3, 1, -1)
        mask = causal_mask(len(x_TD), None, x_TD.dtype)
        with torch.no_grad():
            cos_sin = self.embedding(x_TD[None], positions)
            seen = self.module.indexer(x_TD[None], cos_sin, mask, None)[0, 0]
            return self.module(x_TD[None], cos_sin, mask)[0][0], seen

    def mixer(self, kv_dtype: torch.dtype | None = None) -> Attention:
        """Our layer from the same numbers; norms become full weights."""
        m, indexer = self.module, self.module.indexer
        both = indexer.index_qk_proj.weight
        roles: Roles = {
            **{f"attn.{p}": f32_weight(getattr(m, f"{p}_proj").weight) for p in "qkvo"},
            "attn.q_norm": 1 + m.q_norm.weight.data,
            "attn.k_norm": 1 + m.k_norm.weight.data,
            "index.q": f32_weight(both[: 12 * INDEX]),
            "index.k": f32_weight(both[12 * INDEX :]),
            "index.q_norm": 1 + indexer.q_layernorm.weight.data,
            "index.k_norm": 1 + indexer.k_layernorm.weight.data,
        }
        ops = reference_ops(self.dtype)
        return Attention(3, self.spec, D, 1e-6, roles, ops, kv_dtype or self.dtype)


def _x(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(11)
    return torch.randn(T, D).to(dtype)


def _seen_by(mixer: Attention, x_TD: torch.Tensor) -> torch.Tensor:
    """What our mixer lets every query see when all tokens run at once, bool [T, T]."""
    indexer = mixer._indexer
    assert isinstance(indexer, Indexer)
    frame = make_frame(mixer, poisoned_state(mixer, len(x_TD)), len(x_TD), D, whole=True)
    frame["x"].copy_(x_TD)
    for part in indexer.parts():
        part.run(frame)
    mask = indexer.mask(frame, 0, len(x_TD))
    causal = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).tril()
    return causal if mask is None else mask


@pytest.mark.parametrize("ratio,budget", [(4, 16), (1, 16), (4, 200), (3, 30), (4, 84), (4, 88)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_transformers(dtype: torch.dtype, ratio: int, budget: int) -> None:
    """Expectation: transformers 5.24, selected tokens exactly, results within 1e-5; any cut."""
    case, x = Case(dtype, ratio, budget), _x(dtype)
    expected, seen = case.expected(x)
    dropped = int((torch.ones(T, T).tril().bool() & ~seen).sum())
    assert (dropped > 0) == (T // ratio > budget // ratio), "the case must show what it is for"
    mixer = case.mixer()
    assert torch.equal(_seen_by(mixer, x), seen)
    at_once = run_at_once(mixer, x)
    assert_within(at_once, expected)
    for seed, first in ((1, 0), (2, 41), (3, 2)):
        out = run_windows(mixer, x, list(schedule(T, seed, first)))
        assert torch.equal(out, at_once), "the cut into windows changed a bit"


def test_single_tokens_and_chunks() -> None:
    """Expectation: the same bits token by token, and in chunks longer than the ring of raw keys."""
    case, x = Case(torch.float32, 4, 16), _x(torch.float32)
    mixer = case.mixer()
    at_once = run_at_once(mixer, x)
    for cut in ([1] * T, [33, 1, 30, 26], [3, 3, 40, 44]):
        out = run_windows(mixer, x, [Window(n, n) for n in cut])
        assert torch.equal(out, at_once)


def test_worst_rejections() -> None:
    """Expectation: windows of 16 of which 0..15 tokens are taken, at every phase of a block."""
    case, x = Case(torch.float32, 4, 16), _x(torch.float32)
    mixer = case.mixer()
    windows = [Window(16, n) for n in (1, 0, 0, 2, 3, 0, 5, 7, 0, 1, 15, 1, 1, 1, 9, 13, 14, 0, 6)]
    n = sum(w.n for w in windows)
    assert n <= T
    out = run_windows(mixer, x[:n], windows, context=n + 16)
    assert torch.equal(out, run_at_once(mixer, x)[:n])


def test_block_keys_are_those_of_the_whole_sequence() -> None:
    """Expectation: after any cut with rejections, every block key has the bits of one chunk."""
    case, x = Case(torch.float32, 4, 16), _x(torch.float32)
    mixer = case.mixer()
    keys = []
    for windows in ([Window(T, T)], list(schedule(T, 8)), list(schedule(T, 9, 5))):
        state = poisoned_state(mixer, T + 8)
        for w in windows:
            fed = torch.cat([x[state.length : state.length + w.n], torch.ones(w.T - w.n, D)])
            run_window(mixer, state, fed, w.n)
        keys.append(state.tensor(3, "block_keys")[: T // 4])
    assert keys[0].isfinite().all()
    assert torch.equal(keys[1], keys[0]) and torch.equal(keys[2], keys[0])


def test_half_precision_cache() -> None:
    """Expectation: block keys are read as they are cached, so the cut still changes no bit."""
    case, x = Case(torch.float32, 4, 16), _x(torch.float32)
    mixer = case.mixer(torch.float16)
    out = run_windows(mixer, x, list(schedule(T, 5, 20)))
    assert torch.equal(out, run_at_once(mixer, x))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8])
def test_encoded_cache(kv_dtype: torch.dtype) -> None:
    """Expectation: of an encoded cache only selected positions are decoded, which changes no bit in
    any cut; block keys are f16 and the selection that of an f16 cache."""
    case, x = Case(torch.float32, 4, 16), _x(torch.float32)
    mixer, halves = case.mixer(kv_dtype), case.mixer(torch.float16)
    assert mixer.state()["block_keys"].dtype == torch.float16
    assert torch.equal(_seen_by(mixer, x), _seen_by(halves, x))
    at_once = run_at_once(mixer, x)
    assert torch.equal(run_windows(mixer, x, list(schedule(T, 5, 20))), at_once)
    assert torch.equal(run_windows(mixer, x, [Window(1, 1)] * T), at_once)
    assert_within(at_once, run_at_once(halves, x), 0.02 if kv_dtype == torch.int8 else 0.25)


def test_mask_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectation: attending a chunk a few tokens at a time changes no bit."""
    case, x = Case(torch.float32, 4, 16), _x(torch.float32)
    mixer = case.mixer()
    whole = run_at_once(mixer, x)
    monkeypatch.setattr(attention_module, "_MASK_ENTRIES", 7 * T)
    assert torch.equal(run_at_once(mixer, x), whole)


@pytest.mark.parametrize("n_past,n_new", [(27, 8), (25, 16)])
def test_parts_touch_what_they_declare(n_past: int, n_new: int) -> None:
    """Expectation: the names a part asks for are its reads and writes."""
    mixer = Case(torch.float32, 4, 8).mixer()
    x = _x(torch.float32)[: n_past + n_new]
    assert_parts_touch_what_they_declare(mixer, x, n_past)


def test_state_sizes() -> None:
    """Expectation: one block key per 4 tokens, rounded up, and 3 + 16 raw keys (models/ring.py)."""
    mixer = Case(torch.float32, 4, 16).mixer(torch.float16)
    state = poisoned_state(mixer, 90)
    assert state.tensor(3, "block_keys").shape == (23, INDEX)
    assert state.tensor(3, "index_ring").shape == (19, INDEX)
    assert mixer.state()["block_keys"].n_bytes(262144) == 65536 * INDEX * 2


def test_budget_below_a_block_is_refused() -> None:
    """Expectation: a FormatError with both numbers instead of an attention over nothing."""
    case = Case(torch.float32, 4, 16)
    with pytest.raises(FormatError, match="budget of 3 tokens in blocks of 4"):
        Indexer(
            0,
            IndexerSpec(12, INDEX, 3, 4),
            case.spec.rotary,
            D,
            1e-6,
            {},
            reference_ops(),
            torch.float32,
        )
