"""Kernels compile for a real GPU, and the compiler kept their arithmetic and their wide loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TILES = ("linear", "gate_up", "down", "dense")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What ``compile_kernels`` prints."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.compile_kernels"]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_subnormals_and_divisions(facts):
    """The contract keeps subnormals and divides as IEEE: no flushing, no approximate division. The
    softmax of a router is no part of it."""
    assert {name for name, f in facts.items() if f["flushed"] or f["approximate"]} <= {"plan"}


def test_weights_through_registers_are_read_wide(facts):
    """Four words of each of three blocks and the first activations, all by loads of 16 bytes."""
    found = facts["down_registers"]
    assert found["copies_16"] == found["byte_loads"] == 0
    assert found["loads_16"] >= 3 * 4 + 2


def test_spread_blocks_are_in_flight_together(facts):
    """Six steps of 8 words and activations by loads of 16 bytes; factors of 4 rows handed on."""
    found = facts["spread"]
    assert found["copies_16"] == found["byte_loads"] == 0
    assert found["loads_16"] >= 6 * (8 + 2)
    assert found["handed_on"] == 6 * 4


@pytest.mark.parametrize("name", TILES)
def test_weights_are_read_wide(facts, name):
    """Code words come by asynchronous copies of 16 bytes; nothing is read byte by byte."""
    assert facts[name]["copies_16"] > 0
    assert facts[name]["dots"] >= 8
    # place codes are bytes, and a combine is no product
    assert facts[name]["byte_loads"] == 0


def test_a_token_is_planned_by_one_warp_in_a_loop(facts):
    """No barriers, and the search for an expert stands there once, not ten times (2 of a warp's
    own sums and maxima each)."""
    assert facts["plan"]["barriers"] == 0
    assert 0 < facts["plan"]["over_a_warp"] < 10
