"""One torch thread in every test, as in the engine; Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # must be set before the first kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: "cpu" through the interpreter, or "cuda"; the other one is skipped."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if request.param == "cpu" and not interpreted:
        pytest.skip("kernels are compiled here (TRITON_INTERPRET=1 runs them on the CPU)")
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or TRITON_INTERPRET=1")
    return torch.device(request.param)
