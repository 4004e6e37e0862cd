"""Counters for Prometheus, under vLLM's names where it has one, under ``strata:`` where not.

Everything exists from the start, with zeros. Counters only grow: what the engine counts is added as
differences, so a restarted engine does not take them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from strata.core.types import Place
from strata.serve.jobs import Job
from strata.serve.messages import End

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_FINISHES = ("stop", "length", "cancelled", "error")


class Metrics:
    """All counters of one server. health: reads link, queue and engine facts when asked."""

    def __init__(self, model: str, facts: Callable[[], Mapping[str, float]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._label = model
        self.prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self.written = self._counter("vllm:generation_tokens", "Tokens of finished requests.")
        self.queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in kept state.")
        self.offered = self._counter("vllm:spec_decode_num_draft_tokens", "Drafts offered.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self.windows = self._counter("vllm:spec_decode_num_drafts", "Windows run.")
        self.cancelled = self._counter("strata:cancelled_tokens", "Tokens written for nobody.")
        self.finished = Counter(
            "vllm:request_success", "Requests ended, by how.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        for reason in _FINISHES:
            self.finished.labels(model, reason)
        self.first = self._histogram("vllm:time_to_first_token_seconds", "Until the first.", _FIRST)
        self.each = self._histogram(
            "vllm:request_time_per_output_token_seconds", "After the first, per token.", _EACH
        )
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", "In all.", _FIRST)
        self.queued = self._histogram("vllm:request_queue_time_seconds", "Waiting.", _FIRST)
        self.rows = Counter(
            "strata:routed_rows", "Rows of experts by where they were computed.",
            ["model_name", "place"], registry=self._registry,
        )  # fmt: skip
        for place in Place:
            self.rows.labels(model, place.name)
        self._seen: dict[str, int] = {}
        self._facts = facts
        self._gauges: dict[str, Gauge] = {}
        for name, (text, _) in GAUGES.items():
            self._gauges[name] = Gauge(name, text, ["model_name"], registry=self._registry)
        self.restarts = self._counter("strata:engine_faults", "Times the engine was restarted.")
        self._faults = 0

    def ended(self, job: Job, end: End) -> None:
        """A request is over."""
        now = time.monotonic()
        self.finished.labels(self._label, end.finish).inc()
        self.queued.observe((job.started or now) - job.created)
        if end.finish not in ("stop", "length"):
            self.cancelled.inc(job.generated)
            return
        report = end.report
        self.written.inc(job.generated)
        if not job.again:  # as the usage counts
            n_prompt = len(job.request.tokens)
            self.prompt.inc(n_prompt)
            self.queries.inc(n_prompt)
            self.hits.inc(report.get("reused_tokens", 0))
        drafts = report.get("drafts", {})
        self.offered.inc(drafts.get("offered", 0))
        self.accepted.inc(drafts.get("accepted", 0))
        self.windows.inc(drafts.get("windows", 0))
        self.whole.observe(now - job.created)
        if job.first_token is not None and job.last_token is not None:
            self.first.observe(job.first_token - job.created)
            if job.generated > 1:
                self.each.observe((job.last_token - job.first_token) / (job.generated - 1))

    def page(self, counters: Mapping[str, Any]) -> bytes:
        """The text for a scraper. counters: the engine's, as they are now."""
        for place, rows in counters.get("rows", {}).items():
            total, seen = sum(rows), self._seen.get(place, 0)
            self.rows.labels(self._label, place).inc(total - seen if total >= seen else total)
            self._seen[place] = total
        facts = self._facts()
        for name, (_, fact) in GAUGES.items():
            self._gauges[name].labels(self._label).set(facts.get(fact, 0.0))
        faults = int(facts.get("faults", 0))
        self.restarts.inc(faults - self._faults)
        self._faults = faults
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Any:
        counter = Counter(name, text, ["model_name"], registry=self._registry)
        return counter.labels(self._label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._label)


GAUGES = {
    "vllm:num_requests_running": ("Requests being decoded.", "running"),
    "vllm:num_requests_waiting": ("Requests waiting.", "waiting"),
    "vllm:kv_cache_usage_perc": ("Share of the context that is in use.", "context_share"),
    "strata:ready": ("1 when requests are answered.", "ready"),
    "strata:load_progress": ("0 to 1.", "progress"),
    "strata:parked_conversations": ("Conversations in main memory.", "parked"),
    "strata:parked_bytes": ("Main memory of parked conversations.", "parked_bytes"),
    "strata:vram_bytes": ("Graphics memory planned.", "vram"),
    "strata:ram_bytes": ("Main memory planned.", "ram"),
    "strata:expert_hit_share": ("Share of rows whose expert was cached.", "hit_share"),
    "strata:late_row_share": ("Share of rows joined one mixer late.", "late_share"),
    "strata:cpu_row_share": ("Share of rows computed by the CPU.", "cpu_share"),
    "strata:pcie_row_share": ("Share of rows read over PCIe.", "pcie_share"),
    "strata:quality_conditional_kl": (
        "Mean KL of metered windows: their own error, not the state's.",
        "quality_conditional_kl",
    ),
    "strata:quality_conditional_top1": (
        "Share of their positions with the same likeliest token.",
        "quality_conditional_top1",
    ),
    "strata:quality_conditional_positions": (
        "Positions that were metered.",
        "quality_conditional_positions",
    ),
    "strata:quality_cumulative_kl": (
        "Mean KL of answers that were read again exactly.",
        "quality_cumulative_kl",
    ),
    "strata:quality_cumulative_top1": (
        "Share of their positions with the same likeliest token.",
        "quality_cumulative_top1",
    ),
    "strata:quality_cumulative_positions": (
        "Positions that were read again.",
        "quality_cumulative_positions",
    ),
}
"""Name -> (help, fact)."""
