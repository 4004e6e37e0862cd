"""ggml's rows are the products they claim to be, on any number of threads; refusals are clear."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch

from strata.bench import ggml_rows
from strata.bench.cpu_memory import random_rows
from strata.bench.ggml_rows import Ggml
from strata.core.errors import SettingError
from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.kernels.weight import Weight

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ3_S", "Q2_0", "F32", "F16"])
def test_rows_are_products(name: str) -> None:
    """Expectation: dequantized weights times the activations; ggml rounds these to 8 bits."""
    rng = np.random.default_rng(0)
    raw = random_rows(name, 37, 512, rng)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    cpus = sorted(os.sched_getaffinity(0))
    for n in (1, 2):
        run = Ggml().rows(name, x, 37, [cpus[i % len(cpus)] for i in range(n)])
        assert run is not None
        assert run(Weight(name, 37, 512, torch.from_numpy(raw))) > 0
        w = dequantize(TYPES[name], raw).astype(np.float64)
        expected = x.astype(np.float64) @ w.T
        assert np.abs(run.out - expected).max() < 0.02 * np.abs(expected).max()


@needs_compiler
def test_types_that_ggml_does_not_have() -> None:
    assert Ggml().rows("F8_E4M3_B128", np.zeros((1, 128), np.float32), 16, [0]) is None


def test_missing_package_and_compiler_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_rows.shutil, "which", lambda name: None)
    with pytest.raises(SettingError, match="no C compiler"):
        Ggml()
    monkeypatch.setattr(ggml_rows, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"needs the package libggml-python \(pip install"):
        Ggml()
