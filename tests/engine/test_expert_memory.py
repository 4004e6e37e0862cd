"""Experts' layouts, packs and the memory of loading, end to end through ``strata.load``.

Expectations: tiles are the same numbers (docs/decisions/003-tiles.md), so logits have the same
bits; peak anonymous memory stays within 1.1 times the memory plan.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.formats import gguf_writer

import strata
from strata.core.errors import FormatError, InputError, SettingError
from strata.formats.checkpoint import open_checkpoint
from strata.formats.string_array import StringArray
from strata.formats.weight_types import BY_GGML_ID, TYPES
from strata.memory.budget import Line
from strata.native import CpuPool

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3_moe" / "q8_0.gguf"
GPT_OSS = FIXTURE.parents[1] / "gpt_oss" / "mxfp4.gguf"
READS_TILES = bool(getattr(CpuPool, "reads_tiles", False))
IDS = [5, 80, 9, 9, 200, 31]


def load(path=FIXTURE, **settings):
    return strata.load(path, device="cpu", context=64, **settings)


def logits(path=FIXTURE, **settings):
    """Logits of a few tokens, and the start-up report in one text."""
    with load(path, **settings) as model:
        return model.logits(IDS), "\n".join(model.report)


def test_tiles_give_the_logits_of_the_rows():
    """In float64 by the reference, in float32 by the CPU pool where its kernels read tiles."""
    native, report = logits(dtype="float64", expert_layout="native")
    assert "experts: 3 layers native: asked for" in report
    tiles, report = logits(dtype="float64", expert_layout="tiles")
    assert "experts: 3 layers as tiles (+0.00 GiB): asked for" in report
    assert np.array_equal(native, tiles)
    if READS_TILES:
        plain, _ = logits(expert_layout="native")
        tiles, _ = logits(expert_layout="tiles")
        assert np.array_equal(plain, tiles)
    else:
        with pytest.raises(SettingError, match="read no tiles"):
            load(expert_layout="tiles")
        assert "3 layers native: the CPU kernels of this build read no" in logits()[1]


@pytest.mark.parametrize("path", [FIXTURE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_experts_on_disk_give_the_logits_of_ram(path, dtype):
    """Also with some of them copied to the fast tier; gpt-oss has biases, which are in RAM."""
    ram, _ = logits(path, dtype=dtype)
    for cache in (0, 5):
        with load(path, dtype=dtype, experts_on_disk=True, expert_cache=cache) as model:
            assert np.array_equal(model.logits(IDS), ram)
            assert f" on disk, {cache} of them also" in "\n".join(model.report)


def test_experts_on_disk_are_planned_there():
    """Expectation: 3 layers of 8 experts, 3 matrices of 32 rows, 34 bytes a row of 32 in Q8_0."""
    with load(experts_on_disk=True) as model:
        lines = {x.owner: x for x in model.engine.plan.entries if "expert" in x.owner}
    assert lines.pop("routed experts, in the page cache as far as it goes") == Line(
        "disk", "routed experts, in the page cache as far as it goes", 3 * 8 * 3 * 32 * 34
    )
    assert not any(line.n_bytes for line in lines.values())
    with pytest.raises(SettingError, match="--experts-on-disk and --pack exclude each other"):
        load(experts_on_disk=True, pack="x")
    with pytest.raises(SettingError, match="--experts-on-disk and --expert-layout tiles exclude"):
        load(experts_on_disk=True, expert_layout="tiles")


def test_a_pack_is_written_then_read(tmp_path):
    """The second start reads the pack, writes nothing, and gives the same logits."""
    folder, path = tmp_path / "pack", tmp_path / "model.gguf"
    shutil.copyfile(FIXTURE, path)
    asked = {"dtype": "float64", "pack": folder}
    first, _ = logits(path, expert_layout="tiles", **asked)
    assert (folder / "manifest.json").exists()
    written = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    again, report = logits(path, expert_layout="tiles", **asked)
    assert np.array_equal(first, again)
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == written
    # proof that the experts come from the pack: one that differs, hash and all, changes the logits
    change_expert(folder)
    assert not np.array_equal(first, logits(path, expert_layout="tiles", **asked)[0])


def change_expert(folder):
    """Other codes in one layer, with a manifest that agrees."""
    path = folder / "layer-001.bin"
    raw = bytearray(path.read_bytes())
    for at in range(0, len(raw), 2):
        raw[at] ^= 1
    path.write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["layers"][1]["pieces"] = [hashlib.blake2b(raw, digest_size=16).hexdigest()]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_stale_packs_are_refused_before_loading(tmp_path):
    folder = tmp_path / "pack"
    asked = {"dtype": "float64", "pack": folder}
    logits(expert_layout="tiles", **asked)
    with pytest.raises(FormatError, match=r"layer 0: packed as gate Q8_0 tiles.*--expert-layout"):
        load(expert_layout="native", **asked)
    if READS_TILES:
        assert f"as the pack {folder} holds them" in logits(pack=folder)[1]
    other = FIXTURE.with_name("bf16.gguf")
    with pytest.raises(FormatError, match=r"manifest.json belongs to another checkpoint"):
        load(other, **asked)
    (folder / "layer-002.bin").unlink()
    with pytest.raises(FormatError, match=r"layer-002.bin is missing"):
        load(expert_layout="tiles", **asked)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"holds other things \(notes.txt\)"):
        load(pack=tmp_path / "mine")


def bigger_copy(path, n_experts, width):
    """The fixture's model with that many experts of that width, random Q4_0."""
    rng = np.random.default_rng(1)
    with open_checkpoint(FIXTURE) as c:
        keys = []
        for name, value in c.metadata.items():
            kind = c.metadata_types[name]
            value = {"qwen3moe.expert_count": n_experts}.get(name, value)
            if name == "qwen3moe.expert_feed_forward_length":
                value = width
            if kind.startswith("array of "):
                as_list = list if isinstance(value, StringArray) else np.ndarray.tolist
                kind, value = "array", (kind.removeprefix("array of "), as_list(value))
            keys.append((name, kind, value))
        tensors = []
        for name, info in c.tensors.items():
            shape, kind, raw = info.shape, info.type, c.raw(name).tobytes()
            if "_exps" in name:
                rows = (32, width) if "down" in name else (width, 32)
                shape, kind = (n_experts, *rows), TYPES["Q4_0"]
                blocks = rng.integers(0, 256, (n_experts * width, 18), np.uint8)
                blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
                raw = blocks.tobytes()
            elif "ffn_gate_inp" in name:
                shape = (n_experts, 32)
                raw = rng.normal(0, 0.1, shape).astype(np.float32).tobytes()
            assert BY_GGML_ID[kind.ggml_id] is kind
            tensors.append(gguf_writer.Tensor(name, shape[::-1], kind.ggml_id, raw))
    path.write_bytes(gguf_writer.gguf_bytes(keys, tensors))


MEASURE = """
import json, sys, threading
import strata

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon:")).split()[1]) << 10

done, peak = threading.Event(), [0]
def sample():
    while not done.wait(0.003):
        peak[0] = max(peak[0], anonymous())
sampler = threading.Thread(target=sample)
sampler.start()
settings = json.loads(sys.argv[2])
with strata.load(sys.argv[1], device="cpu", context=64, **settings) as model:
    done.set()
    sampler.join()
    lines = {x.owner: x.n_bytes for x in model.engine.plan.entries if x.tier == "ram"}
print(json.dumps({"peak": max(peak[0], anonymous()), "lines": lines}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "n_experts", [256, pytest.param(2000, marks=pytest.mark.soak)], ids=["42MiB", "330MiB"]
)
@pytest.mark.parametrize("settings", [{}, {"expert_layout": "tiles", "dtype": "float64"}], ids=str)
def test_loading_stays_within_the_plan(tmp_path, n_experts, settings):
    """Peak anonymous memory of a whole process, interpreter and all, against its memory plan."""
    path = tmp_path / "model.gguf"
    bigger_copy(path, n_experts, 1024)
    command = [sys.executable, "-c", MEASURE, str(path), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    experts = found["lines"]["routed experts"]
    assert experts >= n_experts * 3 * 3 * 1024 * 18  # three layers of three matrices
    assert experts < found["peak"] <= 1.1 * sum(found["lines"].values())
