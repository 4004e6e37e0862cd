"""Which machine this is, and which model: short texts for reports and fingerprints for profiles."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

from strata.core.settings import Settings
from strata.engine.machine import probe
from strata.experts.pack import fingerprint
from strata.formats.checkpoint import open_checkpoint

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MachineFacts:
    """What speeds depend on: processor, cores this process may use, instruction set, GPU."""

    processor: str
    cores: int
    isa: str
    gpu: str

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.processor}, {self.cores} cores, {self.isa}, {self.gpu or 'no GPU'}"

    @property
    def digest(self) -> str:
        """For profiles."""
        return hashlib.blake2b(self.line.encode(), digest_size=8).hexdigest()


def machine_facts(settings: Settings | None = None) -> MachineFacts:
    """This machine; settings: as far as they leave parts of it unused (device, workers, ISA)."""
    found = probe()
    cores = found.cpu_cores if settings is None else settings.workers or found.cpu_cores
    isa = found.cpu_isas[-1]
    if settings is not None and settings.cpu_isa != "auto":
        isa = settings.cpu_isa
    on_gpu = settings is None or settings.device != "cpu"
    return MachineFacts(processor(), cores, isa, (found.gpu or "") if on_gpu else "")


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name as the system tells it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def model_digest(path: str | Path) -> str:
    """Fingerprint of a checkpoint: its table of tensors, sizes, and samples of its bytes."""
    with open_checkpoint(path) as checkpoint:
        return fingerprint(checkpoint, list(checkpoint.tensors))
