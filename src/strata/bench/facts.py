"""What a benchmark's number is judged by: bytes and the share of the limit, settings, machine."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass

import torch

from strata import __version__
from strata.bench.machine import Bandwidths
from strata.bench.protocol import Measured
from strata.bench.report import Record
from strata.bench.routing import Ids, measured
from strata.bench.traffic import Traffic, limit_of
from strata.core.settings import SETTINGS
from strata.engine.model import Model


@dataclass(frozen=True)
class Costs:
    """What the model moves, and what the machine can."""

    traffic: Traffic
    bandwidths: Bandwidths


def limits(result: Measured, arm: str, costs: Costs, model: Model) -> tuple[Record, str]:
    """Bytes by where they are read, and the share of the limit: for the record and for people."""
    usage, store = result.usage[arm], model.engine.service.tier.store
    mean = {place: n / max(1, usage.windows) for place, n in usage.distinct.items()}
    limit = limit_of(costs.traffic, mean, costs.bandwidths, model.settings.device)
    seconds, tokens = result.ms_window(arm) / 1e3, max(result.tokens_window(arm), 1e-9)
    laid_out = store.n_bytes / max(1, costs.traffic.all_expert_bytes)
    by_tier = {
        "dense": limit.dense_bytes, "cached_experts": limit.cached_bytes,
        "cpu_experts": limit.cpu_bytes, "link_experts": limit.link_bytes,
    }  # fmt: skip
    record = {
        "fast_bytes_window": limit.fast_bytes,
        "host_bytes_window": limit.host_bytes,
        "bytes_token": {name: n / tokens for name, n in by_tier.items()},
        "expert_bytes_laid_out": laid_out,
        "limit_ms_window": 1e3 * limit.seconds,
        "limit_share": limit.share(seconds),
    }
    return record, limit.line(seconds, laid_out)


def facts_of(model: Model, costs: Costs, trace: Ids | None) -> Record:
    """What the numbers hold for."""
    settings = model.settings
    changed = {
        name: info.show(getattr(settings, name))
        for name, info in SETTINGS.items()
        if getattr(settings, name) != info.default and not info.secret
    }
    locality: object = None if trace is None else measured(trace)
    return {
        "device": settings.device if settings.device == "cpu" else torch.cuda.get_device_name(),
        "machine": f"{platform.machine()}, {settings.workers} workers, {settings.cpu_isa}",
        "workers": settings.workers,
        "expert_cache": model.engine.service.tier.n_slots,
        "resident_bytes": model.engine.service.tier.n_bytes,
        "ram_gb": settings.ram_gb,
        "vram_gb": settings.vram_gb,
        "context": settings.context,
        "settings": changed,
        "locality": locality,
        "dense_bytes": costs.traffic.dense_bytes,
        "all_expert_bytes": costs.traffic.all_expert_bytes,
        "bandwidths": vars(costs.bandwidths),
        "version": __version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
