"""Makes tests/fixtures: tiny GGUFs by llama.cpp's own converter, and reference numbers.

    npm install node-llama-cpp@3.22.1      (holds the source of llama.cpp 0.5.0 as a git bundle)
    python scripts/make_fixtures.py --npm <folder with node_modules> --work <scratch folder>

The checkpoints and numbers come from tests/oracle (torch 2.13.0, transformers 5.24.0, seed 22); the
converter runs in a child process. Needs git. Run it from the repository's root with the test
dependencies installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.oracle import FAMILIES, Options, make
from tests.unpack import pack

FIXTURES = Path("tests/fixtures")
BUNDLE = Path("node_modules/node-llama-cpp/llama/gitRelease.bundle")
# (family, file stem, converter's type, options of the oracle)
EXTRA = (
    ("gpt_oss", "mxfp4", "bf16", Options(storage="mxfp4")),
    ("qwen4_exp", "q8_0", "q8_0", Options()),
    ("qwen3_moe", "q8_0", "q8_0", Options()),
    ("qwen3_5_moe", "fused", "bf16", Options()),
)


def jobs() -> Iterator[tuple[str, str, str, Options]]:
    """Every fixture: family, file stem, converter's type, oracle options."""
    for family in FAMILIES:
        yield family, "bf16", "bf16", Options()
    yield from EXTRA


def main() -> None:
    """Make all fixtures."""
    if sys.argv[1:2] == ["--convert"]:
        convert(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--npm", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    source = args.work / "llama.cpp"
    if not source.exists():
        subprocess.run(["git", "clone", "-q", str(args.npm / BUNDLE), str(source)], check=True)
    for family, stem, kind, options in jobs():
        checkpoint = args.work / f"{family}-{stem}"
        reference = make(family, checkpoint, options)
        target = FIXTURES / family / f"{stem}.gguf"
        target.parent.mkdir(parents=True, exist_ok=True)
        run_converter(source, checkpoint, target, kind, fused=stem == "fused")
        pack(target)
        if stem in ("bf16", "mxfp4"):
            reference.save(FIXTURES / family / f"{stem}.npz")
        print(f"{target}: {target.stat().st_size:,} bytes, comparable to {reference.comparable()}")
        shutil.rmtree(checkpoint)


def run_converter(source: Path, checkpoint: Path, target: Path, kind: str, fused: bool) -> None:
    """llama.cpp's converter in a process of its own, with its own gguf package in front."""
    paths = os.pathsep.join([str(source / "gguf-py"), str(source)])
    command = [sys.executable, __file__, "--convert", str(checkpoint), str(target), kind]
    if fused:
        command.append("fused")
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"conversion of {checkpoint.name} failed: {done.stderr[-2000:]}")


def convert(checkpoint: str, target: str, kind: str, fused: str = "") -> None:
    """Run inside the child: the converter's main with a stand-in vocabulary."""
    import convert_hf_to_gguf as tool
    from conversion.base import ModelBase, TextModel

    pick: Callable[..., Any] = tool.get_model_class

    def get_model_class(*args: Any, **kwargs: Any) -> Any:
        chosen = pick(*args, **kwargs)
        give_vocabulary(TextModel)
        return chosen

    load = ModelBase.load_hparams

    def load_hparams(*args: Any, **kwargs: Any) -> Any:
        # transformers renames these layers on load, and the converter looks for the released name
        settings = load(*args, **kwargs)
        for part in (settings, settings.get("text_config") or {}):
            kinds = part.get("layer_types")
            if isinstance(kinds, list):
                part["layer_types"] = [
                    "full_attention" if k == "indexed_attention" else k for k in kinds
                ]
        return settings

    tool.get_model_class, ModelBase.load_hparams = get_model_class, staticmethod(load_hparams)
    model_type = json.loads((Path(checkpoint) / "config.json").read_text())["model_type"]
    sys.argv = ["convert", checkpoint, "--outfile", target, "--outtype", kind]
    if model_type in ("qwen3_next", "qwen3_5_moe_text"):
        sys.argv.append("--no-mtp")
    if fused:
        sys.argv += ["--fuse-gate-up-exps", "--fuse-qkv"]
    tool.main()


def give_vocabulary(cls: Any) -> None:
    """Replace how a class and all below it read a tokenizer: the checkpoints have none."""
    if "set_vocab" in cls.__dict__:
        cls.set_vocab = stand_in_vocabulary
    for below in cls.__subclasses__():
        give_vocabulary(below)


def stand_in_vocabulary(model: Any) -> None:
    """Byte tokens first, then made-up ones; token 7 ends a text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    n, writer = model.hparams["vocab_size"], model.gguf_writer
    byte_tokens = list(bytes_to_unicode().values())
    tokens = byte_tokens + [f"tok{i}" for i in range(len(byte_tokens), n)]
    tokens[7] = "<eos>"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i == 7 else 1 for i in range(n)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(7)
    writer.add_bos_token_id(7)


if __name__ == "__main__":
    main()
