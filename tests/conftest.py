"""One torch thread in every test, as in the engine; Triton's interpreter where there is no GPU.

Without Triton (optional on a machine without a GPU) its tests are left out, and the header says so.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal

import pytest
import torch

from tests.unpack import unpack

unpack()
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts background jobs so; tests of interrupts, and programs they start, need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # must be set before the first kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["kernels/*_triton.py"]


def pytest_report_header() -> str:
    """Say what is not tested here."""
    return "triton: found" if HAS_TRITON else "triton: missing, tests/kernels/*_triton.py left out"


def pytest_collection_finish() -> None:
    """Loading a model collects garbage; modules and tests are none, and looking at all of them
    takes a tenth of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: "cpu" through the interpreter, or "cuda"; the other one is skipped."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if request.param == "cpu" and not interpreted:
        pytest.skip("kernels are compiled here (TRITON_INTERPRET=1 runs them on the CPU)")
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or TRITON_INTERPRET=1")
    return torch.device(request.param)
