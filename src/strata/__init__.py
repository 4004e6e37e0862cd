"""Strata runs Mixture-of-Experts language models that are larger than the graphics card.

import strata

with strata.load("model.gguf", device="cpu") as model:
    for event in model.generate("Once upon a time", max_tokens=50):
        print(event.text, end="")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.engine.model import Model, load

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """load and Model need torch; ``strata.formats`` and ``strata --version`` do not, so they come
    on demand.
    """
    if name in ("Model", "load"):
        return getattr(importlib.import_module("strata.engine.model"), name)
    raise AttributeError(f"module 'strata' has no attribute {name!r}")
