"""The comparison as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from strata.core.divergence import POSITION_BUCKETS
from strata.quality.protocol import QualityReport
from strata.quality.scores import ArmResult, Bucket

COLUMNS = (*(f"{a}+" if b is None else f"{a}-{b}" for a, b in POSITION_BUCKETS), "all")
MEANINGS = {
    "floor": "the same setting twice",
    "check": "the sums of deferral, nothing late",
    "scale": "a known step: route tail skip",
}


Cell = Callable[[Bucket], str]

BY_POSITION: Mapping[str, Cell] = {
    "full KL": lambda b: "-" if b.kl is None else f"{b.kl:.4f}",
    "top-1": lambda b: f"{100 * b.top1:.2f}%",
    "perplexity": lambda b: "-" if b.perplexity is None else f"{b.perplexity:.3f}",
    "p99": lambda b: f"{b.p99:.4f}",
}
"""Tables beside that of the mean top-20 KL; p99 is that of the top-20 KL."""


def table_lines(arms: Sequence[ArmResult]) -> list[str]:
    """Mean top-20 KL by position, then over all positions the 99th percentile, the KL over the
    whole vocabulary, top-1 agreement, perplexity, and the share of the missed rows that were late
    or skipped."""
    return _aligned(_main_rows(arms))


def position_lines(arms: Sequence[ArmResult]) -> list[str]:
    """The other measures by position, a table each."""
    lines: list[str] = []
    for name, cell in BY_POSITION.items():
        lines += ["", *_aligned([[name, *COLUMNS], *(_cells(arm, cell) for arm in arms)])]
    return lines


def markdown_lines(arms: Sequence[ArmResult]) -> list[str]:
    """The main table for documents."""
    head, *rows = _main_rows(arms)
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(row) + " |" for row in [head, rule, *rows]]


def report_lines(report: QualityReport) -> list[str]:
    """The whole report."""
    texts = ", ".join(f"{name} {n}" for name, n in report.texts)
    lines = [
        f"{report.model} ({report.family}), {report.resident} in the fast tier, on "
        f"{report.machine}",
        f"windows of {report.window}, {report.n_positions} positions: {texts}",
        "settings: " + (", ".join(f"{k}={v}" for k, v in report.settings.items()) or "defaults"),
        "",
        *table_lines(report.arms),
        "",
        "KL(reference || arm) in nats, over the reference's top 20 and the rest, by position",
        *position_lines(report.arms),
        "",
    ]
    lines += [f"{name}: {text}" for name, text in MEANINGS.items() if name not in report.missing]
    lines += [f"{name}: not measured: {why}" for name, why in report.missing.items()]
    for arm in report.arms:
        lines += [f"{arm.name}: {name} is off here: {why}" for name, why in arm.off.items()]
        if arm.note:
            lines.append(f"{arm.name}: {arm.note}")
        if arm.settings and not arm.off and arm.name != "check" and not _did_anything(arm):
            lines.append(f"{arm.name}: no row was late or skipped, so nothing could change")
    return lines


def to_json(report: QualityReport) -> dict[str, Any]:
    """Everything, for programs."""
    return asdict(report)


def _did_anything(arm: ArmResult) -> bool:
    lossy = any(arm.rows.get(place) for place in ("CPU_LATE", "SKIPPED"))
    return lossy or not set(arm.settings) & {"defer_cpu", "route_tail_skip"}


def _main_rows(arms: Sequence[ArmResult]) -> list[list[str]]:
    head = ["arm", *(f"KL {name}" for name in COLUMNS), *_WHOLE, "moved"]
    return [head, *(_row(arm) for arm in arms)]


_WHOLE = ("p99", "full KL", "top-1", "perplexity")


def _row(arm: ArmResult) -> list[str]:
    moved = arm.moved_share()
    return [
        *_cells(arm, lambda b: f"{b.kl_top:.4f}"),
        *(BY_POSITION[name](arm.all) for name in _WHOLE),
        "-" if moved is None or not arm.settings else f"{100 * moved:.0f}%",
    ]


def _cells(arm: ArmResult, cell: Cell) -> list[str]:
    by_name = {bucket.positions: bucket for bucket in arm.buckets}
    return [arm.name, *(cell(by_name[c]) if c in by_name else "-" for c in COLUMNS)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
