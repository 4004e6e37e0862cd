"""Makes the memory of conversations that a loaded model gets. Knows no text."""

from __future__ import annotations

import hashlib
from pathlib import Path

from strata import __version__
from strata.core.settings import SETTINGS
from strata.engine.conversation_file import ConversationFolder
from strata.engine.conversations import Conversations
from strata.engine.engine import Engine
from strata.experts.pack import fingerprint
from strata.models.synthetic import open_model

GIB = 1 << 30
STATE_SETTINGS = (
    "device", "dtype", "numerics", "kv", "prompt_chunk", "defer_cpu", "defer_layers",
    "defer_cpu_below",
)  # fmt: skip
"""Settings that decide what stored state means, besides those that change the output."""


def conversations(engine: Engine, path: str | Path) -> Conversations:
    """The memory of an engine whose model is at a path; looks into --park-dir."""
    settings = engine.settings
    folder = None
    if settings.park_dir:
        folder = ConversationFolder(Path(settings.park_dir), engine.state, identity(engine, path))
    auto = settings.park_gb == SETTINGS["park_gb"].auto
    return Conversations(
        engine,
        chunk_tokens=settings.prompt_chunk,
        n_checkpoints=settings.checkpoints,
        park_bytes=-1 if auto else int(settings.park_gb * GIB),
        exact_windows=engine.runner.variant.name == "exact",
        folder=folder,
    )


def identity(engine: Engine, path: str | Path) -> dict[str, str]:
    """Everything that decides what this engine's state means."""
    with open_model(path) as checkpoint:
        model = fingerprint(checkpoint, list(checkpoint.tensors))
        tokenizer = hashlib.blake2b(digest_size=16)
        for key in sorted(k for k in checkpoint.metadata if k.startswith("tokenizer.")):
            tokenizer.update(repr((key, checkpoint.metadata[key])).encode())
        for name, file in sorted(checkpoint.tokenizer_files.items()):
            tokenizer.update(name.encode() + Path(file).read_bytes())
    changing = [
        name
        for name, info in SETTINGS.items()
        if info.scope == "engine" and (info.changes_output or name in STATE_SETTINGS)
    ]
    shape = [(*key, spec) for key, spec in sorted(engine.state.specs.items())]
    return {
        "version": __version__,
        "model": model,
        "tokenizer": tokenizer.hexdigest(),
        "state": hashlib.blake2b(repr(shape).encode(), digest_size=16).hexdigest(),
        **{f"--{name}": SETTINGS[name].show(getattr(engine.settings, name)) for name in changing},
    }
