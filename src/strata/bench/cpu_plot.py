"""The numbers of ``strata bench cpu`` as a picture. Imports matplotlib when a picture is drawn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from strata.bench.cpu_table import busy_line, threads

BARS = {"tiles": "#1b6ca8", "native": "#7fb3d5", "ggml": "#c0392b"}


def plot(found: dict[str, Any], path: Path) -> None:
    """1e9 weights/s by type, a panel for each number of threads and of rows (1 and 4).

    A dash over each bar is what plain reading of the same bytes would allow.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    options = found["options"]
    rows = [n for n in (1, 4) if n in options["rows"]] or options["rows"][:1]
    figure, axes = pyplot.subplots(
        len(options["threads"]), len(rows), squeeze=False, layout="constrained",
        figsize=(1.5 + 4.2 * len(rows), 0.8 + 2.5 * len(options["threads"])),
    )  # fmt: skip
    for row, n in enumerate(options["threads"]):
        for column, n_x in enumerate(rows):
            _panel(axes[row][column], found, n, n_x)
    axes[0][0].legend(fontsize=7, frameon=False, ncols=4, loc="upper center")
    figure.suptitle(f"{found['machine']['processor']}\n{busy_line(found['machine'])}", fontsize=7)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def bars(
    found: dict[str, Any], n_threads: int, rows: int
) -> dict[str, dict[str, tuple[dict[str, float], float]]]:
    """kind of bar -> type -> (weights/s, weights/s at the best speed of reading), 1e9.

    Ours by the fastest instruction set measured.
    """
    best = found["options"]["isas"][-1]
    made: dict[str, dict[str, tuple[dict[str, float], float]]] = {}
    for line in found["rows"]:
        if (line["threads"], line["rows"]) != (n_threads, rows):
            continue
        if line["kernels"] not in (best, "ggml"):
            continue
        kind = "ggml" if line["kernels"] == "ggml" else line["layout"]
        speed = line["gweights_s"]
        made.setdefault(kind, {})[line["type"]] = (speed, speed["best"] / line["share_best"])
    return {kind: made[kind] for kind in BARS if kind in made}


def _panel(axis: Any, found: dict[str, Any], n: int, n_x: int) -> None:
    types, drawn = found["options"]["types"], bars(found, n, n_x)
    width, top = 0.8 / max(1, len(drawn)), 0.0
    for i, (kind, by_type) in enumerate(drawn.items()):
        shift = (i - (len(drawn) - 1) / 2) * width
        x = [types.index(name) + shift for name in by_type]
        speeds = [speed for speed, _ in by_type.values()]
        # a bar is the best; the line reaches from the lower quartile up to it
        middle = [speed["best"] for speed in speeds]
        spread = ([speed["best"] - speed["low"] for speed in speeds], [0.0] * len(speeds))
        axis.bar(x, middle, width, color=BARS[kind], label=kind, yerr=spread,
                 error_kw={"linewidth": 0.6})  # fmt: skip
        limits = [limit for _, limit in by_type.values()]
        left, right = [at - width / 2 for at in x], [at + width / 2 for at in x]
        axis.hlines(limits, left, right, color="black", linewidth=0.8,
                    label="reading memory" if i == len(drawn) - 1 else None)  # fmt: skip
        top = max([top, *middle, *limits])
    axis.set_ylim(0, 1.25 * top)
    axis.set_xticks(range(len(types)), types, rotation=45, ha="right", fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_title(f"{threads(n)}, {n_x} activation row{'s' if n_x > 1 else ''}", fontsize=8)
    axis.set_ylabel("1e9 weights/s times rows", fontsize=7)
