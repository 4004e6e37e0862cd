"""C44: every option of every family is obeyed, refused before a weight is read, or "off here".

One row says for one setting how its effect is seen: a look at the loaded model, at its answer or at
a file, which must differ from the look without it (or meet ``want``). A row may also say where the
setting is off, with which reason, and what is refused. Expectations are the settings' help
(docs/SETTINGS.md). A setting without a row, or without an effect anywhere, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.core.errors import InputError
from strata.core.settings import SETTINGS
from strata.core.settings_resolve import Machine
from strata.core.types import Place
from strata.engine.model import Model
from strata.native import available_isas
from strata.window.event_ring import EventRing

FIXTURES = Path(__file__).parent.parent / "fixtures"
KINDS = {
    "dense": "llama", "moe": "qwen3_moe", "gdn": "qwen3_next", "flash": "qwen4_exp",
    "mla": "deepseek_v3",
}  # fmt: skip
EVERY = tuple(KINDS)
ROUTED = EVERY[1:]
PROMPT = [5, 9, 5, 9, 5, 9, 5, 9, 5]
GPU_LESS = Machine(None, "looked for CUDA, found none", 2, available_isas())
LATE = {"defer_cpu": "1"}

NO_EXPERTS = "has no routed experts to place"
NO_LATE = "no layer whose rows may be late"

Look = Callable[[Model, Path], object]


def answer(model: Model, prompt: list[int] | None = None, **more: Any) -> list[int]:
    """Ids of a short answer; the report's lines stay in ``model.last``."""
    written = model.generate(prompt or PROMPT, **({"max_tokens": 6} | more))
    ids = [event.token for event in written]
    model.last = written.report  # type: ignore[attr-defined]
    model.last_lines = written.report.lines()  # type: ignore[attr-defined]
    return ids


def ids(model: Model, folder: Path) -> object:
    return answer(model)


def logits(model: Model, folder: Path) -> object:
    return model.logits(PROMPT, through="windows", window=2).tobytes()


def plan_line(words: str) -> Look:
    """Bytes of the owners in the memory plan whose name holds these words."""
    return lambda model, _: [x.n_bytes for x in model.engine.plan.entries if words in x.owner]


def report(words: str) -> Look:
    """Lines of the start-up report that begin so, but not the setting's own line."""
    return lambda model, folder: [x for x in model.report if x.startswith(words)]


def after(words: str) -> Look:
    """Whether the answer's report has a line that begins so."""

    def look(model: Model, folder: Path) -> bool:
        answer(model)
        return any(x.startswith(words) for x in model.last_lines)

    return look


def resident(model: Model, folder: Path) -> object:
    return list(model.engine.service.tier.resident())


def resident_after(model: Model, folder: Path) -> object:
    answer(model, max_tokens=24)
    return resident(model, folder)


def exchanges(model: Model, folder: Path) -> object:
    answer(model, max_tokens=24)
    return model.engine.adapter.counts.line()


def late_rows(model: Model, folder: Path) -> object:
    """Rows that were late, by layer."""
    model.logits(PROMPT, through="windows", window=1)
    rows = model.engine.service.counters.rows_LP
    return {layer: n for (layer, place), n in rows.items() if place == Place.CPU_LATE and n}


def ranking(model: Model, folder: Path) -> object:
    found = model.engine.adapter._ranking
    return type(found), getattr(found, "_decay", None)


def poisoned(model: Model, folder: Path) -> bool:
    """Whether a window leaves NaN in what nobody reads any more."""
    model.logits(PROMPT, through="windows", window=1)
    tensors = model.engine.runner.window(1).frame.tensors().values()
    return any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors)


def traced(model: Model, folder: Path) -> bool:
    return any(isinstance(t, EventRing) for t in model.engine.runner.variant.transforms)


def metered(model: Model, folder: Path) -> int:
    answer(model)
    return 0 if model.meter is None else model.meter.conditional.n


def reread(model: Model, folder: Path) -> int:
    answer(model)
    model.read_again()
    return 0 if model.meter is None else model.meter.cumulative.n


def written(name: str) -> Look:
    """Lines of a file once the model has answered and is closed; None when there is none."""

    def look(model: Model, folder: Path) -> object:
        answer(model)
        model.close()
        path = folder / name
        return path.read_text().splitlines() if path.is_file() else None

    return look


def files_in(name: str) -> Look:
    """Files in a folder after the model is closed."""

    def look(model: Model, folder: Path) -> object:
        answer(model)
        model.close()
        return sorted(x.name for x in (folder / name).glob("*"))

    return look


def columns(n: int) -> Look:
    """A column of the first line of --logpos, or how many there are."""

    def look(model: Model, folder: Path) -> object:
        answer(model)
        row = (folder / "out.tsv").read_text().splitlines()[0].split("\t")
        return row[n] if n >= 0 else len(row)

    return look


def reused_after_a_turn(model: Model, folder: Path) -> int:
    """Tokens reused by a prompt that parts from the one before at its sixth token."""
    answer(model, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    answer(model, [1, 2, 3, 4, 5, 60, 70])
    return model.last.reuse.reused_tokens


def reused_after_another(model: Model, folder: Path) -> int:
    """Tokens reused by going on with a conversation after a second one."""
    first = list(range(1, 10))
    answer(model, first)
    answer(model, [50, 51, 52, 53])
    answer(model, [*first, 4])
    return model.last.reuse.reused_tokens


@dataclass(frozen=True)
class Row:
    """One setting with a value; ``beside``: what it needs. ``folder`` in texts is the test's own.

    look: what shows its effect. want: what the look must be; else other than without it. off: kind
    -> words of the reason; refused: kind -> words of the error. kinds: where the row is tried.
    """

    setting: str
    value: Any
    look: Look | None = None
    want: Callable[[Any], bool] | None = None
    beside: dict[str, Any] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = EVERY


def everywhere(words: str) -> dict[str, str]:
    return dict.fromkeys(EVERY, words)


PLACED = {"dense": NO_EXPERTS}
"""Refused where there are no routed experts."""
SWAPS = {"adapt_swaps": 2, "adapt_every": 1, "expert_cache": 4}
BUDGET = {"quality_budget": 0.02}

ENGINE_ROWS = (
    Row("device", "cuda", refused=everywhere("no usable GPU: looked for CUDA, found none")),
    Row("dtype", "float64", logits),
    Row("numerics", "fast", off=everywhere("the CPU has one arithmetic")),
    Row("context", 100, lambda m, _: m.engine.context_tokens, lambda n: n == 100),
    Row("context", 100_000, refused=everywhere("made for at most 4096 tokens")),
    Row("kv", "f16", plan_line("state at")),
    Row("kv", "f16", logits),
    *(Row("kv", value, plan_line("state at"), refused={"mla": f"--kv {value}: latent attention"})
      for value in ("int8", "q4")),
    Row("kv", "f64", refused=everywhere("--kv f64 and --dtype float32 exclude each other")),
    Row("prompt_chunk", 3, plan_line("prompt buffers (chunks of 3 tokens)"), len),
    Row("short_read", 40, off=everywhere("the CPU computes chunks and windows alike")),
    Row("prompt_cpu", 0.5, off=everywhere("the CPU computes all of every prompt")),
    Row("spec", 4, plan_line("window buffers (up to 4 tokens)"), len),
    Row("spec", 4, lambda m, f: (answer(m), m.last.drafts.offered)[1], lambda n: n > 0,
        {"logit_bias": {9: 50.0}}),
    Row("draft", "none", refused=everywhere("--draft none and --spec 4"), beside={"spec": 4}),
    Row("draft", "lookup", refused=everywhere("--draft lookup and --spec 1"), beside={"spec": 1}),
    Row("expert_cache", 5, resident, lambda x: len(x) == 5, refused=PLACED),
    Row("expert_cache", 999, refused=everywhere("this model has only") | PLACED),
    Row("expert_profile", "folder/p.txt", resident, lambda x: x == [(1, 3), (2, 5)],
        {"expert_cache": 2}, refused=PLACED),
    Row("expert_profile", "folder/p.txt", off=everywhere("expert-cache is 0"), kinds=ROUTED),
    Row("expert_layout", "native", report("experts: "), lambda x: "asked for" in x[1],
        refused=PLACED),
    Row("expert_layout", "tiles", refused=everywhere("no expert matrix here has tiles") | PLACED),
    Row("pack", "folder/packed", files_in("packed"), len, refused=PLACED),
    Row("experts_on_disk", True, plan_line("page cache"), len, refused=PLACED),
    Row("pcie_frac", 0.5, off=everywhere("there is no GPU")),
    Row("wait", "memop", off=everywhere("there is no GPU")),
    Row("adapt_swaps", 2, resident_after, beside={"expert_cache": 4},
        refused=PLACED),
    Row("adapt_swaps", 2, off=everywhere("the expert cache has no slot"), kinds=ROUTED),
    Row("adapt_every", 9, exchanges, beside={"adapt_swaps": 2, "expert_cache": 4}, refused=PLACED),
    Row("adapt_every", 9, refused=everywhere("--adapt-every needs --adapt-swaps")),
    Row("adapt_policy", "lru", ranking, beside=SWAPS, refused=PLACED),
    Row("adapt_decay", 0.5, ranking, lambda x: x[1] == 0.5, SWAPS, refused=PLACED),
    Row("expert_profile_save", "folder/s.txt", written("s.txt"), len, refused=PLACED),
    Row("expert_profile_save", "folder/none/s.txt",
        refused=everywhere("--expert-profile-save") | PLACED),
    Row("defer_cpu", "1", logits, off={"dense": NO_LATE}),
    Row("defer_cpu", "repair", late_rows, len, off={"dense": NO_LATE}),
    Row("defer_cpu", "check", late_rows, len, off={"dense": NO_LATE}),
    Row("defer_layers", "1", late_rows, lambda x: set(x) == {1}, LATE,
        refused={"dense": "cannot be late"}),
    Row("defer_layers", "1", refused=everywhere("--defer-layers needs --defer-cpu")),
    Row("defer_cpu_below", 0.3, late_rows, beside=LATE, off={"dense": NO_LATE}),
    Row("defer_cpu_below", 0.3, refused=everywhere("needs --defer-cpu 1, check or repair")),
    Row("defer_below_profile", "folder/times.json", written("times.json"), len,
        {**LATE, "defer_cpu_below": "auto"}, off={"dense": NO_LATE}),
    Row("defer_below_profile", "folder/times.json",
        refused=everywhere("needs --defer-cpu-below auto"), beside=LATE),
    Row("route_tail_skip", 1, lambda m, f: (logits(m, f), m.counter_lines())[1], len,
        refused=PLACED),
    Row("route_tail_skip", 50, off=everywhere("so none is at that rank"), kinds=ROUTED),
    Row("quality_budget", 0.02, refused=everywhere("has no profile of this model"),
        beside={"profile_dir": "folder/tuned"}),
    Row("quality_budget", 0, off=everywhere("0 is exact, so nothing lossy is chosen")),
    Row("profile_dir", "folder/tuned", refused=everywhere("/tuned has no profile"), beside=BUDGET),
    Row("profile_dir", "folder/tuned", off=everywhere("--quality-budget is not set")),
    Row("quality_meter", "1/2", metered, bool, LATE, off={"dense": "every window is exact"}),
    Row("quality_meter", "1/2", off=everywhere("every window is exact")),
    Row("quality_reread", True, reread, bool, LATE, off={"dense": "every window is exact"}),
    Row("quality_reread", True, off=everywhere("every window is exact")),
    Row("workers", 2, report("CPU pool: 2 workers"), len),
    Row("workers", 2, off=everywhere("float64 runs the plain"), beside={"dtype": "float64"}),
    Row("cpu_isa", "portable", report("CPU pool: "), lambda x: "portable kernels" in x[0]),
    Row("cpu_isa", "portable", off=everywhere("float64 runs"), beside={"dtype": "float64"}),
    Row("ram_gb", 0.1, refused=everywhere("0.100 GiB available (limited by --ram-gb 0.1)")),
    Row("ram_gb", 4.5, lambda m, _: m.engine.plan.limits["ram"], lambda x: x.n_bytes == 9 << 29),
    Row("vram_gb", 8, refused=everywhere("--vram-gb 8 and --device cpu exclude each other")),
    Row("poison", True, poisoned, bool),
    Row("verify_profile", True, lambda m, f: (answer(m), "\n".join(m.last_lines))[1],
        lambda text: "ms" in text and "layers: " in text),
    Row("decode_timing", True, after("decode timing: "), bool),
    Row("verify_trace", True, traced, bool),
    Row("logpos", "folder/out.tsv", written("out.tsv"), len),
    Row("logpos", "folder/none/out.tsv", refused=everywhere("--logpos")),
    Row("logpos_top", 3, columns(-1), lambda n: n == 8 + 3, {"logpos": "folder/out.tsv"}),
    Row("logpos_top", 3, off=everywhere("--logpos is not set")),
    Row("logpos_extra", 11, columns(6), beside={"logpos": "folder/out.tsv"}),
    Row("logpos_extra", 999_999, refused=everywhere("outside the vocabulary"),
        beside={"logpos": "folder/out.tsv"}),
    Row("logpos_extra", 11, off=everywhere("--logpos is not set")),
    Row("checkpoints", 0, reused_after_a_turn, beside={"prompt_chunk": 2}),
    Row("park_gb", 0, reused_after_another, beside={"prompt_chunk": 2}),
    Row("park_gb", 1.5, plan_line("parked conversations"), lambda x: x == [3 << 29]),
    Row("park_dir", "folder/kept", files_in("kept"), len, {"prompt_chunk": 2}),
    *(Row(name, value, off=everywhere("--checkpoints is 0"), beside={"checkpoints": 0})
      for name, value in {"park_gb": 1.5, "park_dir": "folder/kept"}.items()),
    Row("park_dir", "folder/p.txt", refused=everywhere("conversations cannot be kept there")),
)  # fmt: skip

HOT = {"temperature": 5.0, "seed": 3}
REQUEST_ROWS = (
    Row("temperature", 5.0, ids, beside={"seed": 3}),
    Row("top_k", 1, ids, beside=HOT),
    Row("top_p", 1e-6, ids, beside=HOT),
    Row("min_p", 1.0, ids, beside=HOT),
    Row("repeat_penalty", 100, ids, beside={"logit_bias": {9: 12.0}}),
    Row("frequency_penalty", 100, ids, lambda x: len(set(x)) == len(x), {"logit_bias": {9: 50.0}}),
    Row("presence_penalty", 100, ids, lambda x: len(set(x)) == len(x), {"logit_bias": {9: 50.0}}),
    Row("logit_bias", {5: 1e6}, ids, lambda x: set(x) == {5}),
    Row("logit_bias", {999_999: 1.0}, refused=everywhere("token 999999 is outside the vocabulary")),
    Row("seed", 4, ids, beside={"temperature": 5.0}),
    Row("max_tokens", 9, lambda m, f: [e.token for e in m.generate(PROMPT)], lambda x: len(x) == 9),
    Row("stop", ["x"], lambda m, f: (answer(m), m.last.finish, m.last.stop_text)[1:],
        lambda x: x == ("stop", "x"), {"logit_bias": {87: 100.0}}),
    Row("overlap", "exact", lambda m, f: (answer(m), m.last.mode)[1],
        lambda mode: mode == "exact", LATE, kinds=ROUTED),
    Row("overlap", "exact", off=everywhere("nothing is deferred or skipped")),
    Row("overlap", "fast", refused=everywhere("--overlap fast needs --defer-cpu 1 or repair")),
    Row("overlap", "fast", off={"dense": NO_LATE}, beside=LATE, kinds=("dense",)),
    *(Row(name, value, off=everywhere("temperature is 0"))
      for name, value in {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3}.items()),
)  # fmt: skip

ROWS = (*ENGINE_ROWS, *REQUEST_ROWS)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, whatever this machine has."""
    monkeypatch.setattr("strata.engine.build.probe", lambda: GPU_LESS)
    monkeypatch.setattr("strata.engine.model.probe", lambda: GPU_LESS)


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read of the weights."""
    read: list[str] = []

    def tell(name: str) -> None:
        module = __import__("strata.engine.build", fromlist=["build"])
        real = getattr(module, name)

        def told(*args: Any, **more: Any) -> Any:
            read.append(name)
            return real(*args, **more)

        monkeypatch.setattr(module, name, told)

    for name in ("load_weights", "load_planned"):
        tell(name)
    return read


def placed(value: Any, folder: Path) -> Any:
    """A value whose path, if it is one, lies in the test's folder."""
    if isinstance(value, str) and value.startswith("folder/"):
        return str(folder / value.removeprefix("folder/"))
    return value


def load(kind: str, folder: Path, **settings: Any) -> Model:
    base = {"device": "cpu", "workers": 1, "context": 128}
    given = {name: placed(value, folder) for name, value in (base | settings).items()}
    return strata.load(FIXTURES / KINDS[kind] / "bf16.gguf", **given)


CASES = [
    pytest.param(row, kind, id=f"{row.setting}-{row.value}-{i}-{kind}".replace("/", "."))
    for i, row in enumerate(ROWS)
    for kind in row.kinds
]


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_obeyed_refused_or_off_here(
    row: Row, kind: str, tmp_path: Path, weights: list[str]
) -> None:
    (tmp_path / "p.txt").write_text("1 3\n2 5\n0 1\n" if kind != "mla" else "1 3\n2 5\n1 1\n")
    given = {**row.beside, row.setting: row.value}
    if kind in row.refused:
        with pytest.raises(InputError) as caught:
            load(kind, tmp_path, **given).close()
        assert row.refused[kind] in str(caught.value) and "\n" not in str(caught.value)
        assert not weights, "refused, but only after weights were read"
        return
    with load(kind, tmp_path, **given) as model:
        lines = [x for x in model.report if x.startswith(f"{SETTINGS[row.setting].flag[2:]} = ")]
        assert len(lines) == 1, "the effective settings do not show it"
        if kind in row.off:
            assert "off here: " in lines[0] and row.off[kind] in lines[0]
            return
        assert ": on" in lines[0] and row.look is not None
        found = row.look(model, tmp_path)
    if row.want is not None:
        assert row.want(found), found
        return
    other = tmp_path / "other"
    other.mkdir()
    (other / "p.txt").write_text("")
    with load(kind, other, **row.beside) as model:
        assert row.look(model, other) != found, "it has no effect"


@pytest.mark.parametrize("name", [n for n in SETTINGS if SETTINGS[n].scope != "serve"])
def test_every_setting_has_a_row(name: str) -> None:
    """A new setting needs one; and a row that shows its effect, or it could be off everywhere."""
    rows = [row for row in ROWS if row.setting == name]
    assert rows, "add a row: how is its effect seen, where is it off, what is refused?"
    about_gpus = {"device", "numerics", "short_read", "prompt_cpu", "pcie_frac", "vram_gb", "wait"}
    by_contradiction = {"draft", "quality_budget", "profile_dir"}
    if name not in about_gpus | by_contradiction:
        assert any(row.look is not None for row in rows)
