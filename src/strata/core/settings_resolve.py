"""Works out the automatic settings once, and prints what is in effect. Knows no probes: the machine
is told to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.core.errors import SettingError
from strata.core.setting_kinds import SettingInfo
from strata.core.settings import DEFAULT_CONTEXT_TOKENS, SETTINGS, Settings
from strata.core.settings_load import AUTO, Effective


@dataclass(frozen=True)
class Machine:
    """What was found here.

    gpu: name of the GPU that will be used, or None; gpu_report: what was looked for and found, one
    clause. cpu_cores: physical cores this process may use. cpu_isas: instruction sets that work
    here, best last.
    """

    gpu: str | None
    gpu_report: str
    cpu_cores: int
    cpu_isas: tuple[str, ...]


def resolve(
    asked: Effective, machine: Machine, model_context_tokens: int, *, planning: bool = False
) -> Effective:
    """Settings without automatic values (ram_gb, vram_gb and seed stay: they are measured or drawn
    later).

    SettingError when a value asked for cannot be had here: no GPU, an instruction set this CPU
    lacks, a context beyond the model's. A value that was asked for is never replaced.

    planning: nothing will be run, so a GPU that is not here may be planned for (--vram-gb or
    --device cuda), and when neither asks for one the plan is for the CPU.
    """
    s = asked.settings
    device = _planned_device(s, machine) if planning else _device(s, machine)
    worked_out: dict[str, Any] = {
        "device": device,
        "context": _context(s, model_context_tokens),
        "kv": _kv(s, device),
        "draft": ("lookup" if s.spec > 1 else "none") if s.draft == "auto" else s.draft,
        "prompt_chunk": s.prompt_chunk or (256 if device == "cpu" else 2048),
        "workers": s.workers or machine.cpu_cores,
        "cpu_isa": _cpu_isa(s, machine),
    }
    if s.expert_cache == SETTINGS["expert_cache"].auto and device == "cpu":
        worked_out["expert_cache"] = 0
    changed = {name: value for name, value in worked_out.items() if value != getattr(s, name)}
    return Effective(replace(s, **changed), {**asked.sources, **dict.fromkeys(changed, AUTO)})


def _device(s: Settings, machine: Machine) -> str:
    if s.device != "cpu" and machine.gpu is None:
        raise SettingError(
            f"--device {s.device}: no usable GPU: {machine.gpu_report}; check the driver and that "
            f"this container may see the card, or pass --device cpu to run on the CPU alone"
        )
    if s.device == "auto" and s.dtype == "float64":
        raise SettingError("--dtype float64 runs on the CPU only; add --device cpu")
    return "cuda" if s.device == "auto" else s.device


def _planned_device(s: Settings, machine: Machine) -> str:
    if s.device != "auto":
        return s.device
    return "cuda" if machine.gpu is not None or s.vram_gb else "cpu"


def _context(s: Settings, model_context_tokens: int) -> int:
    if s.context > model_context_tokens:
        raise SettingError(
            f"--context {s.context}: this model was made for at most {model_context_tokens} "
            f"tokens; ask for that or less"
        )
    return s.context or min(model_context_tokens, DEFAULT_CONTEXT_TOKENS)


def _kv(s: Settings, device: str) -> str:
    if s.kv != "auto":
        return s.kv
    if s.dtype == "float64":
        return "f64"
    return "f32" if device == "cpu" else "f16"


def _cpu_isa(s: Settings, machine: Machine) -> str:
    if s.cpu_isa == "auto":
        return machine.cpu_isas[-1]
    if s.cpu_isa not in machine.cpu_isas:
        raise SettingError(
            f"--cpu-isa {s.cpu_isa}: this CPU or build only has {', '.join(machine.cpu_isas)}"
        )
    return s.cpu_isa


def effective_lines(effective: Effective, why_not: Mapping[str, str] | None = None) -> list[str]:
    """Start-up report: the device, then every setting that is not at its default, with its source
    and state.

    why_not: setting name -> reason why it has no effect here; such a line reads "off here:
    <reason>".
    """
    s, reasons = effective.settings, why_not or {}
    lines = ["device: CPU only" if s.device == "cpu" else f"device: {s.device}"]
    for name, info in SETTINGS.items():
        value = getattr(s, name)
        if value == info.default and not effective.asked(name) and name not in reasons:
            continue
        text = f"{name.replace('_', '-')} = {info.show(value)}"
        if effective.sources[name] == AUTO:
            lines.append(f"{text} (auto)")
        else:
            lines.append(f"{text} ({effective.sources[name]}): {_state(info, value, reasons)}")
    return lines


def _state(info: SettingInfo, value: object, reasons: Mapping[str, str]) -> str:
    if info.name in reasons:
        return f"off here: {reasons[info.name]}"
    if info.scope == "serve":
        return "used by strata serve"
    if value == info.default:
        return "on (the default)"
    return "on (changes the output)" if info.changes_output else "on"
