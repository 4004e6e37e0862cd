"""What the system made of the request for huge pages, for the start-up report."""

from __future__ import annotations

from strata.experts.store import ExpertLayer, ExpertStore
from strata.memory.pages import huge_share

WORTH_BYTES = 64 << 20


def huge_lines(store: ExpertStore) -> list[str]:
    """One line about the experts in anonymous memory; none for small models, experts on disk, or
    where the system does not tell."""
    areas = [layer.blobs for layer in store.layers if isinstance(layer, ExpertLayer)]
    n_bytes = sum(area.numel() for area in areas)
    share = huge_share(areas) if n_bytes >= WORTH_BYTES else None
    if share is None:
        return []
    line = f"experts: {share:.0%} of {n_bytes / 2**30:.2f} GiB in huge pages"
    if share < 0.5:
        line += (
            "; reading is slower without them: allow them by "
            "/sys/kernel/mm/transparent_hugepage/enabled = madvise, and free memory before loading"
        )
    return [line]
