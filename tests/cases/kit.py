"""What the cases share: loading, refusing, and the command line as a user sees it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

import strata
from strata import cli
from strata.core.errors import InputError
from strata.engine.model import Model


def load(path: Path, **settings: Any) -> Model:
    """On the CPU, one worker, a short context unless another is asked for."""
    return strata.load(path, **({"device": "cpu", "workers": 1, "context": 128} | settings))


def tokens_of(model: Model, prompt: Any, n: int, **sampling: Any) -> list[int]:
    """Ids of an answer of n tokens."""
    return [event.token for event in model.generate(prompt, max_tokens=n, **sampling)]


def refused(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Both doors refuse the file in one clear line that has the words: Python by an InputError,
    ``strata run`` with code 2; nothing is printed as an answer. Gives the line."""
    with pytest.raises(InputError) as caught:
        load(path).close()
    line = str(caught.value)
    assert "\n" not in line and "Traceback" not in line
    capsys.readouterr()
    assert cli.main(["run", str(path), "hi", "--raw", "--device", "cpu", "--quiet"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == f"strata: {line}\n"
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"
    return line


def peak_rss_bytes() -> int:
    """Most memory this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
