"""What this machine offers to the engine: GPU, cores, instruction sets. Probes only; decides
nothing."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from strata.core.settings_resolve import Machine
from strata.native import available_isas
from strata.native.topology import read_topology

LEAST_CAPABILITY = (8, 0)
PACKAGES = {"triton": "triton", "cuda": "cuda-bindings"}
"""What windows on a GPU need besides torch: module and package."""


def probe() -> Machine:
    """Look at this machine now."""
    gpu, report = _gpu()
    cores = read_topology().default_workers
    return Machine(gpu=gpu, gpu_report=report, cpu_cores=cores, cpu_isas=available_isas())


def _gpu() -> tuple[str | None, str]:
    """(name of a usable GPU or None, what was looked for and found)."""
    build = torch.version.cuda
    if build is None:
        return None, f"looked for CUDA through torch {torch.__version__}, which is a CPU-only build"
    if not torch.cuda.is_available():
        return None, f"looked for CUDA {build} devices, found none that this process may use"
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        have = ".".join(map(str, capability))
        return None, f"found {name} of compute capability {have}; its kernels need {least}"
    for package in ("triton", "cuda"):
        if find_spec(package) is None:
            return None, f"found {name}, but the package {PACKAGES[package]} is not installed"
    return name, f"found {name}"
