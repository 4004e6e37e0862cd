"""The choice of layouts: what is asked for, what fits, what is faster, and the line that says so.

Expectations: the rules in the docstring of ``choose_layouts``, and sizes from ``store_bytes``.
"""

from __future__ import annotations

import pytest

from strata.core.errors import SettingError
from strata.experts.layouts import choose_layouts, impose_layouts
from strata.experts.store import store_bytes
from strata.kernels.expert_rows import NATIVE
from tests.experts.made_up import MadeUpExperts

ALL_TILES = ("tiles", "tiles", "tiles")
MIXED = MadeUpExperts(
    256, 256, 4, (("IQ2_S",) * 3, None, ("Q4_K", "Q4_K", "Q6_K"), ("BF16",) * 3, ("IQ3_S",) * 3)
)
FLOATS = MadeUpExperts(64, 32, 4, (("F32",) * 3,))
DENSE = MadeUpExperts(64, 32, 4, (None, None))


def choose(source, asked="auto", room=None, reads_tiles=True, cost=None):
    """room: bytes beyond the native layout; None = endless."""
    native = source.shapes()
    limit = None if room is None else store_bytes(native) + room

    def fits(shapes):
        return limit is None or store_bytes(shapes) <= limit

    return choose_layouts(native, asked, reads_tiles=reads_tiles, fits=fits, cost=cost)


def layouts(choice):
    return [None if entry is None else entry[0].layouts for entry in choice.shapes]


def growth(source, *layers):
    """Bytes more with tiles in these layers."""
    native = source.shapes()
    wanted = [ALL_TILES if i in layers else None for i in range(len(native))]
    return store_bytes(impose_layouts(native, wanted)) - store_bytes(native)


def test_auto_takes_tiles_where_all_fit():
    choice = choose(MIXED)
    assert layouts(choice) == [ALL_TILES, None, ALL_TILES, NATIVE, ALL_TILES]
    more = growth(MIXED, 0, 2, 4) / (1 << 30)
    assert choice.lines == (
        f"experts: 3 layers as tiles ({more:+.2f} GiB), 1 layer native: the memory plan holds them",
    )


def test_auto_takes_the_layers_that_gain_most_per_byte():
    """Q4_K and Q6_K grow least by tiles, then IQ3_S, then IQ2_S (bits a weight: decision 003)."""
    assert growth(MIXED, 2) < growth(MIXED, 4) < growth(MIXED, 0)
    room = growth(MIXED, 2, 4)
    choice = choose(MIXED, room=room)
    assert layouts(choice) == [NATIVE, None, ALL_TILES, NATIVE, ALL_TILES]
    assert "2 layers as tiles" in choice.lines[0] and "no room for more" in choice.lines[0]
    assert layouts(choose(MIXED, room=room - 1)) == [NATIVE, None, ALL_TILES, NATIVE, NATIVE]
    # a layer that does not fit does not keep a smaller one out
    assert layouts(choose(MIXED, room=growth(MIXED, 4))) == [
        NATIVE, None, ALL_TILES, NATIVE, NATIVE,
    ]  # fmt: skip
    assert layouts(choose(MIXED, room=0)) == [NATIVE, None, NATIVE, NATIVE, NATIVE]


def test_auto_leaves_types_native_that_are_slower_as_tiles():
    """Costs as if measured: IQ2_S gains nothing, Q6_K neither, the others do."""

    def cost(kind, how):
        return {"tiles": 2.0, "native": 1.0 if kind in ("IQ2_S", "Q6_K") else 3.0}[how]

    choice = choose(MIXED, cost=cost)
    assert layouts(choice) == [NATIVE, None, ("tiles", "tiles", "native"), NATIVE, ALL_TILES]
    assert "2 layers as tiles" in choice.lines[0] and "1 of them partly" in choice.lines[0]
    assert "2 layers native: faster here" in choice.lines[0]
    none = choose(MIXED, cost=lambda kind, how: 1.0)
    assert layouts(none) == layouts(choose(MIXED, "native"))
    assert none.lines[0].endswith("4 layers native: tiles would not be faster here")


def test_tiles_asked_for_are_never_replaced():
    """Even where they do not fit: the memory plan then says so."""
    assert layouts(choose(MIXED, "tiles", room=0)) == layouts(choose(MIXED))
    assert choose(MIXED, "tiles").lines[0].endswith("asked for")
    with pytest.raises(SettingError, match="--expert-layout tiles.*read no tiles"):
        choose(MIXED, "tiles", reads_tiles=False)
    with pytest.raises(SettingError, match="no expert matrix here has tiles"):
        choose(FLOATS, "tiles")


def test_native_and_why():
    assert layouts(choose(MIXED, "native")) == [NATIVE, None, NATIVE, NATIVE, NATIVE]
    assert choose(MIXED, "native").lines == ("experts: 4 layers native: asked for",)
    assert choose(MIXED, reads_tiles=False).lines[0].endswith("kernels of this build read no tiles")
    assert choose(FLOATS).lines == ("experts: 1 layer native: float weights have no tiles",)
    assert choose(DENSE).lines == () and choose(DENSE, "tiles").lines == ()
