"""The start-up report's line about huge pages."""

from __future__ import annotations

import re

import pytest

from strata.experts import huge
from strata.experts.store import ExpertLayer, ExpertStore, anonymous
from strata.kernels.expert_rows import layout


def small_store() -> ExpertStore:
    """Two layers of 3 experts, one without."""
    shape = layout(64, 32, ("F32", "F32", "F32"))
    layers = [ExpertLayer(shape, 24576, anonymous(3 * 24576).view(3, 24576)) for _ in range(2)]
    return ExpertStore([layers[0], None, layers[1]])


@pytest.mark.parametrize(
    ("share", "line"),
    [(0.97, "97% of 0.00 GiB in huge pages"), (0.2, "20% .*transparent_hugepage"), (None, None)],
)
def test_line(share: float | None, line: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pretended answer of the system. Expectation: share and advice; nothing unknown."""
    monkeypatch.setattr(huge, "huge_share", lambda areas: share)
    monkeypatch.setattr(huge, "WORTH_BYTES", 6 * 24576)
    found = huge.huge_lines(small_store())
    if line is None:
        assert found == []
    else:
        assert len(found) == 1 and re.search(line, found[0])


def test_small_models_say_nothing() -> None:
    """Expectation: below 64 MiB no line, whatever the pages."""
    assert huge.huge_lines(small_store()) == []
