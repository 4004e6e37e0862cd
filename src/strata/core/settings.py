"""Every setting of the engine and of a request: default, unit, range, help, and whether it changes
the output.

Knows no files, no environment and no machine: ``settings_load`` gathers values,
``settings_resolve`` works out the automatic ones. A Settings object always holds values that are
each in range and agree with each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from strata.core.errors import SettingError
from strata.core.setting_kinds import (
    SettingInfo,
    biases,
    choice,
    info_of,
    integer,
    layers,
    number,
    one_in,
    path,
    switch,
    texts,
)
from strata.core.settings_serve import ServeSettings

MOST_GIB = 1 << 20
"""No memory is larger than a PiB; figures beyond it are slips of the pen."""

DEFAULT_CONTEXT_TOKENS = 4096
"""Context when none is asked for, if the model has that much."""


@dataclass(frozen=True)
class Settings(ServeSettings):
    """All settings. Field order is the order of help texts and of docs/SETTINGS.md."""

    # fmt: off
    device: str = choice(
        "auto", ("auto", "cpu", "cuda"),
        "Where the dense part runs; auto is the GPU, an error when there is none: the CPU alone "
        "is used only when asked for.")
    dtype: str = choice(
        "float32", ("float32", "float64"),
        "Arithmetic of activations; float64 runs the slow reference operations on the CPU.",
        changes_output=True)
    numerics: str = choice(
        "exact", ("exact", "fast"),
        "exact gives the same bits for any window, cache, swap or worker count; fast adds in any "
        "order.",
        changes_output=True)
    context: int = integer(
        0, 1, None,
        "Most tokens of prompt and answer together; auto is the smaller of the model's own limit "
        f"and {DEFAULT_CONTEXT_TOKENS}.",
        unit="tokens", auto=0)
    kv: str = choice(
        "auto", ("auto", "f32", "f16", "int8", "q4", "f64"),
        "Storage of attention keys and values; auto is f32 on the CPU, f16 on a GPU, and f64 with "
        "--dtype float64. int8 and q4 are codes of 8 and 4 bits with f16 scales.",
        changes_output=True)
    prompt_chunk: int = integer(
        0, 1, 32768, "Prompts are read in chunks cut at multiples of this; auto is 256 on the CPU, "
        "and 2048 on a GPU, which copies experts to its memory once a chunk.",
        unit="tokens", auto=0)
    short_read: int = integer(
        -1, 0, None, "On a GPU, chunks with fewer tokens are read through windows, whose missed "
        "experts the CPU computes; auto goes by how many experts a window takes. Results are "
        "equal.", unit="tokens", auto=-1)
    prompt_cpu: float = number(
        -1.0, 0, 1,
        "Share of the missed experts of a prompt's layer, those with the fewest rows, that the CPU "
        "computes while the link brings the others to the GPU; auto balances the two by measured "
        "speeds, and takes none where that is not quicker. In exact numerics results are equal.",
        auto=-1.0)
    spec: int = integer(
        1, 1, 8,
        "Window size: the last token and up to N - 1 drafts are verified together; 1 is plain "
        "decoding.",
        unit="tokens")
    draft: str = choice(
        "auto", ("auto", "lookup", "none"),
        "Who proposes drafts. lookup repeats what followed the same words earlier; auto is lookup "
        "for windows of 2 and more.")
    expert_cache: int = integer(
        -1, 0, None, "Experts kept in the fast tier; auto is 0 without a GPU.",
        unit="experts", auto=-1)
    expert_profile: Path | None = path(
        "Which experts to keep first: a file of lines 'layer expert', best first.")
    expert_layout: str = choice(
        "auto", ("auto", "tiles", "native"),
        "How experts lie in memory: native is the file's own blocks, tiles are re-coded exactly "
        "for faster reading and often larger; auto takes tiles where they are faster here and the "
        "memory plan holds them. Results are equal.")
    pack: Path | None = path(
        "Folder that keeps the experts as they lie in memory: written when empty or new, read "
        "instead of the checkpoint's experts when it belongs to it, refused otherwise.",
        kind="DIR")
    experts_on_disk: bool = switch(
        False, "Leave the experts in the checkpoint's files and let the page cache hold what it "
        "can: for models whose experts do not fit in RAM. Results are equal.")
    pcie_frac: float = number(
        -1.0, 0, 1,
        "Share of a layer's missed experts that the GPU reads from RAM over PCIe, while the CPU "
        "computes the others; auto finds the quickest while running. Results are equal.",
        auto=-1.0)
    wait: str = choice(
        "spin", ("spin", "memop"),
        "How the GPU waits for the CPU's rows: spin polls from a program of one warp; memop is a "
        "memory operation of the stream, which takes no room on the GPU and is slower by some "
        "microseconds a layer. Results are equal.")
    adapt_swaps: int = integer(
        0, 0, 4096,
        "Most cached experts exchanged at a time by use, between windows; 0 keeps the cache as it "
        "was filled. Results are equal.",
        unit="experts")
    adapt_every: int = integer(
        4, 1, 1 << 20, "With --adapt-swaps: windows from one exchange to the next.",
        unit="windows")
    adapt_policy: str = choice(
        "decayed", ("lru", "lfu", "decayed", "s3fifo"),
        "With --adapt-swaps: which experts are worth a slot; decayed counts uses, recent ones for "
        "more.")
    adapt_decay: float = number(
        0.7, 0, 1, "With --adapt-policy decayed: what an earlier use is worth after an exchange.",
        above=True)
    expert_profile_save: Path | None = path(
        "Write which experts were used most to this file at the end, for --expert-profile.")
    defer_cpu: str = choice(
        "0", ("0", "1", "check", "repair"),
        "1: a layer's CPU rows join one mixer later, at the next layer's FFN half; repair: as 1, "
        "and the state that the mixer left is written again from the full rows; check: the steps "
        "of 1 inside the layer; 0: off.",
        changes_output=True, aliases=("STRATA_VERIFY_DEFER_CPU",))
    defer_layers: tuple[int, ...] = layers(
        "Layers whose CPU rows may be late; auto is every layer that can.", changes_output=True)
    defer_cpu_below: float = number(
        0.0, 0, 1,
        "With --defer-cpu, only rows with less than this share of their token's routing weight are "
        "late; 0 is all of them; auto defers what one mixer can hide and no more, by times "
        "measured at start, for each window size.",
        changes_output=True, auto=-1.0, aliases=("STRATA_VERIFY_DEFER_CPU_BELOW",))
    defer_below_profile: Path | None = path(
        "The times that --defer-cpu-below auto goes by: read from this file when it exists, else "
        "measured and written there.")
    route_tail_skip: int = integer(
        0, 0, None,
        "A missed expert that every token of a window holds at rank N or behind (0 is the first "
        "choice) is neither read nor computed; 0 is off.",
        unit="rank", changes_output=True)
    quality_budget: float = number(
        -1.0, 0, None,
        "Most mean top-20 KL that lossy settings may cost: takes the fastest setting that strata "
        "tune measured within it on this machine; 0 is exact.",
        unit="nats", changes_output=True, auto=-1.0, auto_word="none")
    profile_dir: Path | None = path(
        "Folder of strata tune's profiles; none is a folder of the user's data.", kind="DIR")
    quality_meter: Fraction = one_in(
        "Run this share of the lossy windows exactly as well and show the running KL and top-1 "
        "agreement of what single windows change (conditional: not what the state adds up to).")
    quality_reread: bool = switch(
        False, "Read each finished answer once more exactly when there is nothing else to do, and "
        "show how far its windows were from that (cumulative KL).")
    workers: int = integer(
        0, 1, 1024,
        "CPU threads that compute experts; auto is one for each physical core we may use.",
        unit="threads", auto=0)
    cpu_isa: str = choice(
        "auto", ("auto", "portable", "avx2", "avxvnni", "avx512"),
        "Instruction set of the CPU kernels; auto is the best this CPU has. Results are equal.",
        aliases=("STRATA_FORCE_ISA",))
    ram_gb: float = number(
        0.0, 0, MOST_GIB,
        "Most main memory to plan with; auto is what is free within the container's limit.",
        unit="GiB", auto=0.0)
    vram_gb: float = number(
        0.0, 0, MOST_GIB, "Most graphics memory to plan with; auto is what is free.",
        unit="GiB", auto=0.0)
    poison: bool = switch(
        False, "Debugging: fill every buffer with NaN after its last declared reader.")
    verify_profile: bool = switch(
        False, "Measure every step of the windows; each answer's report gets a line of ms per "
        "window by step. Windows become slower by the measuring.")
    decode_timing: bool = switch(
        False, "Each answer's report gets a line on where the time of its windows went.")
    verify_trace: bool = switch(
        False, "Keep the last events of the windows and log them when one fails.")
    logpos: Path | None = path(
        "Append one line of log-probabilities for every token read through a window.")
    logpos_top: int = integer(
        0, 0, 256, "Most likely tokens listed in each line of --logpos.",
        unit="tokens", aliases=("STRATA_LOGPOS_TOPK",))
    logpos_extra: int = integer(
        -1, 0, None,
        "Token whose log-probability --logpos also gives; auto is the model's first end token.",
        unit="token id", auto=-1)

    overlap: str = choice(
        "auto", ("auto", "exact", "balanced", "fast"),
        "How windows use late CPU rows: exact not at all; balanced with repair and light rows "
        "late; fast with all rows late; auto as --defer-cpu says.",
        changes_output=True, scope="request")
    temperature: float = number(
        0.0, 0, 100, "Sharpness of sampling; 0 takes the most likely token.",
        changes_output=True, scope="request")
    top_k: int = integer(
        0, 0, None, "Sample among the N most likely tokens; 0 is all.",
        unit="tokens", changes_output=True, scope="request")
    top_p: float = number(
        1.0, 0, 1, "Sample among the fewest tokens whose probabilities add up to X.",
        above=True, changes_output=True, scope="request")
    min_p: float = number(
        0.0, 0, 1, "Leave out tokens less likely than X times the most likely one.",
        changes_output=True, scope="request")
    repeat_penalty: float = number(
        1.0, 0.01, 100,
        "Divide positive and multiply negative logits of tokens in prompt or answer by X.",
        changes_output=True, scope="request")
    frequency_penalty: float = number(
        0.0, -100, 100, "Subtract X from a token's logit for every time it stands in the answer.",
        unit="logit", changes_output=True, scope="request")
    presence_penalty: float = number(
        0.0, -100, 100, "Subtract X once from the logit of every token in the answer.",
        unit="logit", changes_output=True, scope="request")
    logit_bias: tuple[tuple[int, float], ...] = biases(
        "Add X to the logit of token ID; may be given more than once.",
        unit="logit", changes_output=True, scope="request")
    seed: int = integer(
        -1, 0, 2**64 - 1,
        "Seed of sampling: the same seed gives the same text; random draws one for each answer and "
        "reports it.",
        auto=-1, auto_word="random", changes_output=True, scope="request")
    max_tokens: int = integer(
        1024, 1, None, "Most tokens of an answer.",
        unit="tokens", changes_output=True, scope="request")
    stop: tuple[str, ...] = texts(
        "End the answer before this text; may be given more than once.",
        changes_output=True, scope="request")
    # fmt: on

    def __post_init__(self) -> None:
        """Store every value in its own form; SettingError for a bad value or a contradiction."""
        for name, info in SETTINGS.items():
            object.__setattr__(self, name, info.parse(getattr(self, name)))
        self._require_agreement()

    def _require_agreement(self) -> None:
        for check in _CONTRADICTIONS:
            problem = check(self)
            if problem:
                raise SettingError(problem)

    def for_request(self, **overrides: Any) -> Settings:
        """A copy with other request settings; SettingError for engine settings and unknown
        names.
        """
        require_known(overrides, SETTINGS)
        for name in overrides:
            if SETTINGS[name].scope != "request":
                raise SettingError(
                    f"{name} is fixed when a model is loaded; give it to strata.load"
                )
        # the others are in order already; parsing them again would take most of a millisecond
        copy = object.__new__(Settings)
        parsed = {name: SETTINGS[name].parse(value) for name, value in overrides.items()}
        copy.__dict__.update(self.__dict__ | parsed)
        copy._require_agreement()
        return copy


SETTINGS: Mapping[str, SettingInfo] = MappingProxyType(
    {field.name: info_of(field) for field in fields(Settings)}
)
"""Every setting by name, in order."""


def require_known(names: Iterable[str], known: Iterable[str], what: str = "setting") -> None:
    """SettingError for the first name that is not known, with the nearest known one."""
    candidates = list(known)
    for name in names:
        if name not in candidates:
            raise SettingError(f"unknown {what} {name!r}{nearest(name, candidates)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """End of an error message: the nearest known name as a question, or nothing."""
    table = {k.lower().replace("-", "_"): k for k in known}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), table, n=1, cutoff=0.6)
    return f"; did you mean {table[close[0]]!r}?" if close else ""


def _float64_is_for_the_cpu(s: Settings) -> str | None:
    if s.dtype == "float64" and s.device == "cuda":
        return "--dtype float64 and --device cuda exclude each other: float64 runs on the CPU"
    return None


def _kv_follows_dtype(s: Settings) -> str | None:
    wide = s.dtype == "float64"
    if s.kv != "auto" and wide != (s.kv == "f64"):
        return f"--kv {s.kv} and --dtype {s.dtype} exclude each other: f64 goes with float64 only"
    return None


def _drafts_need_a_window(s: Settings) -> str | None:
    if s.draft == "lookup" and s.spec == 1:
        return "--draft lookup and --spec 1 exclude each other: drafts need a window of 2 or more"
    if s.draft == "none" and s.spec > 1:
        return f"--draft none and --spec {s.spec} exclude each other: nothing would fill the window"
    return None


def _vram_needs_a_gpu(s: Settings) -> str | None:
    if s.device == "cpu" and s.vram_gb:
        return f"--vram-gb {s.vram_gb:g} and --device cpu exclude each other: the CPU has no VRAM"
    return None


def _late_rows_need_deferral(s: Settings) -> str | None:
    if s.defer_cpu == "0" and s.defer_cpu_below:
        below = SETTINGS["defer_cpu_below"].show(s.defer_cpu_below)
        return f"--defer-cpu-below {below} needs --defer-cpu 1, check or repair"
    if s.defer_below_profile is not None and s.defer_cpu_below >= 0:
        return "--defer-below-profile needs --defer-cpu-below auto"
    if s.defer_cpu == "0" and s.defer_layers:
        return "--defer-layers needs --defer-cpu 1, check or repair"
    return None


def _overlap_needs_deferral(s: Settings) -> str | None:
    if s.overlap in ("balanced", "fast") and s.defer_cpu not in ("1", "repair"):
        return f"--overlap {s.overlap} needs --defer-cpu 1 or repair when the model is loaded"
    return None


def _experts_on_disk_stay_as_they_are(s: Settings) -> str | None:
    other = "--pack" if s.pack is not None else "--expert-layout tiles"
    if s.experts_on_disk and (s.pack is not None or s.expert_layout == "tiles"):
        return f"--experts-on-disk and {other} exclude each other: experts stay in the file as is"
    return None


def _adapting_needs_swaps(s: Settings) -> str | None:
    for name in ("adapt_every", "adapt_policy", "adapt_decay"):
        if not s.adapt_swaps and getattr(s, name) != SETTINGS[name].default:
            return f"--{name.replace('_', '-')} needs --adapt-swaps N: the cache stays as it is"
    if s.adapt_decay != SETTINGS["adapt_decay"].default and s.adapt_policy != "decayed":
        return f"--adapt-decay belongs to --adapt-policy decayed, not to {s.adapt_policy}"
    return None


_CONTRADICTIONS = (
    _adapting_needs_swaps,
    _late_rows_need_deferral,
    _overlap_needs_deferral,
    _experts_on_disk_stay_as_they_are,
    _float64_is_for_the_cpu,
    _kv_follows_dtype,
    _drafts_need_a_window,
    _vram_needs_a_gpu,
)
