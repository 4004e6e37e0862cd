"""Makes one tiny checkpoint and its reference numbers."""

from __future__ import annotations

import atexit
import json
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.oracle.deferral import deferrable, run_deferred
from tests.oracle.draft import Draft
from tests.oracle.families import FAMILIES, SIZES, Sizes, Tiny
from tests.oracle.packed import claim, packed, rounded
from tests.oracle.release import config, tensors
from tests.oracle.run import capture, greedy, pieces, router_margin
from tests.oracle.weights import fill

EOS = 7
CLOSE_CALL = 1e-4


@dataclass(frozen=True)
class Options:
    """What to make.

    config: settings that replace the family's; sizes: the same for the block selection.

    storage: "bf16", or "fp8" / "mxfp4": weights that the packed form holds exactly, written in that
    form. detail: keep each layer's states; deferral: also the numbers with late experts.
    """

    size: str = "pico"
    seed: int = 22
    n_tokens: int = 90
    sizes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    draft: bool = True
    storage: str = "bf16"
    detail: bool = False
    deferral: bool = False


@dataclass(frozen=True)
class Reference:
    """Numbers of the float32 forward over the stored weights.

    input_ids [T], logits [T, V], greedy_ids [G] after the prompt, margin [T]: the closest choice
    (router or block selection) of that token over all layers. more: further arrays by name.
    """

    input_ids: np.ndarray
    logits: np.ndarray
    greedy_ids: np.ndarray
    margin: np.ndarray
    more: dict[str, np.ndarray] = field(default_factory=dict)

    def comparable(self, close: float = CLOSE_CALL) -> int:
        """Tokens before the first choice that rounding could turn."""
        near = np.flatnonzero(self.margin < close)
        return int(near[0]) if len(near) else len(self.margin)

    def save(self, path: Path) -> None:
        """As a compressed npz."""
        arrays = {k: getattr(self, k) for k in ("input_ids", "logits", "greedy_ids", "margin")}
        np.savez_compressed(path, **arrays, **self.more)

    @staticmethod
    def load(path: Path) -> Reference:
        """From an npz written by ``save``."""
        with np.load(path) as found:
            arrays = {name: found[name] for name in found.files}
        own = {k: arrays.pop(k) for k in ("input_ids", "logits", "greedy_ids", "margin")}
        return Reference(**own, more=arrays)


def make(family: str, out: Path, options: Options | None = None) -> Reference:
    """Write config.json and model.safetensors into ``out`` and compute their reference numbers."""
    options = options or Options()
    sizes = replace(SIZES[options.size], **options.sizes)
    with torch.no_grad(), warnings.catch_warnings():
        _quiet()
        tiny = FAMILIES[family](sizes, **options.config)
        stored, described = _drawn(family, tiny, options)
        if options.storage != "bf16":
            stored = rounded(stored, options.storage)
        _write(out, stored, described)
        model = _read_back(tiny, out)
        if options.storage != "bf16":
            _write(out, packed(stored, options.storage), described | claim(options.storage))
        return _reference(model, tiny, sizes, options)


_made: dict[str, tuple[Path, Reference]] = {}


def cached(family: str, options: Options | None = None) -> tuple[Path, Reference]:
    """``make`` once per process: (folder of the checkpoint, reference).

    The folder goes away at exit.
    """
    options = options or Options()
    key = f"{family} {options!r}"
    if key not in _made:
        folder = tempfile.TemporaryDirectory(prefix="strata-oracle-")
        atexit.register(folder.cleanup)
        out = Path(folder.name) / family
        _made[key] = out, make(family, out, options)
    return _made[key]


def _quiet() -> None:
    """Keep the warnings and progress bars of the libraries out of the tests."""
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _drawn(
    family: str, tiny: Tiny, options: Options
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and config.json of freshly drawn weights, in bfloat16."""
    tiny.config._attn_implementation = "eager"
    model = tiny.model(tiny.config).to(torch.float32).eval()
    fill(model, options.seed, tiny.centered)
    draft = None
    if family == "qwen4_exp" and options.draft:
        draft = Draft(tiny.config, _modeling()).to(torch.float32).eval()
        fill(draft, options.seed + 1, tiny.centered)
    return tensors(family, tiny, model, draft), config(family, tiny, draft is not None)


def _write(out: Path, stored: dict[str, torch.Tensor], described: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(stored, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(described, indent=1, default=str) + "\n")


def _modeling() -> Any:
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    return modeling_qwen4_exp


def _read_back(tiny: Tiny, out: Path) -> Any:
    """The checkpoint as transformers' own loader reads it, not the object that wrote it."""
    model, info = tiny.model.from_pretrained(
        str(out), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    model.set_experts_implementation("eager")
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith("mtp.")]
    assert not info["missing_keys"] and not unexpected, (info["missing_keys"], unexpected)
    return model


def prompt(sizes: Sizes, seed: int, n_tokens: int) -> torch.Tensor:
    """Random ids [1, T] with an end-of-text inside and a repeated n-gram."""
    generator = torch.Generator().manual_seed(seed + 2)
    ids = torch.randint(8, sizes.vocab - 8, (1, n_tokens), generator=generator)
    third = n_tokens // 3
    ids[0, third] = EOS
    ids[0, third + 9 : third + 14] = ids[0, 2:7]
    return ids


def _reference(model: Any, tiny: Tiny, sizes: Sizes, options: Options) -> Reference:
    ids = prompt(sizes, options.seed, options.n_tokens)
    found, _ = capture(model, ids, tiny)
    start = options.n_tokens * 2 // 5
    stepwise = pieces(model, ids, [start] + [1] * (options.n_tokens - start))
    drift = float((stepwise - torch.from_numpy(found["logits"])).abs().max())
    assert drift < 1e-4 * float(np.abs(found["logits"]).max()), f"transformers disagrees by {drift}"
    margin = np.full(options.n_tokens, np.inf, np.float32)
    for key in [k for k in found if k.endswith(".router_logits")]:
        experts = found[key.replace("router_logits", "expert")]
        margin = np.minimum(margin, router_margin(found[key], experts))
    for key in [k for k in found if k.endswith(".block_margin")]:
        margin = np.minimum(margin, found[key])
    more = {k: v for k, v in found.items() if options.detail and k != "logits"}
    if options.deferral:
        more |= _deferred(model, ids, tiny, sizes, options.seed)
    return Reference(ids[0].numpy(), found["logits"], greedy(model, ids, 16), margin, more)


def _deferred(
    model: Any, ids: torch.Tensor, tiny: Tiny, sizes: Sizes, seed: int
) -> dict[str, np.ndarray]:
    """Half of the experts late in every layer that may defer, and the same added back in place."""
    late = torch.zeros(sizes.e)
    order = torch.randperm(sizes.e, generator=torch.Generator().manual_seed(seed + 3))
    late[order[: sizes.e // 2]] = 1
    layers = deferrable(model)
    held = run_deferred(model, ids, late, layers, tiny.streams, hold=True)
    check = run_deferred(model, ids, late, layers, tiny.streams, hold=False)
    return {
        "late_experts": late.numpy(),
        "late_layers": np.array(layers),
        "logits_late": held.numpy(),
        "logits_late_check": check.numpy(),
    }
