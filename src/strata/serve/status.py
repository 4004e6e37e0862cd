"""Facts for /v1/status, /ready and /metrics, from the link's health and the queue."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from strata import __version__
from strata.serve.jobs import Job
from strata.serve.link import Link

_STATE = re.compile(r"^([a-z0-9-]+) = (.*) \((.*?)\): (on|off here)(.*)$")


def facts(link: Link) -> dict[str, float]:
    """Numbers for gauges."""
    health, jobs = link.health, link.jobs
    rows = {place: sum(n) for place, n in health.counters.get("rows", {}).items()}
    total = sum(rows.values())

    def share(*places: str) -> float:
        return sum(rows.get(place, 0) for place in places) / total if total else 0.0

    quality = health.counters.get("quality", {})
    lines = health.info.get("plan", {}).get("lines", [])
    planned = {
        tier: sum(x["bytes"] for x in lines if x["tier"] == tier) for tier in ("ram", "vram")
    }
    context = health.info.get("context_tokens", 0)
    return {
        "running": float(jobs.running is not None),
        "waiting": float(len(jobs.waiting)),
        "context_share": health.counters.get("live_tokens", 0) / context if context else 0.0,
        "ready": float(health.phase == "ready"),
        "progress": health.progress,
        "parked": health.counters.get("parked", 0),
        "parked_bytes": health.counters.get("parked_bytes", 0),
        "faults": health.faults,
        "hit_share": share("FAST"),
        "late_share": share("CPU_LATE"),
        "cpu_share": share("CPU", "CPU_LATE"),
        "pcie_share": share("PCIE"),
        **{f"quality_{k}": v for k, v in quality.items() if not isinstance(v, str)},
        **planned,
    }


def readiness(link: Link) -> dict[str, Any]:
    """Phase and progress."""
    health = link.health
    return {
        "ready": health.phase == "ready",
        "phase": health.phase,
        "progress": round(health.progress, 4),
        "detail": health.detail,
        "last_fault": health.last_fault or None,
    }


def features(report: list[str]) -> list[dict[str, str]]:
    """What was asked for, and whether it is on, on and changing the output, or off here and why;
    from the engine's own start-up report."""
    found: list[dict[str, str]] = []
    for line in report:
        match = _STATE.match(line)
        if match is not None:
            name, value, source, state, rest = match.groups()
            found.append({"name": name, "value": value, "source": source, "state": state + rest})
    return found


def status(link: Link, name: str, server_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the monitor shows."""
    health = link.health
    info, counters = health.info, health.counters
    report = info.get("report", [])
    return {
        "version": __version__,
        **readiness(link),
        "model": {
            "id": name,
            **{key: info.get(key) for key in ("family", "layers", "vocabulary", "context_tokens")},
        },
        "mode": {
            "name": info.get("mode"),
            "exact": info.get("exact"),
            "changes_output": [
                key for key, row in info.get("settings", {}).items() if row["changes_output"]
            ],
        },
        "engine": {"pid": link.pid, "starts": health.starts, "faults": health.faults},
        "queue": queue(link),
        "features": features(report),
        "settings": dict(info.get("settings", {})),
        "server": dict(server_settings),
        "report": report,
        "plan": info.get("plan", {}),
        "rows": counters.get("rows", {}),
        "quality": counters.get("quality", {}),
        "timeline_ms": counters.get("timeline", []),
        "conversations": {
            key: counters.get(key, 0)
            for key in ("live_tokens", "checkpoints", "parked", "parked_bytes")
        },
        "shares": {k: v for k, v in facts(link).items() if k.endswith("_share")},
        "last": link.last,
    }


def queue(link: Link) -> dict[str, Any]:
    """Who is decoded and who waits, in order."""
    jobs, now = link.jobs, time.monotonic()

    def row(job: Job, position: int) -> dict[str, Any]:
        return {
            "id": job.request.id,
            "kind": job.kind,
            "position": position,
            "age_s": round(now - job.created, 3),
            "prompt_tokens": len(job.request.tokens),
            "read_tokens": job.read[0],
            "generated": job.generated,
            "cancelled": job.cancelled is not None,
        }

    return {
        "running": row(jobs.running, 0) if jobs.running else None,
        "waiting": [row(job, i + 1) for i, job in enumerate(jobs.waiting)],
    }
