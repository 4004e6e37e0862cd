"""C12 on whole files: 12 GiB of experts that take no space on disk, and machines that are faked.

Expectations: the sizes written into the file and the figures of the faked probes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from strata import cli
from strata.core.settings_load import load_settings
from strata.engine import build
from strata.memory.budget import GIB, MemoryPlan, Probes
from tests.cases.tiny import Sizes, draw, gguf_keys, gguf_tensor, stacked
from tests.formats.gguf_writer import BF16, Tensor, gguf_bytes

N_LAYERS, N_EXPERTS, D, FF = 4, 256, 2048, 1024
EXPERT_BYTES = 3 * D * FF * 2
EXPERTS = N_LAYERS * N_EXPERTS * EXPERT_BYTES
assert EXPERTS == 12 * GIB


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with a true header of 12 GiB of experts, all of it a hole."""
    few = Sizes(layers=N_LAYERS, experts=2, active=2, d=D, ff=2, heads=16, head_dim=128)
    keys = gguf_keys(Sizes(layers=N_LAYERS, experts=N_EXPERTS, active=8, d=D, ff=FF, heads=16,
                           head_dim=128))  # fmt: skip
    made = [gguf_tensor(name, t) for name, t in stacked(draw(few), few, fused=False).items()]
    tensors, offset = [], 0
    for tensor in made:
        ne, type_id = tensor.ne, tensor.type_id
        if "_exps" in tensor.name:
            ne = (FF if "down" in tensor.name else D, D if "down" in tensor.name else FF, N_EXPERTS)
            type_id = BF16
        elif "ffn_gate_inp" in tensor.name:
            ne = (D, N_EXPERTS)
        n_bytes = (2 if type_id == BF16 else 4) * ne[0] * (ne[1] if len(ne) > 1 else 1)
        n_bytes *= ne[2] if len(ne) > 2 else 1
        tensors.append(Tensor(tensor.name, ne, type_id, b"", offset))
        offset += -(-n_bytes // 32) * 32
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    header = gguf_bytes(keys, tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + offset)
    assert path.stat().st_blocks * 512 < 64 << 20, "this file system writes holes out"
    return path


def machine(tmp_path: Path, free_gib: float, limit_gib: float | None = None) -> Probes:
    """Free memory and, if any, the container's limit (nothing in use)."""
    folder = tmp_path / "cgroup"
    folder.mkdir(exist_ok=True)
    (tmp_path / "own").write_text("0::/\n")
    if limit_gib is not None:
        (folder / "memory.max").write_text(str(int(limit_gib * GIB)))
        (folder / "memory.current").write_text("0")
    return Probes(lambda: int(free_gib * GIB), folder, tmp_path / "own", lambda: -1)


def plan(path: Path, probes: Probes, **settings: Any) -> MemoryPlan:
    asked = load_settings({"device": "cpu", "expert_layout": "native"} | settings, environ={})
    return build.plan_model(path, asked, probes).memory


@pytest.mark.parametrize(
    "free, limit, available, source",
    [
        (40, 4, "4.000 GiB available", "container's limit of 4.00 GiB"),
        (8, None, "8.000 GiB available", "machine's available memory"),
    ],
)
def test_c12_does_not_fit(
    free: float,
    limit: float | None,
    available: str,
    source: str,
    big: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """(a) 40 GiB free in a container of 4; (b) 8 GiB free and 64 GiB of swap. Plan-only and a real
    start both say so, exit non-zero and allocate nothing."""
    probes = machine(tmp_path, free, limit)
    monkeypatch.setattr(psutil, "swap_memory", lambda: pytest.fail("swap is no memory"))
    monkeypatch.setattr(build, "Probes", lambda: probes)
    before = psutil.Process().memory_info().rss
    assert cli.main(["plan", str(big), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert cli.main(["run", str(big), "hi", "--device", "cpu", "--quiet"]) == 2
    shown = capsys.readouterr()
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert shown.out == "" and shown.err.count("\n") == 1
    for text in (said, shown.err):
        assert "does not fit: ram needs" in text and available in text and source in text
        needed = float(text.split("ram needs ")[1].split(" GiB")[0])
        short = float(text.split("short by ")[1].split(" GiB")[0])
        assert needed > 12 and short == pytest.approx(needed - (limit or free), abs=0.002)


def test_c12_it_fits_where_there_is_room_and_not_a_byte_below(big: Path, tmp_path: Path) -> None:
    """The verdict turns exactly at the sum of the parts."""
    roomy = plan(big, machine(tmp_path, 64), context=1000)
    assert roomy.fits
    owners = {line.owner: line.n_bytes for line in roomy.entries if line.tier == "ram"}
    assert owners["routed experts"] >= EXPERTS
    need = roomy.need("ram")
    assert need == sum(owners.values()) and need < 1.06 * EXPERTS
    for change, fits in ((0, True), (-1, False)):
        exact = Probes(lambda n=need + change: n, tmp_path, tmp_path / "no", lambda: -1)
        assert plan(big, exact, context=1000).fits is fits


def test_c12_every_part_of_the_plan_is_in_the_sum(big: Path, tmp_path: Path) -> None:
    """Cache, KV, prompt buffers and windows: each setting moves the sum by what it takes."""
    probes = machine(tmp_path, 64)
    base = plan(big, probes, context=1000)
    cached = plan(big, probes, context=1000, expert_cache=100)
    assert cached.need("ram") - base.need("ram") >= 100 * EXPERT_BYTES
    longer = plan(big, probes, context=4000)
    kv = 3000 * N_LAYERS * 2 * 2 * 128 * 4
    assert longer.need("ram") - base.need("ram") >= kv
    half = plan(big, probes, context=4000, kv="f16")
    assert longer.need("ram") - half.need("ram") >= (4000 * N_LAYERS * 2 * 2 * 128 * 4) // 2
    assert plan(big, probes, context=1000, prompt_chunk=1000).need("ram") > base.need("ram")
    assert plan(big, probes, context=1000, spec=8).need("ram") > base.need("ram")


def test_c12_the_cache_cannot_be_sized_against_memory_that_experts_need(
    big: Path, tmp_path: Path
) -> None:
    """Room for the experts, not for the experts and a copy of half of them."""
    probes = machine(tmp_path, 14)
    assert plan(big, probes, context=1000).fits
    both = plan(big, probes, context=1000, expert_cache=N_LAYERS * N_EXPERTS // 2)
    assert not both.fits and both.need("ram") > 18 * GIB


def test_c12_a_plan_for_a_gpu(big: Path, tmp_path: Path) -> None:
    """--vram-gb: the dense part lies there, the cache fills the rest and no more; a card that holds
    not even the dense part is too small."""
    probes = machine(tmp_path, 64)
    for vram_gb in (1.0, 4.0, 11.0, 30.0):
        made = plan(big, probes, device="cuda", vram_gb=vram_gb, context=1000)
        assert made.fits
        assert made.need("vram") <= vram_gb * GIB == made.limits["vram"].n_bytes
        (n_cached,) = [
            int(line.owner.split("(")[1].split()[0])
            for line in made.entries
            if line.owner.startswith("fast tier")
        ]
        room = vram_gb * GIB - made.need("vram")
        assert n_cached == N_LAYERS * N_EXPERTS or room < EXPERT_BYTES
    small = plan(big, probes, device="cuda", vram_gb=0.01, context=1000)
    assert not small.fits and "vram needs" in small.shortfalls()[0]
    assert "--vram-gb 0.01" in small.shortfalls()[0]


def test_c12_ram_gb_is_obeyed(big: Path, tmp_path: Path) -> None:
    """A figure given by hand is the limit, also above what is free here (another machine)."""
    probes = machine(tmp_path, 1)
    assert plan(big, probes, ram_gb=16.0, context=1000).fits
    less = plan(big, probes, ram_gb=8.0, context=1000)
    assert not less.fits and "--ram-gb 8" in less.shortfalls()[0]


def test_c12_limits_of_the_process(big: Path, tmp_path: Path) -> None:
    """ulimit -v binds as well, and is named."""
    free = machine(tmp_path, 64)
    probes = Probes(free.available_bytes, free.cgroup_root, free.own_cgroups, lambda: 6 * GIB)
    made = plan(big, probes, context=1000)
    assert not made.fits and "ulimit -v" in made.shortfalls()[0]
