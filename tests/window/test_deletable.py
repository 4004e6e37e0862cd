"""Deferral and repair off are deferral and repair absent.

Expectations: the program, buffers and bits of an engine whose source lacks the files, and the list
of code that ran.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

pytest.importorskip("triton")

from tests.engine.test_device_engine import FIXTURES, on_device

import strata
from strata.native import _fused, _native

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "fixtures" / "qwen4_exp" / "bf16.gguf"
TOKENS = list(range(30, 38))
REPAIR = ("window/repair.py", "window/device_repair.py")
DEFERRAL = ("window/defer.py", "window/device_defer.py", *REPAIR)
TABLES = ("engine/variants.py", "engine/device_variants.py")


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def without(source: str, modules: set[str]) -> str:
    """The source without imports of these modules, and without the rows of tables, statements and
    functions that use what they gave."""
    tree = ast.parse(source)
    gone: set[str] = set()
    for node in list(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            gone |= {alias.asname or alias.name for alias in node.names}
            tree.body.remove(node)
    assert gone, "nothing to delete here"
    before = -1
    while before != len(gone):
        before = len(gone)
        for node in list(tree.body):
            if not names_in(node) & gone:
                continue
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Tuple):
                node.value.elts = [e for e in node.value.elts if not names_in(e) & gone]
                continue
            assert isinstance(node, ast.FunctionDef), ast.dump(node)[:200]
            using = [s for s in node.body if names_in(s) & gone]
            if all(isinstance(s, ast.If) for s in using):
                node.body = [s for s in node.body if s not in using]
            else:
                gone.add(node.name)
                tree.body.remove(node)
    return ast.unparse(tree)


def facts(*modes: str) -> dict[str, object]:
    """Steps, buffers and bits of windows of 3, by mode."""
    found: dict[str, object] = {}
    for mode in modes:
        with strata.load(MODEL, device="cpu", workers=1, defer_cpu=mode) as model:
            recorded = model.engine.runner.window(3)
            tensors = recorded.frame.tensors()
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            logits = model.logits(TOKENS, through="windows", window=3)
            found[mode] = recorded.program.lines(), shapes, logits.tobytes().hex()
    return found


def device_facts() -> dict[str, object]:
    """The same of a device's window of 1, through Triton's interpreter."""
    engine = on_device(FIXTURES / "qwen3_moe" / "bf16.gguf", "cpu", expert_cache=3, context=8)
    recorded = engine.runner.window(1)
    shapes = {name: list(tensor.shape) for name, tensor in recorded.frame.tensors().items()}
    bits = engine.run_window([5]).tobytes().hex()
    engine.close()
    return {"device": [recorded.program.lines(), shapes, bits]}


def copied(to: Path, deleted: tuple[str, ...]) -> None:
    """The package without these files, and without the lines that name them."""
    copy = to / "strata"
    shutil.copytree(ROOT / "src" / "strata", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for extension in (_fused, _native):  # an installed package keeps them elsewhere
        shutil.copy(str(extension.__file__), copy / "native")
    modules = set()
    for name in deleted:
        (copy / name).unlink()
        modules.add("strata." + name.removesuffix(".py").replace("/", "."))
    for name in TABLES:
        path = copy / name
        path.write_text(without(path.read_text("utf-8"), modules), "utf-8")


def told(package: Path, wanted: str, **environ: str) -> object:
    """What a call of this file gives in a process that has the package from there."""
    script = (
        "import json, sys, strata\n"
        "from tests.window.test_deletable import facts, device_facts\n"
        "assert strata.__file__.startswith(sys.argv[1]), strata.__file__\n"
        f"json.dump({wanted}, sys.stdout)\n"
    )
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    paths = [str(package), str(ROOT), *libraries]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ}
    # -S: an editable install would put its own finder in front of the path
    run = subprocess.run(
        [sys.executable, "-S", "-c", script, str(package)],
        env=env, capture_output=True, text=True, check=False, timeout=300, cwd=package,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_without_the_files_of_repair_nothing_else_changes(tmp_path: Path) -> None:
    """What is off, and deferral without repair, have the same steps, buffers and bits."""
    copied(tmp_path, REPAIR)
    assert told(tmp_path, "facts('0', '1')") == json.loads(json.dumps(facts("0", "1")))


def test_without_the_files_of_deferral_windows_are_the_same(tmp_path: Path) -> None:
    """Deferral and repair, of the CPU and of a device, all deleted: windows that are off have the
    same steps, buffers and bits, the device's through Triton's interpreter."""
    copied(tmp_path, DEFERRAL)
    wanted = "{**facts('0'), **device_facts()}"
    ours = told(ROOT / "src", wanted, TRITON_INTERPRET="1")
    assert told(tmp_path, wanted, TRITON_INTERPRET="1") == ours


def functions_of(module: ModuleType) -> list[FunctionType]:
    """Functions and methods that a module defines."""
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    methods = [m for c in own if isinstance(c, type) for m in vars(c).values()]
    found = [f for f in (*own, *methods) if isinstance(f, FunctionType)]
    return [f for f in found if not f.__code__.co_freevars]


def test_off_runs_no_code_of_deferral(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every function of the files made to fail, off still loads and runs; on does not."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("deferral ran")

    modules = [import_module(f"strata.window.{name}") for name in ("defer", "repair")]
    for function in (f for module in modules for f in functions_of(module)):
        monkeypatch.setattr(function, "__code__", fail.__code__)
    with strata.load(MODEL, device="cpu", workers=1) as model:
        model.logits(TOKENS, through="windows", window=2)
    with pytest.raises(AssertionError, match="deferral ran"):
        strata.load(MODEL, device="cpu", workers=1, defer_cpu="repair").engine.runner.window(1)
