"""How much of memory really lies in huge pages: madvise only asks, the system may not have any.

Reads /proc/self/smaps; knows no experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def huge_share(areas: Sequence[torch.Tensor], smaps: Path | None = None) -> float | None:
    """Share of the areas' resident bytes in transparent huge pages; None where nobody tells.

    Counts the whole mappings that the areas lie in, as the system does. smaps: instead of this
    process's (tests).
    """
    try:
        text = (smaps or Path("/proc/self/smaps")).read_text()
    except OSError:
        return None
    spans = [(a.data_ptr(), a.data_ptr() + a.numel() * a.element_size()) for a in areas]
    resident = huge = 0
    counts = False
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, end = name.partition("-")
            start, stop = int(first, 16), int(end, 16)
            counts = any(start < high and low < stop for low, high in spans)
        elif counts and name == "Rss:":
            resident += int(rest.split()[0])
        elif counts and name == "AnonHugePages:":
            huge += int(rest.split()[0])
    return huge / resident if resident else None
