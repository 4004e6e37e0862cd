"""What this machine offers to the engine: GPU, cores, instruction sets. Probes only; decides
nothing."""

from __future__ import annotations

import torch

from strata.core.settings_resolve import Machine
from strata.native import available_isas
from strata.native.topology import read_topology


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
    name = torch.cuda.get_device_name(0)
    # until the GPU window exists a card is reported, and refused with the reason
    return None, f"found {name}, but this version runs windows on the CPU only"
