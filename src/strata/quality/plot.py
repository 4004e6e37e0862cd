"""KL by position as a picture. matplotlib is needed for this alone, and loaded when it is asked
for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata.core.errors import InputError, UnsupportedError
from strata.quality.scores import ArmResult

FORMATS = (".png", ".svg", ".pdf")
SMALLEST = 1e-6
"""Drawn for anything smaller: the axis is logarithmic."""


def plot_by_position(arms: Sequence[ArmResult], path: Path, title: str) -> None:
    """Draw each arm's mean top-20 KL by position bucket. UnsupportedError without matplotlib."""
    pyplot = _pyplot(path)
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=80)
    for arm in arms:
        buckets = arm.buckets[:-1]
        heights = [max(bucket.kl_top, SMALLEST) for bucket in buckets]
        axes.plot([b.positions for b in buckets], heights, marker="o", label=arm.name)
    axes.set_yscale("log")
    axes.set_xlabel("position in the text, tokens")
    axes.set_ylabel("mean top-20 KL, nats")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7)
    _save(pyplot, figure, path)


def plot_pareto(
    points: Sequence[tuple[str, float, float, bool]], budget: float, path: Path
) -> None:
    """Draw speed over KL; points: (name, mean KL, tokens/s, whether none is better in both)."""
    pyplot = _pyplot(path)
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=80)
    for name, kl, speed, best in points:
        axes.plot(max(kl, SMALLEST), speed, "o" if best else "x", color="C0" if best else "C7")
        axes.annotate(name, (max(kl, SMALLEST), speed), fontsize=6)
    if budget > 0:
        axes.axvline(budget, linestyle="--", color="C3", label=f"budget {budget:g}")
        axes.legend(fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("mean top-20 KL, nats")
    axes.set_ylabel("tokens/s")
    _save(pyplot, figure, path)


def _pyplot(path: Path) -> Any:
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: a plot's name ends in {', '.join(FORMATS)}")
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed; pip install matplotlib, or leave "
            "--plot out"
        ) from None


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
