"""Tensor names shared by the families, in both spellings, and how a table of names becomes Sources.

A naming maps the part of a role behind "layers.<l>." (or a model-level role) to the part of a
tensor name behind the layer's prefix. A family states its own naming as ``{**HF, ...}`` with what
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from strata.models.inventory import Role, inventory
from strata.models.sources import Rows, Source, Values, negative_exp, one_plus
from strata.models.spec import ModelSpec

Entry: TypeAlias = str | Callable[[str], Source]
"""A name behind the prefix (a leading "/" drops the prefix), or a function prefix -> Source."""
Naming: TypeAlias = Mapping[str, Entry]

HF: Naming = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "head": "/lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_bias": "self_attn.q_proj.bias",
    "attn.k_bias": "self_attn.k_proj.bias",
    "attn.v_bias": "self_attn.v_proj.bias",
    "attn.o_bias": "self_attn.o_proj.bias",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "attn.sinks": "self_attn.sinks",
    "moe.router": "mlp.gate.weight",
    "moe.correction": "mlp.gate.e_score_correction_bias",
    "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight",
    "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared.gate_inp": "mlp.shared_expert_gate.weight",
    "ffn.gate": "mlp.gate_proj.weight",
    "ffn.up": "mlp.up_proj.weight",
    "ffn.down": "mlp.down_proj.weight",
}

GGUF: Naming = {
    "embed": "/token_embd.weight",
    "final_norm": "/output_norm.weight",
    "head": "/output.weight",
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.o": "attn_output.weight",
    "attn.q_bias": "attn_q.bias",
    "attn.k_bias": "attn_k.bias",
    "attn.v_bias": "attn_v.bias",
    "attn.o_bias": "attn_output.bias",
    "attn.q_norm": "attn_q_norm.weight",
    "attn.k_norm": "attn_k_norm.weight",
    "attn.sinks": "attn_sinks.weight",
    "moe.router": "ffn_gate_inp.weight",
    "moe.router_bias": "ffn_gate_inp.bias",
    "moe.correction": "exp_probs_b.bias",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared.gate_inp": "ffn_gate_inp_shexp.weight",
    "ffn.gate": "ffn_gate.weight",
    "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight",
    "gdn.qkv": "attn_qkv.weight",
    "gdn.z": "attn_gate.weight",
    "gdn.a": "ssm_alpha.weight",
    "gdn.b": "ssm_beta.weight",
    "gdn.out": "ssm_out.weight",
    "gdn.conv": "ssm_conv1d.weight",
    "gdn.decay": "ssm_a",
    "gdn.dt_bias": "ssm_dt.bias",
    "gdn.norm": "ssm_norm.weight",
}


def plus_one(suffix: str) -> Entry:
    """A centered norm: the file holds the offset from 1."""
    return lambda prefix: Values(prefix + suffix, one_plus)


HF_GDN: Naming = {
    "gdn.qkv": "linear_attn.in_proj_qkv.weight",
    "gdn.z": "linear_attn.in_proj_z.weight",
    "gdn.a": "linear_attn.in_proj_a.weight",
    "gdn.b": "linear_attn.in_proj_b.weight",
    "gdn.out": "linear_attn.out_proj.weight",
    "gdn.conv": "linear_attn.conv1d.weight",
    "gdn.decay": lambda prefix: Values(prefix + "linear_attn.A_log", negative_exp),
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm.weight",
}

HF_SHARED_EXPERTS: Naming = {
    "shared.gate": "mlp.shared_experts.gate_proj.weight",
    "shared.up": "mlp.shared_experts.up_proj.weight",
    "shared.down": "mlp.shared_experts.down_proj.weight",
}
"""DeepSeek and GLM write the shared expert in the plural."""

HF_CENTERED: Naming = {
    "final_norm": plus_one("norm.weight"),
    "attn_norm": plus_one("input_layernorm.weight"),
    "ffn_norm": plus_one("post_attention_layernorm.weight"),
    "attn.q_norm": plus_one("self_attn.q_norm.weight"),
    "attn.k_norm": plus_one("self_attn.k_norm.weight"),
}
"""Norms of the families whose checkpoints store 1 + w as w."""


def sources_of(spec: ModelSpec, naming: Naming, top: str, layer: str) -> dict[str, Source]:
    """Role -> Source for every role of the model that the naming knows.

    top: prefix of model-level tensors ("model."); layer: that of a layer, with {} for its number.
    """
    found: dict[str, Source] = {}
    for role, what in inventory(spec).items():
        prefix, key = top, role
        if role.startswith("layers."):
            _, number, key = role.split(".", 2)
            prefix = layer.format(number)
        entry = naming.get(key)
        if entry is not None:
            found[role] = _source(entry, prefix, what)
    return found


def _source(entry: Entry, prefix: str, role: Role) -> Source:
    if not isinstance(entry, str):
        return entry(prefix)
    name = entry[1:] if entry.startswith("/") else prefix + entry
    return Rows((name,)) if role.kind == "matrix" else Values(name)
