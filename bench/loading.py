"""How long experts take to load, and how much memory while they do: against the memory plan.

Writes a synthetic GGUF (a qwen3_moe with IQ3_S, Q4_K and Q8_0 experts) to a temporary folder, then
loads it in processes of their own: as the file has it, as tiles, writing a pack, reading the pack,
and leaving the experts on disk. Peak is anonymous memory, sampled every 3 ms; the file itself is in
the page cache. Needs the tests' kit, and three times --gib of disk:

    PYTHONPATH=src:. python bench/loading.py [--gib 1] [--json FILE] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.cases.tiny import Sizes, draw, gguf_keys, gguf_name, gguf_tensor
from tests.formats.gguf_writer import Tensor, gguf_bytes

from strata.bench.cpu_memory import random_rows
from strata.formats.weight_types import TYPES

D, F, LAYERS = 1024, 768, 4
LAYER_TYPES = (("IQ3_S", "IQ3_S", "Q4_K"), ("Q4_K", "Q4_K", "Q8_0"))
WAYS: dict[str, dict[str, Any]] = {
    "native": {"expert_layout": "native"},
    "tiles": {"expert_layout": "tiles"},
    "pack written": {"expert_layout": "tiles", "pack": "PACK"},
    "pack read": {"expert_layout": "tiles", "pack": "PACK"},
    "on disk": {"experts_on_disk": True},
}

MEASURE = """
import json, sys, threading, time
import strata

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon:")).split()[1]) << 10

done, peak = threading.Event(), [0]
def sample():
    while not done.wait(0.003):
        peak[0] = max(peak[0], anonymous())
sampler = threading.Thread(target=sample)
phases = {}
def progress(phase, bytes_done, total):
    first = phases.setdefault(phase, [time.perf_counter(), 0.0, total])
    first[1] = time.perf_counter() - first[0]
before = anonymous()
sampler.start()
settings = json.loads(sys.argv[2])
start = time.perf_counter()
with strata.load(sys.argv[1], device="cpu", context=64, progress=progress, **settings) as model:
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    planned = sum(x.n_bytes for x in model.engine.plan.entries if x.tier == "ram")
    logits = model.logits([1, 2, 3])
phases = {name: {"seconds": s, "bytes": n} for name, (_, s, n) in phases.items()}
print(json.dumps({"seconds": seconds, "peak": max(peak[0], anonymous()), "before": before,
                  "planned": planned, "phases": phases, "sum": float(abs(logits).sum())}))
"""


def write_model(path: Path, n_bytes: int) -> int:
    """A model with about that many bytes of experts; experts of a layer. Written piece by piece."""
    per_expert = sum(
        sum(F * TYPES[t].row_bytes(D) for t in types[:2]) + D * TYPES[types[2]].row_bytes(F)
        for types in (LAYER_TYPES[i % 2] for i in range(LAYERS))
    )
    n_experts = max(8, n_bytes // per_expert)
    sizes = Sizes(layers=LAYERS, experts=1, active=1, d=D, ff=32, heads=8, kv_heads=2, head_dim=64)
    real = Sizes(layers=LAYERS, experts=n_experts, active=8, d=D, ff=F, heads=8, kv_heads=2,
                 head_dim=64)  # fmt: skip
    weights = {n: t for n, t in draw(sizes).items() if ".experts." not in n}
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(n_experts, D) / D**0.5
    tensors = [gguf_tensor(name, tensor) for name, tensor in weights.items()]
    rng, pieces = np.random.default_rng(0), {}
    for layer in range(LAYERS):
        for proj, kind in zip(("gate", "up", "down"), LAYER_TYPES[layer % 2], strict=True):
            shape = (D, F) if proj == "down" else (F, D)
            name = gguf_name(f"model.layers.{layer}.mlp.experts.{proj}_proj.weight")
            pieces[name] = random_rows(kind, *shape, rng).tobytes()
            ne = (shape[1], shape[0], n_experts)
            tensors.append(Tensor(name, ne, TYPES[kind].ggml_id, b""))
    # places first, bytes afterwards: the file is larger than what should be held at once
    placed, end = [], 0
    for t in tensors:
        size = len(pieces[t.name]) * n_experts if t.name in pieces else len(t.data)
        placed.append(Tensor(t.name, t.ne, t.type_id, b"", end))
        end += -(-size // 32) * 32
    head = gguf_bytes(gguf_keys(real), placed)
    with open(path, "wb") as stream:
        stream.write(head)
        for t, place in zip(tensors, placed, strict=True):
            stream.seek(len(head) + place.offset)
            for _ in range(n_experts if t.name in pieces else 1):
                stream.write(pieces.get(t.name, t.data))
        stream.truncate(len(head) + end)
    return n_experts


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of experts in the file")
    parser.add_argument("--json")
    parser.add_argument("--folder", help="for the model and the pack, instead of a temporary one")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "model.gguf"
        n = write_model(path, int(options.gib * 2**30))
        print(f"{path.stat().st_size / 2**30:.2f} GiB, {LAYERS} layers of {n} experts of {F} x {D}")
        for way, settings in WAYS.items():
            given = {
                k: str(Path(folder) / "pack") if v == "PACK" else v for k, v in settings.items()
            }
            command = [sys.executable, "-c", MEASURE, str(path), json.dumps(given)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[way] = line = json.loads(done.stdout)
            phases = ", ".join(
                f"{name} {p['bytes'] / 2**30:.2f} GiB in {p['seconds']:.1f} s"
                for name, p in line["phases"].items()
            )
            print(
                f"{way:13} {line['seconds']:5.1f} s  peak {line['peak'] / 2**30:.3f} GiB  planned "
                f"{line['planned'] / 2**30:.3f}  ratio {line['peak'] / line['planned']:.2f}  "
                f"{phases}",
                flush=True,
            )
    assert len({line["sum"] for line in found.values()}) == 1, "logits differ"
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
