"""Which layout each layer's experts get: the file's rows, or tiles (docs/decisions/003-tiles.md).

Knows sizes and costs that it is told; measures and allocates nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.core.errors import SettingError
from strata.experts.store import store_bytes
from strata.formats.tiles import Layout, tile_format
from strata.kernels.expert_rows import NATIVE, ExpertShape, Layouts, relayout

Entry = tuple[ExpertShape, int] | None
"""(blob layout, experts) of a layer; None for a layer without routed experts."""

Cost = Callable[[str, Layout], float]
"""(weight type, layout) -> seconds that one weight takes here, read once."""

GIB = 1 << 30


@dataclass(frozen=True)
class LayoutChoice:
    """The layers' shapes, and lines that say what was chosen and why."""

    shapes: tuple[Entry, ...]
    lines: tuple[str, ...]


def choose_layouts(
    native: Sequence[Entry],
    asked: str,
    *,
    reads_tiles: bool,
    fits: Callable[[Sequence[Entry]], bool],
    cost: Cost | None = None,
) -> LayoutChoice:
    """Layouts for every layer.

    native: all layers in native layout. asked: "auto", "tiles" or "native". reads_tiles: whether
    the kernels here can read tiles. fits: whether the memory plan holds with these shapes. cost:
    measured speed; without it tiles count as faster. auto takes tiles where they are faster, for
    the layers that gain most per byte first, as long as the plan fits.

    SettingError when tiles are asked for and cannot be read, or no matrix has any.
    """
    tiled = [_tiled(entry, cost if asked == "auto" else None) for entry in native]
    able = [layer for layer, entry in enumerate(tiled) if entry != native[layer]]
    n_moe = sum(entry is not None for entry in native)
    if asked == "tiles" and not reads_tiles:
        raise SettingError(
            "--expert-layout tiles: the CPU kernels of this build read no tiles; use native or auto"
        )
    if asked == "tiles" and not able and n_moe:
        raise SettingError(
            "--expert-layout tiles: no expert matrix here has tiles (floats stay as they are); "
            "use native or auto"
        )
    if asked == "native" or not able or not reads_tiles:
        reason = _why_native(asked, native, reads_tiles)
        return LayoutChoice(tuple(native), _lines(native, native, reason))
    if asked == "tiles" or fits(tiled):
        reason = "asked for" if asked == "tiles" else _why_tiles(cost)
        return LayoutChoice(tuple(tiled), _lines(native, tiled, reason))
    shapes = list(native)
    for layer in sorted(able, key=lambda i: -_worth(native[i], tiled[i], cost)):
        shapes[layer] = tiled[layer]
        if not fits(shapes):
            shapes[layer] = native[layer]
    return LayoutChoice(
        tuple(shapes), _lines(native, shapes, "the memory plan has no room for more")
    )


def impose_layouts(native: Sequence[Entry], wanted: Sequence[Layouts | None]) -> list[Entry]:
    """The layers with given layouts; None keeps a layer as it is."""
    return [
        entry if entry is None or layouts is None else (relayout(entry[0], layouts), entry[1])
        for entry, layouts in zip(native, wanted, strict=True)
    ]


def _tiled(entry: Entry, cost: Cost | None) -> Entry:
    """A layer with tiles for every matrix that has them and (by cost) gains from them."""
    if entry is None:
        return None

    def better(kind: str) -> Layout:
        if tile_format(kind) is None:
            return "native"
        slower = cost is not None and cost(kind, "tiles") >= cost(kind, "native")
        return "native" if slower else "tiles"

    shape, n_experts = entry
    gate, up, down = (better(kind) for kind in shape.types)
    layouts = (gate, up, down)
    return entry if layouts == NATIVE else (relayout(shape, layouts), n_experts)


def _worth(native: Entry, tiled: Entry, cost: Cost | None) -> float:
    """Seconds gained (or weights re-coded) per byte more; endless where tiles take no more."""
    assert native is not None and tiled is not None
    more = store_bytes([tiled]) - store_bytes([native])
    shape, n_experts = tiled
    gain = 0.0
    for kind, how in zip(shape.types, shape.layouts, strict=True):
        if how == "tiles":
            gain += 1.0 if cost is None else cost(kind, "native") - cost(kind, "tiles")
    gain *= shape.d_model * shape.d_expert * n_experts
    return gain / more if more > 0 else float("inf")


def _why_native(asked: str, native: Sequence[Entry], reads_tiles: bool) -> str:
    if asked == "native":
        return "asked for"
    types = {kind for entry in native if entry is not None for kind in entry[0].types}
    if all(tile_format(kind) is None for kind in types):
        return "float weights have no tiles"
    if not reads_tiles:
        return "the CPU kernels of this build read no tiles"
    return "tiles would not be faster here"


def _why_tiles(cost: Cost | None) -> str:
    return "the memory plan holds them" if cost is None else "faster here, and the plan holds them"


def _lines(native: Sequence[Entry], chosen: Sequence[Entry], reason: str) -> tuple[str, ...]:
    """What became of the layers, for people: one line, none for a model without experts."""
    kinds: Counter[str] = Counter()
    for entry in chosen:
        if entry is not None:
            tiles = [how == "tiles" for how in entry[0].layouts]
            kinds["tiles" if all(tiles) else "partly" if any(tiles) else "native"] += 1
    if not kinds:
        return ()
    more = (store_bytes(chosen) - store_bytes(native)) / GIB
    parts = []
    if kinds["tiles"] or kinds["partly"]:
        parts.append(f"{_layers(kinds['tiles'] + kinds['partly'])} as tiles ({more:+.2f} GiB)")
        if kinds["partly"]:
            parts[0] += f", {kinds['partly']} of them partly"
    if kinds["native"]:
        parts.append(f"{_layers(kinds['native'])} native")
    return (f"experts: {', '.join(parts)}: {reason}",)


def _layers(n: int) -> str:
    return f"{n} layer" if n == 1 else f"{n} layers"
