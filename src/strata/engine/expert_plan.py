"""How the routed experts will lie in memory and where they come from, before any is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.core.errors import InputError, SettingError, UnsupportedError
from strata.core.settings import Settings
from strata.experts.layouts import GIB, Cost, Entry, LayoutChoice, choose_layouts, impose_layouts
from strata.experts.loader import load_experts
from strata.experts.mapped import map_experts, mapped_bytes
from strata.experts.pack import (
    Pack,
    check_pack,
    fingerprint,
    load_pack,
    open_pack,
    require_room,
    write_pack,
)
from strata.experts.repeated import load_repeated
from strata.experts.store import ExpertStore, Progress
from strata.formats.checkpoint import Checkpoint
from strata.models.expert_source import ExpertSource
from strata.models.synthetic import ThinnedExperts

GPU_READS = ("BF16", "F16", "F32")
"""Types that kernels of a GPU read as the file has them."""


@dataclass(frozen=True)
class ExpertPlan:
    """shapes: of every layer, layouts decided. lines: what was decided and why, for people.

    pack: where they are read from instead of the checkpoint. pack_hash: of the checkpoint, where
    --pack is given.
    """

    shapes: tuple[Entry, ...]
    lines: tuple[str, ...]
    pack: Pack | None
    pack_hash: str


def plan_experts(
    native: Sequence[Entry],
    source: ExpertSource,
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    reads_tiles: bool,
    fits: Callable[[Sequence[Entry]], bool],
    cost: Cost | None = None,
) -> ExpertPlan:
    """Decide layouts (``experts.layouts``), and whether a pack is read, written, or neither.

    A pack that belongs to the checkpoint brings its layouts along under --expert-layout auto.
    Errors as for ``choose_layouts``, ``open_pack`` and ``check_pack``; InputError when there is no
    room on disk for a pack that will be written.
    """
    _refuse_made_up(source, settings)
    if settings.experts_on_disk:
        return ExpertPlan(tuple(native), _disk_lines(native), None, "")
    if settings.pack is None:
        choice = choose_layouts(
            native, settings.expert_layout, reads_tiles=reads_tiles, fits=fits, cost=cost
        )
        return ExpertPlan(choice.shapes, choice.lines, None, "")
    pack_hash = fingerprint(checkpoint, source.tensor_names())
    pack = open_pack(settings.pack, pack_hash, native)
    packed = None if pack is None else _packed_choice(pack, native, settings, reads_tiles)
    choice = packed or choose_layouts(
        native, settings.expert_layout, reads_tiles=reads_tiles, fits=fits, cost=cost
    )
    if pack is not None:
        check_pack(pack, choice.shapes)
    else:
        require_room(settings.pack, choice.shapes)
    return ExpertPlan(choice.shapes, choice.lines, pack, pack_hash)


def load_planned(
    plan: ExpertPlan, source: ExpertSource, settings: Settings, progress: Progress | None
) -> ExpertStore:
    """The experts in RAM, from the pack or the checkpoint; a pack asked for is written. With
    --experts-on-disk: where they are."""
    workers = settings.workers
    if settings.experts_on_disk:
        return map_experts(plan.shapes, source)
    if plan.pack is not None:
        return load_pack(plan.pack, plan.shapes, progress, workers=workers)
    if isinstance(source, ThinnedExperts):
        return load_repeated(plan.shapes, source, source.twin, progress, workers=workers)
    store = load_experts(plan.shapes, source, progress, workers=workers)
    if settings.pack is not None:
        write_pack(settings.pack, plan.pack_hash, store, progress, workers=workers)
    return store


def require_gpu_reads(shapes: Sequence[Entry]) -> None:
    """UnsupportedError for experts whose layout a GPU cannot read."""
    unread: set[str] = set()
    for shape, _ in (entry for entry in shapes if entry is not None):
        kinds = zip(shape.types, shape.layouts, strict=True)
        unread |= {k for k, how in kinds if how == "native" and k not in GPU_READS}
    if unread:
        raise UnsupportedError(
            f"experts of type {', '.join(sorted(unread))} lie in the file's own layout, which "
            f"the GPU does not read; --expert-layout tiles needs more RAM, --device cpu reads them"
        )


def _refuse_made_up(source: ExpertSource, settings: Settings) -> None:
    asked = "--pack" if settings.pack is not None else "--experts-on-disk"
    if isinstance(source, ThinnedExperts) and (
        settings.pack is not None or settings.experts_on_disk
    ):
        raise SettingError(f"{asked}: a synthetic model has no files; leave the setting out")


def _disk_lines(native: Sequence[Entry]) -> tuple[str, ...]:
    on_disk, _ = mapped_bytes(native)
    return (f"experts: {on_disk / GIB:.2f} GiB stay in the checkpoint's files: asked for",)


def _packed_choice(
    pack: Pack, native: Sequence[Entry], settings: Settings, reads_tiles: bool
) -> LayoutChoice | None:
    """The pack's own layouts; None when others are asked for or these cannot be read here."""
    layouts = [layer.layouts if layer is not None else None for layer in pack.layers]
    has_tiles = any(how is not None and "tiles" in how for how in layouts)
    if settings.expert_layout != "auto" or (has_tiles and not reads_tiles):
        return None
    try:
        shapes = impose_layouts(native, layouts)
    except InputError:
        return None  # no such tiles: check_pack says what is packed and what is wanted
    n_tiles = sum(how is not None and "tiles" in how for how in layouts)
    line = f"experts: as the pack {pack.folder} holds them, {n_tiles} layers with tiles"
    return LayoutChoice(tuple(shapes), (line,))
