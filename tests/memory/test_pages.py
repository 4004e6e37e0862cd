"""Share of huge pages, from a made-up smaps and from this process's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strata.experts.store import anonymous
from strata.memory.pages import huge_share

ENTRY = """{start:x}-{stop:x} rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                {rss} kB
AnonHugePages:      {huge} kB
VmFlags: rd wr mr mw me ac hg
"""


def test_only_the_mappings_of_the_areas_count(tmp_path: Path) -> None:
    """Two areas in two mappings, a third mapping beside them. Expectation: by hand, (2048 + 0) of
    (4096 + 1000) kB; nothing resident or no such file: None."""
    memory = torch.zeros(3 * 4096, dtype=torch.uint8)
    start = memory.data_ptr()
    spans = [(start + 4096 * i, start + 4096 * (i + 1)) for i in range(3)]
    numbers = [(4096, 2048), (777, 700), (1000, 0)]
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "".join(
            ENTRY.format(start=a, stop=b, rss=rss, huge=huge)
            for (a, b), (rss, huge) in zip(spans, numbers, strict=True)
        )
    )
    areas = [memory[100:200], memory[8192:]]
    assert huge_share(areas, smaps) == pytest.approx(2048 / 5096)
    assert huge_share([torch.zeros(0)], smaps) is None
    assert huge_share(areas, tmp_path / "none") is None


def test_own_memory() -> None:
    """Written anonymous memory of this process. Expectation: a share between 0 and 1 where the
    system has /proc."""
    memory = anonymous(8 << 20)
    memory.fill_(1)
    share = huge_share([memory])
    if share is None:
        pytest.skip("no /proc/self/smaps here")
    assert 0.0 <= share <= 1.0
