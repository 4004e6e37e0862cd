"""One torch thread in every test, as in the engine; kernels for the GPU are left out, and named,
without Triton."""

import importlib.util

import torch

torch.set_num_threads(1)

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["kernels/*_triton.py"]


def pytest_report_header() -> str:
    """Say what is not tested here."""
    return (
        "triton: found"
        if HAS_TRITON
        else "triton: not installed, tests/kernels/*_triton.py left out"
    )
