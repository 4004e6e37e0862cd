"""Which weights a model has: every role with its shape, from the spec alone.

Knows no files and no tensor names.

A loader that fills exactly these roles has filled the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strata.models.spec import (
    AttentionSpec,
    DenseFfnSpec,
    GdnSpec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    NgramSpec,
)

Kind = Literal["matrix", "tensor"]


@dataclass(frozen=True)
class Role:
    """What one role must be.

    matrix: a Weight of ``shape`` [rows, columns]; tensor: numbers of ``shape``.

    padded: more rows than ``shape`` says may follow (they are never looked up).
    """

    kind: Kind
    shape: tuple[int, ...]
    padded: bool = False


def inventory(spec: ModelSpec) -> dict[str, Role]:
    """Every role of the model, in layer order.

    The head is missing when it is tied to the embedding.
    """
    found = {"embed": _matrix(spec.n_vocab, spec.d_model)}
    for index, layer in enumerate(spec.layers):
        for name, role in _layer(spec, layer).items():
            found[f"layers.{index}.{name}"] = role
    if spec.streams > 1:
        found |= _read("head_read", spec, inject=False)
    else:
        found["final_norm"] = _tensor(spec.d_model)
    if not spec.tied_head:
        found["head"] = _matrix(spec.n_vocab, spec.d_model)
    return found


def _matrix(rows: int, cols: int) -> Role:
    return Role("matrix", (rows, cols))


def _tensor(*shape: int) -> Role:
    return Role("tensor", shape)


def _layer(spec: ModelSpec, layer: LayerSpec) -> dict[str, Role]:
    found: dict[str, Role] = {}
    if layer.ngram is not None:
        found |= _ngram(spec, layer.ngram)
    if spec.streams > 1:
        found |= _read("attn_read", spec) | _read("ffn_read", spec)
    else:
        found |= {"attn_norm": _tensor(spec.d_model), "ffn_norm": _tensor(spec.d_model)}
    mixer, d = layer.mixer, spec.d_model
    if isinstance(mixer, GdnSpec):
        found |= _gdn(mixer, d)
    elif isinstance(mixer, MlaSpec):
        found |= _mla(mixer, d)
    else:
        found |= _attention(mixer, d)
    return found | (_moe(layer.ffn, d) if isinstance(layer.ffn, MoeSpec) else _dense(layer.ffn, d))


def _read(name: str, spec: ModelSpec, inject: bool = True) -> dict[str, Role]:
    width = spec.streams * spec.d_model
    found = {
        f"{name}.norm": _tensor(width),
        f"{name}.down": _matrix(spec.hc_rank, width),
        f"{name}.up": _matrix(width, spec.hc_rank),
    }
    return found | ({f"{name}.inject": _matrix(spec.streams, width)} if inject else {})


def _attention(mixer: AttentionSpec, d: int) -> dict[str, Role]:
    n_q, n_kv = mixer.n_heads * mixer.head_dim, mixer.n_kv_heads * mixer.head_dim
    n_q_rows = 2 * n_q if mixer.gate else n_q
    found = {
        "attn.q": _matrix(n_q_rows, d),
        "attn.k": _matrix(n_kv, d),
        "attn.v": _matrix(n_kv, d),
        "attn.o": _matrix(d, n_q),
    }
    if mixer.bias:
        found |= {
            "attn.q_bias": _tensor(n_q_rows),
            "attn.k_bias": _tensor(n_kv),
            "attn.v_bias": _tensor(n_kv),
        }
    if mixer.o_bias:
        found["attn.o_bias"] = _tensor(d)
    if mixer.qk_norm:
        found |= {"attn.q_norm": _tensor(mixer.head_dim), "attn.k_norm": _tensor(mixer.head_dim)}
    if mixer.sinks:
        found["attn.sinks"] = _tensor(mixer.n_heads)
    index = mixer.indexer
    if index is not None:
        found |= {
            "index.q": _matrix(index.n_heads * index.head_dim, d),
            "index.k": _matrix(index.head_dim, d),
            "index.q_norm": _tensor(index.head_dim),
            "index.k_norm": _tensor(index.head_dim),
        }
    return found


def _mla(mixer: MlaSpec, d: int) -> dict[str, Role]:
    h, rank = mixer.n_heads, mixer.kv_lora_rank
    n_q = h * (mixer.nope_dim + mixer.rope_dim)
    found = {
        "mla.kv_a": _matrix(rank + mixer.rope_dim, d),
        "mla.kv_a_norm": _tensor(rank),
        "mla.k_b": _tensor(h * mixer.nope_dim, rank),
        "mla.v_b": _tensor(h * mixer.v_dim, rank),
        "mla.o": _matrix(d, h * mixer.v_dim),
    }
    if mixer.q_lora_rank is None:
        return found | {"mla.q": _matrix(n_q, d)}
    return found | {
        "mla.q_a": _matrix(mixer.q_lora_rank, d),
        "mla.q_a_norm": _tensor(mixer.q_lora_rank),
        "mla.q_b": _matrix(n_q, mixer.q_lora_rank),
    }


def _gdn(mixer: GdnSpec, d: int) -> dict[str, Role]:
    n_value = mixer.n_v_heads * mixer.v_dim
    n_channels = 2 * mixer.n_k_heads * mixer.k_dim + n_value
    return {
        "gdn.qkv": _matrix(n_channels, d),
        "gdn.z": _matrix(n_value, d),
        "gdn.a": _matrix(mixer.n_v_heads, d),
        "gdn.b": _matrix(mixer.n_v_heads, d),
        "gdn.out": _matrix(d, n_value),
        "gdn.conv": _tensor(n_channels, mixer.conv_taps),
        "gdn.decay": _tensor(mixer.n_v_heads),
        "gdn.dt_bias": _tensor(mixer.n_v_heads),
        "gdn.norm": _tensor(mixer.v_dim),
    }


def _ngram(spec: ModelSpec, ngram: NgramSpec) -> dict[str, Role]:
    width = spec.streams * spec.d_model
    n_embed = ngram.head_dim * len(ngram.head_vocab)
    n_table = max(o + v for o, v in zip(ngram.head_offset, ngram.head_vocab, strict=True))
    return {
        "ngram.key": _matrix(width, n_embed),
        "ngram.value": _matrix(spec.d_model, n_embed),
        "ngram.norm_key": _tensor(width),
        "ngram.norm_query": _tensor(width),
        "ngram.norm_conv": _tensor(width),
        "ngram.conv": _tensor(width, ngram.conv_taps),
        "ngram.table": Role("matrix", (n_table, ngram.head_dim), padded=True),
    }


def _moe(ffn: MoeSpec, d: int) -> dict[str, Role]:
    found = {"moe.router": _matrix(ffn.n_experts, d)}
    if ffn.router_bias:
        found["moe.router_bias"] = _tensor(ffn.n_experts)
    if ffn.correction:
        found["moe.correction"] = _tensor(ffn.n_experts)
    if ffn.shared_width:
        found |= {
            "shared.gate": _matrix(ffn.shared_width, d),
            "shared.up": _matrix(ffn.shared_width, d),
            "shared.down": _matrix(d, ffn.shared_width),
        }
    if ffn.shared_gate:
        found["shared.gate_inp"] = _matrix(1, d)
    return found


def _dense(ffn: DenseFfnSpec, d: int) -> dict[str, Role]:
    return {
        "ffn.gate": _matrix(ffn.width, d),
        "ffn.up": _matrix(ffn.width, d),
        "ffn.down": _matrix(d, ffn.width),
    }
