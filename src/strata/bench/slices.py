"""A slice of a model: its first layers with fewer experts and made-up weights, in the file's own
types, so that its windows can be timed in seconds and before the file's weights are read.

Reads a GGUF's metadata and table of tensors only; a synthetic model is sliced in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from strata.core.errors import UnsupportedError
from strata.formats.checkpoint import Checkpoint
from strata.formats.made_up import MadeUpCheckpoint, makeable
from strata.formats.tensor_info import TensorInfo
from strata.models.ngram import ngram_constants
from strata.models.spec import ModelSpec, MoeSpec
from strata.models.synthetic import made_up_numbers
from strata.window.stamps import layer_kind

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_BY_EXPERT = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.|ffn_gate_inp\.|exp_probs_b\.")
_TABLE = "per_layer_token_embd.weight"
LEAST_EXPERTS = 64
APART = 6
"""Layers by which slices differ, about."""


def why_no_slice(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint cannot be sliced; None when it can."""
    if checkpoint.format != "gguf":
        return "only GGUF files and synthetic models are timed before loading"
    kinds = {info.type.name for info in checkpoint.tensors.values()}
    bad = sorted(kind for kind in kinds if not makeable(kind))
    return f"weights of type {', '.join(bad)} cannot be made up" if bad else None


def depths(spec: ModelSpec) -> tuple[int, int]:
    """Two numbers of layers (a, b): layers a .. b - 1 are whole periods of the kinds of layers, and
    the layers behind b only repeat them. (n, n) when nothing repeats."""
    kinds = [layer_kind(spec, i) for i in range(spec.n_layers)]
    n = len(kinds)
    for period in range(1, n // 2 + 1):
        head = _irregular(kinds, period)
        # few layers would drown in what lies outside of them
        for times in range(max(1, APART // period), 0, -1):
            if head + 2 * times * period <= n:
                return head + times * period, head + 2 * times * period
    return n, n


def _irregular(kinds: Sequence[str], period: int) -> int:
    """Layers in front of the part that repeats with this period."""
    n = len(kinds)
    head = n - period
    while head > 0 and kinds[head - 1] == kinds[head - 1 + period]:
        head -= 1
    return head


def slice_of(checkpoint: Checkpoint, spec: ModelSpec, n_layers: int) -> MadeUpCheckpoint:
    """The first n_layers layers. UnsupportedError when it cannot be made (``why_no_slice``)."""
    reason = why_no_slice(checkpoint)
    if reason is not None:
        raise UnsupportedError(f"{checkpoint.path}: {reason}")
    n_experts = kept_experts(spec)
    metadata = _metadata(checkpoint.metadata, n_layers, n_experts)
    table_rows = _table_rows(metadata)
    tensors = [
        (name, info.type.name, shape)
        for name, info in checkpoint.tensors.items()
        if (shape := _shape(name, info, n_layers, n_experts, table_rows)) is not None
    ]
    label = f"slice of {checkpoint.path}, {n_layers} layers"
    return MadeUpCheckpoint(label, tensors, metadata, made_up_numbers)


def kept_experts(spec: ModelSpec) -> int:
    """Experts of a layer that a slice has: enough that no cache holds what a window reads. 0 for a
    dense model."""
    ffns = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)]
    if not ffns:
        return 0
    ffn = ffns[0]
    if ffn.n_groups > 1:
        return ffn.n_experts
    return min(ffn.n_experts, max(LEAST_EXPERTS, 4 * ffn.n_active))


def _metadata(full: Mapping[str, Any], n_layers: int, n_experts: int) -> dict[str, Any]:
    architecture = full["general.architecture"]
    count = int(full[f"{architecture}.block_count"])
    kept: dict[str, Any] = {"tokenizer.ggml.model": "none"}
    for key, value in full.items():
        if key.startswith("tokenizer."):
            continue
        of_layers = (
            ".ple." not in key and isinstance(value, Sequence) and not isinstance(value, str)
        )
        kept[key] = value[:n_layers] if of_layers and len(value) == count else value
    kept[f"{architecture}.block_count"] = n_layers
    kept[f"{architecture}.nextn_predict_layers"] = 0
    if n_experts:
        kept[f"{architecture}.expert_count"] = n_experts
    _small_table(kept, f"{architecture}.")
    return kept


def _small_table(metadata: dict[str, Any], prefix: str) -> None:
    """Hash constants of a small n-gram table: the real one may be larger than memory, and a window
    reads a few rows of it."""
    if f"{prefix}ple.head_vocab_sizes" not in metadata:
        return
    made = ngram_constants(
        n_vocab=1 << 20,
        ngram_size=int(metadata[f"{prefix}ple.ngram_size"]),
        heads_per_ngram=int(metadata[f"{prefix}ple.heads_per_ngram"]),
        vocab_base=20_000,
        divisible_by=128,
        seed=1234,
    )
    metadata[f"{prefix}ple.layer_multipliers"] = list(made.multipliers)
    metadata[f"{prefix}ple.head_vocab_sizes"] = list(made.head_vocab)
    metadata[f"{prefix}ple.head_offsets"] = list(made.head_offset)


def _table_rows(metadata: Mapping[str, Any]) -> int:
    prefix = f"{metadata['general.architecture']}.ple."
    sizes = metadata.get(f"{prefix}head_vocab_sizes")
    return 0 if sizes is None else -(-sum(sizes) // 128) * 128


def _shape(
    name: str, info: TensorInfo, n_layers: int, n_experts: int, table_rows: int
) -> tuple[int, ...] | None:
    """The tensor's shape in the slice; None when it is in none of its layers."""
    if name == _TABLE:
        return table_rows, info.shape[-1]
    found = _LAYER.fullmatch(name)
    if found is None:
        return info.shape
    if int(found[1]) >= n_layers:
        return None
    if not _BY_EXPERT.match(found[2]):
        return info.shape
    wanted = (n_experts, *info.shape[1:])
    return wanted if math.prod(wanted) <= info.n_elements else info.shape
