"""Models that are named, not stored: ``synthetic:NAME:TYPE[:layers=N][:experts=N][:vocab=N]``.

The shapes, and the weight type of every tensor, are those of a published file; the weights are made
up (``formats.made_up``). So a machine can be measured before anything is downloaded. What a made-up
model writes has no meaning, and its router knows no locality: benchmarks replay a routing trace.

For the loader this is one more kind of checkpoint: ``open_model`` stands where ``open_checkpoint``
would, and ``thinned`` says that a layer's experts repeat, so that re-coded blobs can be copied.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import InputError
from strata.core.settings import nearest
from strata.formats.checkpoint import Checkpoint, open_checkpoint
from strata.formats.made_up import MadeUpCheckpoint
from strata.models.expert_source import PROJS, ExpertSource, Proj
from strata.models.inventory import inventory
from strata.models.registry import find_family
from strata.models.spec import ModelSpec, MoeSpec
from strata.models.synthetic_shapes import SHAPES, Shape, Sizes

PREFIX = "synthetic:"
DISTINCT_EXPERTS = 16
"""Experts of a layer that differ; the others have their bytes, in memory of their own."""


@dataclass(frozen=True)
class Name:
    """A synthetic name taken apart: which shape, and how it is scaled down."""

    text: str
    shape: Shape
    sizes: Sizes


def is_synthetic(path: str | Path) -> bool:
    """Whether this names a model to make up."""
    return str(path).startswith(PREFIX)


def cut_down(path: str | Path) -> str:
    """What a synthetic model lacks of the published one: "12 of 48 layers"; "" when it is whole,
    and for files."""
    if not is_synthetic(path):
        return ""
    name = parse_name(str(path))
    pairs = (
        (name.sizes.layers, name.shape.sizes.layers, "layers"),
        (name.sizes.experts, name.shape.sizes.experts, "experts"),
        (name.sizes.vocab, name.shape.sizes.vocab, "words"),
    )
    return ", ".join(f"{n} of {of} {what}" for n, of, what in pairs if n < of)


def open_model(path: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint at a path, or the synthetic model of that name; an open one is itself.
    InputError for an unknown name; other errors as for ``open_checkpoint``."""
    if isinstance(path, Checkpoint):
        return path
    return _make_up(parse_name(str(path))) if is_synthetic(path) else open_checkpoint(path)


def parse_name(text: str) -> Name:
    """Take a name apart; InputError says what is known."""
    known = ", ".join(SHAPES)
    parts = text.removeprefix(PREFIX).split(":")
    key = ":".join(parts[:2])
    if key not in SHAPES:
        raise InputError(
            f"{text!r} is no synthetic model{nearest(key, SHAPES)}; known are {known}, each with "
            f":layers=N, :experts=N and :vocab=N behind it to make it smaller"
        )
    shape = SHAPES[key]
    full = shape.sizes
    given = dict(_option(text, part, full) for part in parts[2:])
    sizes = Sizes(
        given.get("layers", full.layers), given.get("experts", full.experts),
        given.get("vocab", full.vocab), full.active,
    )  # fmt: skip
    least = shape.dense_layers + 1
    if sizes.layers < least or sizes.experts < full.active:
        raise InputError(
            f"{text!r}: at least {least} layers and {full.active} experts are needed (a token "
            f"takes {full.active})"
        )
    return Name(text, shape, sizes)


def _option(text: str, part: str, full: Sizes) -> tuple[str, int]:
    name, _, value = part.partition("=")
    most = {"layers": full.layers, "experts": full.experts, "vocab": full.vocab}
    if name not in most or not value.isdigit() or not 1 <= int(value) <= most[name]:
        raise InputError(
            f"{text!r}: {part!r} is no size; use layers=1..{full.layers}, "
            f"experts=1..{full.experts} or vocab=1..{full.vocab}"
        )
    return name, int(value)


class ThinnedExperts:
    """An ExpertSource whose experts repeat: expert e has the bytes of ``twin(e)``."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self.layers = source.layers
        self.n_experts = source.n_experts

    @staticmethod
    def twin(expert: int) -> int:
        """The first expert with the same bytes."""
        return expert % DISTINCT_EXPERTS

    def types(self, layer: int) -> tuple[str, str, str]:
        """Weight types of gate, up and down."""
        return self._source.types(layer)

    def rows(self, layer: int, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """One expert's matrix, uint8 [n_rows, row_bytes]."""
        return self._source.rows(layer, self.twin(expert), proj)

    def bias(self, layer: int, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """One expert's bias, f32 [n_rows]; None when the model has none."""
        return self._source.bias(layer, self.twin(expert), proj)

    def scale(self, layer: int, expert: int, proj: Proj) -> float:
        """Tensor scale."""
        return self._source.scale(layer, self.twin(expert), proj)

    def tensor_names(self) -> tuple[str, ...]:
        """Every tensor the experts need."""
        return self._source.tensor_names()

    def check(self) -> None:
        """Check shapes and types of the tensors."""
        self._source.check()


def thinned(checkpoint: Checkpoint, source: ExpertSource) -> ExpertSource:
    """The source itself, or the one of a made-up model, whose experts repeat."""
    return ThinnedExperts(source) if isinstance(checkpoint, MadeUpCheckpoint) else source


def _make_up(name: Name) -> MadeUpCheckpoint:
    """All tensors of the model that the metadata describe. The family itself says which they are:
    it reads a first checkpoint that has only what settings are read from."""
    shape, sizes = name.shape, name.sizes
    metadata = shape.metadata(sizes)
    d_model = int(metadata[f"{shape.architecture}.embedding_length"])
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": (shape.types["token_embd"], (sizes.vocab, d_model)),
        "output.weight": (shape.types["output"], (sizes.vocab, d_model)),
        **dict.fromkeys(shape.shows, ("F32", (1,))),
        **{f"layer.{i}": ("F32", (1,)) for i in range(sizes.layers)},
    }
    sketch = _checkpoint(name, tensors, metadata)
    family = find_family(sketch)
    spec = family.spec(sketch)
    sources = family.sources(sketch, spec)
    full: dict[str, tuple[str, tuple[int, ...]]] = {}
    for role, what in inventory(spec).items():
        tensor = sources.roles[role].tensors[0]
        kind = _type(shape, tensor) if what.kind == "matrix" else "F32"
        full[tensor] = (kind, what.shape)
    full |= _experts(shape, spec)
    return _checkpoint(name, full, metadata)


def _experts(shape: Shape, spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer, entry in enumerate(spec.layers):
        ffn = entry.ffn
        if not isinstance(ffn, MoeSpec):
            continue
        types = shape.expert_types(layer)
        for proj, kind in zip(PROJS, types, strict=True):
            wide = (spec.d_model, ffn.width) if proj == "down" else (ffn.width, spec.d_model)
            stem = f"blk.{layer}.ffn_{proj}_exps"
            found[f"{stem}.weight"] = (kind, (ffn.n_experts, *wide))
            if ffn.expert_bias:
                found[f"{stem}.bias"] = ("F32", (ffn.n_experts, wide[0]))
    return found


def _type(shape: Shape, tensor: str) -> str:
    """The weight type of a dense matrix: of its name without layer and ending."""
    stem = tensor.removesuffix(".weight")
    if stem.startswith("blk."):
        stem = stem.split(".", 2)[2]
    return shape.types.get(stem, shape.types["*"])


def _checkpoint(
    name: Name, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, object]
) -> MadeUpCheckpoint:
    rows = [(key, kind, of) for key, (kind, of) in tensors.items()]
    return MadeUpCheckpoint(name.text, rows, metadata, made_up_numbers)


def made_up_numbers(tensor: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Float tensors: norms of 1, decays as trained models have them, small biases, routers and
    taps of ordinary size."""
    rng = np.random.default_rng(zlib.crc32(tensor.encode()))
    stem = tensor.split(".", 2)[-1] if tensor.startswith("blk.") else tensor
    if "norm" in stem:
        return np.ones(shape, np.float32)
    if stem == "ssm_a":
        return -rng.uniform(1, 16, shape).astype(np.float32)
    if stem == "ssm_dt.bias":
        return rng.uniform(-6, -2, shape).astype(np.float32)
    if stem in ("attn_sinks.weight", "exp_probs_b.bias"):
        return np.zeros(shape, np.float32)
    size = 0.02 if stem.endswith(".bias") else shape[-1] ** -0.5
    return (rng.standard_normal(shape) * size).astype(np.float32)
