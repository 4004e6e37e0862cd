"""Guards the house: import order, no hidden imports, one reader of the environment, sizes.

The rules are those of docs/ARCHITECTURE.md; each test reads the source with ``ast`` and runs none
of it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "strata"
FILES = sorted(SRC.rglob("*.py"))
LEVELS = {
    "core": 0, "formats": 1, "native": 2, "kernels": 3, "memory": 4, "models": 5, "experts": 5,
    "window": 6, "engine": 7, "bench": 8, "quality": 9, "serve": 10, "cli": 11,
}  # fmt: skip
WITHOUT_TORCH = ("core", "formats", "serve")
MAY_CROSS = {("experts", "models")}
"""experts reads the model spec and its expert source; models never imports experts."""
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 60, 120


def level_of(module: str) -> str:
    """The folder (or command line) a module of ours belongs to."""
    parts = module.split(".")
    if len(parts) == 1:
        return "public"
    return "cli" if parts[1].startswith("cli") else parts[1]


def module_name(path: Path) -> str:
    """strata.formats.gguf for src/strata/formats/gguf.py."""
    parts = ("strata", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(p for p in parts if p != "__init__")


def imports(tree: ast.AST) -> list[tuple[str, int, ast.AST]]:
    """(module, line, node) of every import statement."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, node.lineno, node))
    return found


def parsed(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    own = level_of(module_name(path))
    for module, line, _ in imports(parsed(path)):
        if module.split(".")[0] != "strata" or own == "public":
            continue
        theirs = level_of(module)
        if theirs in (own, "public"):
            continue
        assert theirs in LEVELS, f"{path}:{line} imports {module}, which has no level"
        ok = LEVELS[theirs] < LEVELS[own] or (own, theirs) in MAY_CROSS
        assert ok, f"{path}:{line} ({own}) imports {module} ({theirs}): downwards only"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_imports_inside_functions(path: Path) -> None:
    if level_of(module_name(path)) == "cli" and path.name == "cli.py":
        return  # the dispatch imports only the chosen command's module
    tree = parsed(path)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            ours = [m for m, _, _ in imports(function) if m.split(".")[0] == "strata"]
            assert not ours, f"{path}:{function.lineno} {function.name} imports {ours}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_light_packages_stay_light(path: Path) -> None:
    own = level_of(module_name(path))
    for module, line, _ in imports(parsed(path)):
        root = module.split(".")[0]
        if own in WITHOUT_TORCH:
            assert root != "torch", f"{path}:{line}: {own} imports without torch"
        if own in ("core", "engine"):
            assert root not in ("fastapi", "pydantic", "uvicorn"), f"{path}:{line}"


def test_one_reader_of_the_environment() -> None:
    readers = {
        path.relative_to(SRC).as_posix()
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"core/settings_load.py"}


def test_every_op_has_reference_and_test() -> None:
    tests = Path(__file__).parent / "kernels"
    for folder in sorted(p for p in (SRC / "kernels").iterdir() if (p / "__init__.py").exists()):
        assert (folder / "ref.py").exists(), f"{folder.name} has no ref.py"
        assert (tests / f"test_{folder.name}.py").exists(), f"{folder.name} has no test"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= FILE_LINES, f"{path} has {source.count(chr(10))} lines"
    most = KERNEL_LINES if path.name == "triton.py" else FUNCTION_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= most, f"{path}:{node.lineno} {node.name} has {lines} lines"


def test_no_cycles() -> None:
    graph = {
        module_name(path): {m for m, _, _ in imports(parsed(path)) if m.startswith("strata.")}
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        for target in graph.get(module, ()):
            # a package's __init__ re-exports its own modules; those may import its siblings
            if target != module and not module.startswith(target + "."):
                visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


TABLES = {"build.py", "build_device.py", "variants.py", "device_variants.py"}
"""The files of the engine that name features."""


def test_features_are_leaves() -> None:
    """Feature files are imported by engine/build.py and the tables of variants alone, and by their
    own form for a device."""
    features = {
        "defer",
        "device_defer",
        "repair",
        "device_repair",
        "profile",
        "layer_split",
        "remote_stage",
        "tail_skip",
        "pcie_share",
        "remote",
    }
    for path in FILES:
        if path.name in TABLES and path.parent.name == "engine":
            continue
        for module, line, _ in imports(parsed(path)):
            parts = module.split(".")
            if path.stem == f"device_{parts[-1]}":
                continue
            if parts[:2] in (["strata", "window"], ["strata", "experts"]):
                assert parts[-1] not in features, f"{path}:{line} imports the feature {module}"
