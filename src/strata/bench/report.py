"""Results of the speed protocol: as records (JSON), as a table, as a plot. Knows no engine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from strata.bench.protocol import Measured, Run, compare
from strata.core.errors import InputError, SettingError

Record = dict[str, Any]
BUDGET = ("model", "device", "expert_cache", "ram_gb", "vram_gb", "workers", "locality", "window")
"""What must be equal for a fair comparison."""


def record_of(measured: Measured, arm: str, facts: Mapping[str, Any]) -> Record:
    """One arm: its numbers, its runs, and the facts they hold for."""
    runs, usage = measured.of(arm), measured.usage[arm]
    rounds = measured.per_round(arm)
    offered = sum(r.offered for r in runs)
    n = max(1, usage.windows)
    cold = measured.cold.get(arm)
    return {
        "arm": arm,
        "tokens_s": measured.speed(arm),
        "per_round": rounds,
        "spread": [min(r.tokens_s for r in runs), max(r.tokens_s for r in runs)],
        "cold_tokens_s": cold.tokens_s if cold else None,
        "ms_window": measured.ms_window(arm),
        "tokens_window": measured.tokens_window(arm),
        "accepted": sum(r.accepted for r in runs) / offered if offered else None,
        "prompt_tokens_s": statistics.median(measured.prompt_tokens_s),
        "hit_rate": usage.hit_rate,
        "distinct_experts": {p.name: v / n for p, v in usage.distinct.items()},
        "rows": {p.name: v / n for p, v in usage.rows.items()},
        "runs": [[r.round, r.prompt, r.context, r.tokens, r.seconds, r.windows] for r in runs],
        **facts,
    }


def load_records(path: Path) -> list[Record]:
    """Records of earlier calls; [] when the file is new. InputError when it holds something
    else."""
    if not path.exists():
        return []
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not a file of strata bench: {error}") from None
    if not isinstance(records, list) or not all(
        isinstance(r, dict) and "arm" in r and "runs" in r for r in records
    ):
        raise InputError(f"{path} is not a file of strata bench: no list of arms")
    return records


def save_records(path: Path, records: Sequence[Record]) -> None:
    """Write all records."""
    path.write_text(json.dumps(list(records), indent=1) + "\n", encoding="utf-8")


def by_cell(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Records of the same conditions together, in order of their first: (title, records)."""
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record.get("cell", ""), []).append(record)
    return list(cells.items())


def require_comparable(records: Sequence[Record]) -> None:
    """SettingError when arms were measured with different budgets."""
    for key in BUDGET:
        values = {json.dumps(r.get(key)): r["arm"] for r in records}
        if len(values) > 1:
            pairs = ", ".join(f"{arm}: {value}" for value, arm in values.items())
            raise SettingError(
                f"these arms differ in {key.replace('_', '-')} ({pairs}), so their speeds cannot "
                f"be compared; measure them alike, or add --force"
            )


def table(records: Sequence[Record]) -> list[str]:
    """One line an arm, the first one being what the others are compared with."""
    head = (
        f"{'arm':<14} {'tok/s':>8} {'spread':>15} {'cold':>8} {'ms/win':>8} {'tok/win':>7} "
        f"{'hits':>6} {'limit':>6}  against {records[0]['arm'] if records else ''}"
    )
    lines = [head]
    for record in records:
        low, high = record["spread"]
        hits, share = record.get("hit_rate"), record.get("limit_share")
        gain = ""
        if record is not records[0]:
            pairs = compare(runs_of(records[0]), runs_of(record))
            gain = pairs.line() if pairs else "other prompts"
        cold = record.get("cold_tokens_s")
        lines.append(
            f"{record['arm']:<14} {record['tokens_s']:>8.2f} {f'{low:.2f}..{high:.2f}':>15} "
            f"{_or_dash(cold, '8.2f')} {record['ms_window']:>8.2f} {record['tokens_window']:>7.2f} "
            f"{_or_dash(hits, '6.1%')} {_or_dash(share, '6.1%')}  {gain}"
        )
    return lines


def _or_dash(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:>{form}}"


def runs_of(record: Record) -> list[Run]:
    """The runs of a record."""
    return [
        Run(record["arm"], round_, prompt, context, tokens, seconds, windows)
        for round_, prompt, context, tokens, seconds, windows in record["runs"]
    ]


def plot(records: Sequence[Record], path: Path) -> None:
    """Speed of every prompt by arm, medians marked. InputError without matplotlib."""
    try:
        import_module("matplotlib").use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise InputError("--plot needs matplotlib; pip install matplotlib") from None
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.5 * len(records), 4))
    axes.boxplot([[run.tokens_s for run in runs_of(r)] for r in records])
    axes.set_xticks(range(1, len(records) + 1), [r["arm"] for r in records])
    axes.set_ylabel("decode, tokens/s")
    axes.set_title(str(records[0].get("model", "")) if records else "")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
