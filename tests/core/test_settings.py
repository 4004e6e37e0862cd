"""The settings table, its sources and its report; expectations are written out here or read off the
table itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from strata.core.errors import SettingError
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import Effective, load_settings
from strata.core.settings_resolve import Machine, effective_lines, resolve

ROOT = Path(__file__).resolve().parents[2]
CPU = Machine(None, "looked for CUDA, found none", 6, ("portable", "avx2"))
GPU = Machine("Some Card", "found Some Card", 6, ("portable", "avx2"))

OTHER: dict[str, Any] = {
    "device": "cpu", "dtype": "float64", "numerics": "fast", "context": 100, "kv": "f16",
    "prompt_chunk": 64, "short_read": 40, "prompt_cpu": 0.5, "spec": 4, "draft": "none",
    "expert_cache": 5, "expert_profile": "p.txt",
    "expert_layout": "native", "pack": "packed", "experts_on_disk": True,
    "defer_cpu": "1", "defer_layers": [1, 3], "defer_cpu_below": 0.25,
    "pcie_frac": 0.5, "wait": "memop", "adapt_swaps": 2, "adapt_every": 9, "adapt_policy": "lru",
    "adapt_decay": 0.5, "expert_profile_save": "s.txt", "defer_below_profile": "t.json",
    "route_tail_skip": 7, "quality_budget": 0.02, "profile_dir": "tuned",
    "quality_meter": "1/64", "quality_reread": True, "verify_profile": True,
    "decode_timing": True, "verify_trace": True, "overlap": "fast",
    "workers": 3, "cpu_isa": "portable", "ram_gb": 4.5, "vram_gb": 8.0,
    "poison": True, "logpos": "out.tsv", "logpos_top": 20, "logpos_extra": 7, "temperature": 0.5,
    "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1, "frequency_penalty": 0.2,
    "presence_penalty": 0.3, "logit_bias": {5: -1.5}, "seed": 42, "max_tokens": 9, "stop": ["END"],
    "host": "::1", "port": 9000, "api_key": "k-1", "allow_public_without_key": True,
    "allowed_hosts": ["box"], "allowed_origins": ["https://a.example"], "served_name": "m",
    "any_model_name": True, "max_queue": 3, "max_body_mb": 2.5, "silence_s": 9.5, "drain_s": 1.5,
    "wire_log": "none", "checkpoints": 2, "park_gb": 1.5, "park_dir": "kept",
}  # fmt: skip
"""A value other than the default for each setting."""


def load(given: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **more: Any):
    return load_settings(given, environ=environ or {}, **more)


def as_text(value: object) -> str:
    """A value as one would type it."""
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return value[0] if isinstance(value[0], str) else ",".join(map(str, value))
    return "on" if value is True else str(value)


def test_every_setting_is_fully_described() -> None:
    assert set(OTHER) == set(SETTINGS), "add a value for the new setting above"
    for info in SETTINGS.values():
        assert info.help.endswith("."), info.name
        assert info.parse(info.default) == info.default
        if info.default not in (None, ()):
            assert info.parse(info.show(info.default)) == info.default
    assert Settings() == Settings(**{name: info.default for name, info in SETTINGS.items()})


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_obeyed_from_every_source(name: str, tmp_path: Path) -> None:
    """C44: the value arrives, its source is known, and the report shows it."""
    expected = getattr(Settings(**{name: OTHER[name], **supported(name)}), name)
    extra = supported(name)
    flag = SETTINGS[name].flag
    toml = tmp_path / "strata.toml"
    toml.write_text(f"{name} = {as_toml(OTHER[name])}\n")
    variable = SETTINGS[name].env[-1]
    cases = [
        (load({name: OTHER[name], **extra}), f"argument {name}"),
        (load({name: as_text(OTHER[name]), **extra}, as_flags=True), flag),
        (load(extra, {variable: as_text(OTHER[name])}), f"environment {variable}"),
        (load(extra, config=toml), f"file {toml}"),
    ]
    for effective, source in cases:
        assert getattr(effective.settings, name) == expected
        assert effective.sources[name] == source
        assert effective.asked(name)
        shown = f"{name.replace('_', '-')} = {SETTINGS[name].show(expected)} ({source}): "
        assert [line for line in effective_lines(effective) if line.startswith(shown)]


def supported(name: str) -> dict[str, Any]:
    """Settings that the value in OTHER needs beside it."""
    late = {"defer_cpu": "1"}
    swaps = {"adapt_swaps": 1}
    beside = {
        "draft": {"spec": 1}, "defer_layers": late, "defer_cpu_below": late, "overlap": late,
        "defer_below_profile": {**late, "defer_cpu_below": -1}, "adapt_every": swaps,
        "adapt_policy": swaps, "adapt_decay": swaps,
    }  # fmt: skip
    return beside.get(name, {})


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}" = {v}' for k, v in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


def test_order_of_sources(tmp_path: Path) -> None:
    toml = tmp_path / "s.toml"
    toml.write_text('top_k = 1\ntop_p = 0.5\nmin_p = 0.1\nstop = ["x"]\n')
    environ = {"STRATA_CONFIG": str(toml), "STRATA_TOP_P": "0.6", "STRATA_MIN_P": "0.2"}
    effective = load({"min_p": 0.3, "seed": None}, environ)
    s = effective.settings
    assert (s.top_k, s.top_p, s.min_p, s.stop, s.seed) == (1, 0.6, 0.3, ("x",), -1)
    assert effective.sources["top_k"] == f"file {toml}"
    assert effective.sources["top_p"] == "environment STRATA_TOP_P"
    assert effective.sources["min_p"] == "argument min_p"
    assert effective.sources["seed"] == "default"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expert_cash": 3}, r"'expert_cash'; did you mean 'expert_cache'\?"),
        ({"prompt-chunk": 3}, r"'prompt-chunk'; did you mean 'prompt_chunk'\?"),
        ({"zzz": 3}, r"unknown setting 'zzz'$"),
        ({"kv": "f8"}, "--kv f8: must be one of auto, f32, f16, int8, q4, f64"),
        ({"defer_cpu": 2}, "--defer-cpu 2: must be one of 0, 1, check, repair"),
        ({"defer_cpu": True}, "--defer-cpu True: must be one of"),
        ({"spec": 9}, "--spec 9: must be between 1 and 8"),
        ({"spec": 0}, "--spec 0: must be between 1 and 8"),
        ({"spec": 2.0}, "--spec 2.0: must be a whole number"),
        ({"spec": "two"}, "--spec two: must be a whole number"),
        ({"spec": True}, "--spec True: must be a whole number"),
        ({"temperature": float("nan")}, "--temperature nan: must be a finite number"),
        ({"temperature": -1}, "--temperature -1: must be between 0 and 100"),
        ({"top_p": 0}, "--top-p 0: must be above 0"),
        ({"seed": 2**64}, "--seed 18446744073709551616: must be between 0 and"),
        ({"seed": -2}, "--seed -2: must be between 0 and"),
        ({"poison": "maybe"}, "--poison maybe: must be on or off"),
        ({"logpos": ""}, "--logpos '': must be a path"),
        ({"stop": [""]}, "--stop .*: an empty text"),
        ({"stop": [3]}, "--stop .*: must be a text"),
        ({"logit_bias": "5"}, "--logit-bias 5: must look like"),
        ({"logit_bias": {-1: 2}}, "--logit-bias .*: -1 is no token id"),
        ({"logit_bias": ["1=2", "1=3"]}, "token 1 is given twice"),
        ({"logit_bias": {1: 1e9}}, "must be between"),
        ({"adapt_swaps": 5000}, "--adapt-swaps 5000: must be between 0 and 4096"),
        ({"ram_gb": -1}, "--ram-gb -1: must be between 0 and 1048576"),
        ({"park_gb": 1e300}, r"--park-gb 1e\+300: must be between"),
        ({"silence_s": 1e300}, r"--silence-s 1e\+300: must be between"),
        ({"dtype": "float64", "device": "cuda"}, "--dtype float64 and --device cuda exclude"),
        ({"dtype": "float64", "kv": "f16"}, "--kv f16 and --dtype float64 exclude"),
        ({"kv": "f64"}, "--kv f64 and --dtype float32 exclude"),
        ({"dtype": "float64", "kv": "q4"}, "--kv q4 and --dtype float64 exclude"),
        ({"defer_layers": [1.5], "defer_cpu": "1"}, r"--defer-layers \[1.5\]: must be layer"),
        ({"defer_layers": [True], "defer_cpu": "1"}, "must be layer numbers"),
        ({"defer_layers": "1,x", "defer_cpu": "1"}, "--defer-layers 1,x: must be layer numbers"),
        ({"draft": "lookup"}, "--draft lookup and --spec 1 exclude"),
        ({"draft": "none", "spec": 4}, "--draft none and --spec 4 exclude"),
        ({"vram_gb": 8, "device": "cpu"}, "--vram-gb 8 and --device cpu exclude"),
    ],
)
def test_bad_values_and_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load(given)


def test_the_environment_is_held_to_the_same_rules() -> None:
    with pytest.raises(SettingError, match=r"STRATA_SPECK is no .* 'STRATA_SPEC'\?"):
        load({}, {"STRATA_SPECK": "2"})
    with pytest.raises(SettingError, match=r"^environment STRATA_KV: --kv f8: must be one of"):
        load({}, {"STRATA_KV": "f8"})
    # the upstream engine's name and ours for one setting
    one = {"STRATA_CPU_ISA": "avx2"}
    assert load({}, {**one, "STRATA_FORCE_ISA": "avx2"}).settings.cpu_isa == "avx2"
    with pytest.raises(SettingError, match="STRATA_CPU_ISA=avx2 and STRATA_FORCE_ISA=portable"):
        load({}, {**one, "STRATA_FORCE_ISA": "portable"})
    assert load({}, {"STRATA_KV": "", "OTHER": "x"}).settings == Settings()


def test_a_settings_file_is_held_to_the_same_rules(tmp_path: Path) -> None:
    toml = tmp_path / "bad.toml"
    for text, message in (
        ("spek = 2", r"unknown setting in .*bad.toml: 'spek'; did you mean 'spec'\?"),
        ("spec = 12", r"file .*bad.toml: --spec 12: must be between"),
        ("spec = ", "not valid TOML"),
        ("[engine]\nspec = 2", "unknown setting in"),
    ):
        toml.write_text(text)
        with pytest.raises(SettingError, match=message):
            load({}, config=toml)
    with pytest.raises(SettingError, match="No such file"):
        load({}, config=tmp_path / "none.toml")


def test_text_forms() -> None:
    s = load({"context": "auto", "workers": "0", "seed": "random", "top_p": " 0.5 "}).settings
    assert (s.context, s.workers, s.seed, s.top_p) == (0, 0, -1, 0.5)
    s = load({"stop": '["a", "b"]', "logit_bias": "7=1,3=-2.5"}).settings
    assert s.stop == ("a", "b") and s.logit_bias == ((3, -2.5), (7, 1.0))
    assert load({"stop": "[not json"}).settings.stop == ("[not json",)
    assert load({"logpos": "~/x"}).settings.logpos == Path("~/x").expanduser()


def test_a_word_that_is_a_number_may_be_one(tmp_path: Path) -> None:
    """``defer_cpu = 1`` in a settings file and in Python is the choice "1"."""
    config = tmp_path / "a.toml"
    config.write_text("defer_cpu = 1\n")
    assert load_settings(config=config, environ={}).settings.defer_cpu == "1"
    assert Settings(defer_cpu=1).defer_cpu == "1"  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().spec = 3  # type: ignore[misc]


def test_request_settings_are_copied_and_checked() -> None:
    base = Settings(device="cpu", top_k=3)
    assert base.for_request(seed=5) == Settings(device="cpu", top_k=3, seed=5)
    with pytest.raises(SettingError, match="kv is fixed when a model is loaded"):
        base.for_request(kv="f16")
    with pytest.raises(SettingError, match=r"'temprature'; did you mean 'temperature'\?"):
        base.for_request(temprature=1)


def test_automatic_values_are_worked_out_once() -> None:
    s = resolve(load({"device": "cpu", "spec": 4}), CPU, 32768).settings
    assert (s.device, s.context, s.kv, s.draft) == ("cpu", 4096, "f32", "lookup")
    assert (s.workers, s.cpu_isa, s.expert_cache) == (6, "avx2", 0)
    s = resolve(load({"device": "cpu", "dtype": "float64"}), CPU, 300).settings
    assert (s.context, s.kv, s.draft) == (300, "f64", "none")
    s = resolve(load(), GPU, 32768).settings
    assert (s.device, s.kv, s.expert_cache) == ("cuda", "f16", -1)


@pytest.mark.parametrize("name", ["context", "kv", "draft", "workers", "cpu_isa", "expert_cache"])
def test_explicit_values_are_never_replaced(name: str) -> None:
    given = {"device": "cpu", name: OTHER[name]}
    resolved = resolve(load(given), CPU, 32768)
    assert getattr(resolved.settings, name) == OTHER[name]
    assert resolved.sources[name] == f"argument {name}"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_no_gpu_is_an_error_with_the_way_out(device: str) -> None:
    """C46: what was looked for, what was found, the usual remedy; the CPU only when asked for."""
    with pytest.raises(SettingError) as caught:
        resolve(load({"device": device}), CPU, 4096)
    message = str(caught.value)
    assert "looked for CUDA, found none" in message and "--device cpu" in message
    lines = effective_lines(resolve(load({"device": "cpu"}), CPU, 4096))
    assert lines[0] == "device: CPU only"


@pytest.mark.parametrize(
    ("given", "machine", "device"),
    [
        ({}, CPU, "cpu"),
        ({"vram_gb": 8}, CPU, "cuda"),
        ({"device": "cuda"}, CPU, "cuda"),
        ({}, GPU, "cuda"),
        ({"device": "cpu"}, GPU, "cpu"),
    ],
)
def test_a_plan_may_be_for_another_machine(
    given: dict[str, Any], machine: Machine, device: str
) -> None:
    assert resolve(load(given), machine, 4096, planning=True).settings.device == device


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cpu", "context": 5000}, "--context 5000: .* at most 4096"),
        ({"device": "cpu", "cpu_isa": "avx512"}, "--cpu-isa avx512: .* only has portable, avx2"),
    ],
)
def test_what_cannot_be_had_here_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve(load(given), CPU, 4096)


def test_float64_on_a_gpu_machine_wants_the_cpu_by_name() -> None:
    with pytest.raises(SettingError, match="--device cpu"):
        resolve(load({"dtype": "float64"}), GPU, 4096)


def test_report_states() -> None:
    given = {"device": "cpu", "expert_profile": "p", "temperature": 0.5, "spec": 1, "workers": 2}
    effective: Effective = resolve(load(given), CPU, 4096)
    lines = effective_lines(effective, {"expert_profile": "nothing is cached"})
    assert "expert-profile = p (argument expert_profile): off here: nothing is cached" in lines
    assert "temperature = 0.5 (argument temperature): on (changes the output)" in lines
    assert "workers = 2 (argument workers): on" in lines
    assert "spec = 1 (argument spec): on (the default)" in lines
    assert "context = 4096 (auto)" in lines
    assert not [line for line in lines if line.startswith(("top-k", "max-tokens"))]


def test_settings_doc_is_up_to_date() -> None:
    """docs/SETTINGS.md is what scripts/make_settings_doc.py writes."""
    path = ROOT / "scripts" / "make_settings_doc.py"
    module_spec = importlib.util.spec_from_file_location("make_settings_doc", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert (ROOT / "docs" / "SETTINGS.md").read_text(encoding="utf-8") == module.render()
