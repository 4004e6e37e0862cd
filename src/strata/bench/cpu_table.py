"""The numbers of ``strata bench cpu`` as tables for people. Knows the JSON's dictionary only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

WIDTH = 110
"""Characters of the widest table."""
STATISTIC = {
    True: "medians (in the JSON: quartiles, best)",
    False: "the best of all turns, because the machine was busy (in the JSON: medians, quartiles)",
}
"""What is shown, by whether the machine was quiet."""


def tables(found: dict[str, Any]) -> Iterator[RenderableType]:
    """What is printed, in order."""
    yield "\n".join(head_lines(found))
    quiet = found["machine"]["quiet"]
    yield _read_table(found)
    for n in found["options"]["threads"]:
        rows = [r for r in found["rows"] if r["threads"] == n]
        yield _rows_table(rows, n, found["options"]["rows"], "bytes", quiet)
        yield _rows_table(rows, n, found["options"]["rows"], "weights", quiet)
        experts = [r for r in found["experts"] if r["threads"] == n]
        if experts:
            yield _experts_table(experts, n, found["options"], quiet)


def head_lines(found: dict[str, Any]) -> list[str]:
    """The machine, what is compared, and whether others were at work."""
    machine, options = found["machine"], found["options"]
    lines = [
        f"{machine['processor']}: {machine['cores']} cores, {', '.join(machine['isas'])}; last "
        f"cache {_mib(machine['cache_bytes'])}, read from {_mib(machine['arena_bytes'])}",
        f"{STATISTIC[machine['quiet']]}; share: of what plain reading reached in the same turns; "
        f"{options['seconds']:g} s for each type and number of threads",
    ]
    if "ggml" in options:
        lines.append(f"against: {options['ggml']}, row by row on the same threads")
    for line in found["handover"]:
        us, python_us, asleep_us = (
            line[name]["median"] for name in ("us", "python_us", "asleep_us")
        )
        lines.append(
            f"{threads(line['threads'])}: an empty job is handed over in {us:.1f} us (from Python "
            f"{python_us:.1f}, to sleeping workers {asleep_us:.0f}); the idle pool takes "
            f"{line['idle_share']:.0%} of a processor"
        )
    lines.append(busy_line(machine))
    return lines


def busy_line(machine: dict[str, Any]) -> str:
    """Whether the numbers are those of a quiet machine."""
    share, load = machine["other_programs_share"], machine["load_average_before"]
    if machine["quiet"]:
        return f"the machine was quiet: other programs took {share:.0%} of its processors"
    return (
        f"THE MACHINE WAS BUSY: other programs took {share:.0%} of its processors (load average "
        f"{load} before); even the best of many turns may be too low"
    )


def threads(n: int) -> str:
    """1 thread, 2 threads."""
    return "1 thread" if n == 1 else f"{n} threads"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.0f} MiB"


def _read_table(found: dict[str, Any]) -> Table:
    table = Table(title="reading memory", title_justify="left")
    table.add_column("threads", justify="right")
    table.add_column("GB/s", justify="right")
    table.add_column("quartiles", justify="right")
    table.add_column("best", justify="right")
    for line in found["read"]:
        gb_s = line["gb_s"]
        table.add_row(
            str(line["threads"]),
            f"{gb_s['median']:.1f}",
            f"{gb_s['low']:.1f} - {gb_s['high']:.1f}",
            f"{gb_s['best']:.1f}",
        )
    return table


def _rows_table(
    lines: Sequence[dict[str, Any]], n: int, rows: Sequence[int], what: str, quiet: bool
) -> Table:
    """what: "bytes" (GB/s and share) or "weights" (1e9 weights/s and times ggml)."""
    titles = {
        "bytes": "GB/s of weight bytes, and share of reading",
        "weights": "1e9 weights/s times rows, and times ggml",
    }
    table = Table(title=f"{threads(n)}: {titles[what]}", title_justify="left")
    for name in ("type", "layout", "kernels"):
        table.add_column(name)
    if what == "bytes":
        table.add_column("bits", justify="right")
    for n_x in rows:
        table.add_column(f"{n_x} row" if n_x == 1 else f"{n_x} rows", justify="right")
    cells: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for line in lines:
        key = (line["type"], line["layout"], line["kernels"])
        cells.setdefault(key, {})[line["rows"]] = line
    last = ""
    for (name, layout, kernels), by_rows in cells.items():
        if last and name != last:
            table.add_section()
        last = name
        first = [f"{next(iter(by_rows.values()))['bits']:.2f}"] if what == "bytes" else []
        values = [cell(by_rows[n_x], what, quiet) for n_x in rows]
        table.add_row(name, layout, kernels, *first, *values)
    return table


def cell(line: dict[str, Any], what: str, quiet: bool) -> str:
    """One cell of a table of rows: medians, or the best of a busy machine."""
    kind, end = ("median", "") if quiet else ("best", "_best")
    if what == "bytes":
        return f"{line['gb_s'][kind]:.1f} {line['share' + end]:4.0%}"
    times = f" {line['times_ggml' + end]:.1f}x" if "times_ggml" in line else ""
    return f"{line['gweights_s'][kind]:.1f}{times}"


def _experts_table(
    lines: Sequence[dict[str, Any]], n: int, options: dict[str, Any], quiet: bool
) -> Table:
    title = f"{threads(n)}: 10 whole experts of {options['experts']}, 640 x 2560, rows each"
    table = Table(title=title, title_justify="left")
    for name in ("gate, up, down", "layout", "kernels"):
        table.add_column(name)
    for n_x in options["rows"]:
        table.add_column(f"{n_x} row" if n_x == 1 else f"{n_x} rows", justify="right")
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        gate, _, down = line["types"]
        key = (gate if gate == down else f"{gate}, {down}", line["layout"], line["kernels"])
        us = line["layer_us"]["median" if quiet else "best"]
        grouped.setdefault(key, []).append(f"{cell(line, 'bytes', quiet)} {us / 1e3:.2f} ms")
    for key, values in grouped.items():
        table.add_row(*key, *values)
    return table
