"""Loading: every file tensor accounted for, every weight filled, nothing narrowed.

Expectations: the files themselves (a changed copy must behave as the change says), and plain
arithmetic on their bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import open_checkpoint
from strata.kernels.weight import ShardedWeight, Weight
from strata.models.inventory import inventory
from strata.models.registry import find_family
from strata.models.roles import Roles
from strata.models.weights import LoadReport, load_weights, plan_weights
from tests.formats.gguf_writer import F32, Tensor
from tests.models.edited import Tensors, edit_folder, edit_gguf
from tests.models.plain_forward import forward
from tests.oracle import Options, cached

FIXTURES = Path(__file__).parent.parent / "fixtures"
QWEN3 = FIXTURES / "qwen3_moe" / "bf16.gguf"


def plan(path: Path) -> LoadReport:
    """Names, shapes and types of a checkpoint checked."""
    with open_checkpoint(path) as ckpt:
        family = find_family(ckpt)
        spec = family.spec(ckpt)
        experts = family.expert_source(ckpt, spec)
        return plan_weights(ckpt, spec, family.sources(ckpt, spec), experts)


def names(path: Path) -> set[str]:
    """Tensor names of a checkpoint."""
    with open_checkpoint(path) as ckpt:
        return set(ckpt.tensors)


def load(path: Path, copy: bool) -> Roles:
    """All roles of a checkpoint."""
    with open_checkpoint(path) as ckpt:
        family = find_family(ckpt)
        spec = family.spec(ckpt)
        return load_weights(ckpt, spec, family.sources(ckpt, spec), copy=copy)


def test_embedding_under_another_name(tmp_path: Path) -> None:
    """C07: both lists, and no word of damage, for GGUF and safetensors."""

    def rename(tensors: Tensors) -> Tensors:
        tensors["model.word_vectors.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    folder = edit_folder(cached("qwen3_moe")[0], tmp_path / "hf", rename)
    gguf = edit_gguf(
        QWEN3, tmp_path / "a.gguf", rename=lambda n: n.replace("token_embd", "word_vectors")
    )
    pairs = {folder: "model.embed_tokens.weight", gguf: "token_embd.weight"}
    for path, expected in pairs.items():
        with pytest.raises(UnsupportedError) as caught:
            plan(path)
        text = str(caught.value)
        assert f"1 weight nobody filled: embed (from {expected})" in text
        assert "1 file tensor nobody used:" in text and "word_vectors.weight" in text
        assert "damage" not in text and "corrupt" not in text and "\n" not in text


def test_missing_expert_and_extra_tensor(tmp_path: Path) -> None:
    """One expert's matrix is missing, one unknown tensor is there: both named."""

    def change(tensors: Tensors) -> Tensors:
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.1.mlp.experts.5.mystery"] = torch.zeros(2, 2)
        return tensors

    folder = edit_folder(cached("qwen3_moe")[0], tmp_path / "hf", change)
    with pytest.raises(UnsupportedError) as caught:
        plan(folder)
    assert "routed experts (from model.layers.1.mlp.experts.5.up_proj.weight)" in str(caught.value)
    assert "nobody used: model.layers.1.mlp.experts.5.mystery" in str(caught.value)


def test_head_missing_only_when_tied(tmp_path: Path) -> None:
    """C07: a head may only be missing when tied; logits equal those of a copy stored twice."""
    untied, _ = cached("qwen3_moe")

    def drop(tensors: Tensors) -> Tensors:
        del tensors["lm_head.weight"]
        return tensors

    with pytest.raises(UnsupportedError, match=r"head \(from lm_head\.weight\)"):
        plan(edit_folder(untied, tmp_path / "untied", drop))
    tied, reference = cached("qwen2")

    def twice(tensors: Tensors) -> Tensors:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    assert "lm_head.weight" not in names(tied)
    stored_twice = edit_folder(tied, tmp_path / "twice", twice)
    ids = reference.input_ids[:20].tolist()
    assert np.array_equal(forward(tied, ids), forward(stored_twice, ids))


@pytest.mark.parametrize(
    "name, found, expected",
    [
        ("model.layers.0.self_attn.q_proj.weight", (60, 32), (64, 32)),
        ("model.layers.1.input_layernorm.weight", (31,), (32,)),
        ("model.layers.2.mlp.experts.3.down_proj.weight", (32, 16), (32, 32)),
    ],
)
def test_wrong_shapes_name_both(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], tmp_path: Path
) -> None:
    """A dense matrix, a norm and an expert of the wrong shape: both shapes stand in the message."""

    def change(tensors: Tensors) -> Tensors:
        return tensors | {name: torch.zeros(found, dtype=torch.bfloat16)}

    folder = edit_folder(cached("qwen3_moe")[0], tmp_path, change)
    with pytest.raises(FormatError) as caught:
        plan(folder)
        load(folder, copy=False)
    assert f"{name} has shape {list(found)}" in str(caught.value)
    assert str(list(expected)) in str(caught.value)


def test_mixed_float_formats(tmp_path: Path) -> None:
    """C08: BF16, F16 and F32 in one file, with a BF16 weight of 100,000, against a float32 copy."""
    source, reference = cached("qwen3_moe")
    big = 1e5

    def mix(tensors: Tensors) -> Tensors:
        tensors["model.layers.0.mlp.gate.weight"][0, 0] = big
        for i, name in enumerate(sorted(tensors)):
            if "gate.weight" not in name and "experts" not in name:
                dtype = (torch.bfloat16, torch.float16, torch.float32)[i % 3]
                tensors[name] = tensors[name].to(dtype)
        return tensors

    def widen(tensors: Tensors) -> Tensors:
        return {name: t.to(torch.float32) for name, t in mix(tensors).items()}

    mixed, wide = (
        edit_folder(source, tmp_path / "mixed", mix),
        edit_folder(source, tmp_path / "wide", widen),
    )
    counts = plan(mixed).tensors_by_type
    assert set(counts) == {"BF16", "F16", "F32"}
    assert sum(counts.values()) == len(names(mixed))
    router = load(mixed, copy=True)["layers.0.moe.router"]
    assert isinstance(router, Weight) and router.type == "BF16"
    assert float(router.data[0].view(torch.bfloat16)[0]) == 99840.0  # 100,000 rounded to bfloat16
    ids = reference.input_ids[:30].tolist()
    narrow, full = forward(mixed, ids), forward(wide, ids)
    assert np.isfinite(narrow).all()
    assert np.abs(narrow - full).max() <= 1e-6 * np.abs(full).max()


def test_views_and_copies_hold_the_file_s_bytes() -> None:
    """Not copied: the mapping's own memory; copied: equal bytes elsewhere, in the file's type."""
    with open_checkpoint(QWEN3) as ckpt:
        family = find_family(ckpt)
        spec = family.spec(ckpt)
        sources = family.sources(ckpt, spec)
        views = load_weights(ckpt, spec, sources, copy=False)
        copies = load_weights(ckpt, spec, sources, copy=True)
        for role, name in {"embed": "token_embd", "layers.1.attn.o": "blk.1.attn_output"}.items():
            raw = ckpt.rows(name + ".weight")
            view, copy = views[role], copies[role]
            assert isinstance(view, Weight) and isinstance(copy, Weight)
            assert view.type == copy.type == "BF16"
            assert view.data.data_ptr() == raw.ctypes.data != copy.data.data_ptr()
            assert np.array_equal(copy.data.numpy(), raw)


def test_plan_counts_bytes_as_loaded() -> None:
    """The planned bytes equal those of the loaded weights, file by file."""
    for path in sorted(FIXTURES.glob("*/*.gguf")):
        report, roles = plan(path), load(path, copy=True)
        on_disk = {w.role for w in report.planned if w.on_disk}
        assert {w.role for w in report.planned} == set(roles)
        sizes = {
            role: w.n_bytes if isinstance(w, Weight) else w.numel() * w.element_size()
            for role, w in roles.items()
        }
        assert report.dense_bytes == sum(n for role, n in sizes.items() if role not in on_disk)
        assert report.on_disk_bytes == sum(n for role, n in sizes.items() if role in on_disk)


def test_every_role_has_its_shape() -> None:
    """The inventory, made from the spec, against what llama.cpp's converter stored."""
    for path in sorted(FIXTURES.glob("*/bf16.gguf")):
        with open_checkpoint(path) as ckpt:
            family = find_family(ckpt)
            spec = family.spec(ckpt)
            roles = load_weights(ckpt, spec, family.sources(ckpt, spec), copy=False)
        for name, role in inventory(spec).items():
            found = roles[name]
            shape = (
                (found.n_rows, found.n_cols) if isinstance(found, Weight) else tuple(found.shape)
            )
            assert shape == role.shape or (role.padded and shape[0] >= role.shape[0]), name


def test_table_shards_are_joined_by_number(tmp_path: Path) -> None:
    """An n-gram table stored in 12 shards (so that names sort otherwise) against one tensor."""
    source, _ = cached("qwen4_exp")
    stem = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."

    def joined(tensors: Tensors) -> torch.Tensor:
        return torch.cat([tensors.pop(f"{stem}shard_{i}.weight") for i in range(4)])

    def whole(tensors: Tensors) -> Tensors:
        return {f"{stem}weight": joined(tensors)} | tensors

    def twelve(tensors: Tensors) -> Tensors:
        parts = joined(tensors).chunk(12)
        return tensors | {f"{stem}shard_{i}.weight": p.clone() for i, p in enumerate(parts)}

    one = load(edit_folder(source, tmp_path / "one", whole), copy=True)["layers.1.ngram.table"]
    many = load(edit_folder(source, tmp_path / "12", twelve), copy=True)["layers.1.ngram.table"]
    assert isinstance(one, Weight) and isinstance(many, ShardedWeight)
    assert (one.n_rows, one.n_bytes) == (many.n_rows, many.n_bytes)
    ids = torch.randint(0, one.n_rows, (200,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(one.rows(ids), many.rows(ids))

    def gap(tensors: Tensors) -> Tensors:
        del tensors[f"{stem}shard_2.weight"]
        return tensors

    with pytest.raises(UnsupportedError, match=r"ngram\.table \(from .*shard_2"):
        plan(edit_folder(source, tmp_path / "gap", gap))


def test_known_but_unused_tensors_are_listed(tmp_path: Path) -> None:
    """Draft weights, vision tower and stored frequencies are listed with a reason."""

    def add(tensors: Tensors) -> Tensors:
        return tensors | {
            "model.visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4),
            "model.language_model.rotary_emb.inv_freq": torch.zeros(4),
        }

    report = plan(edit_folder(cached("qwen4_exp")[0], tmp_path / "hf", add))
    reasons = {name.split(".")[0] + name.split(".")[1]: r for name, r in report.unused.items()}
    assert len([n for n in report.unused if n.startswith("mtp.")]) == 31
    assert "vision" in reasons["modelvisual"] and "frequencies" in reasons["modellanguage_model"]
    assert set(report.read.values()) == {"n-gram hash constants"}
    assert any("31 tensors not used" in line for line in report.lines())


def test_draft_layers_of_a_gguf_are_not_needed(tmp_path: Path) -> None:
    """A NextN layer behind the trunk is listed; without the key that declares it, it is unknown."""
    nextn = tuple(
        Tensor(f"blk.3.{name}.weight", (2, 2), F32, bytes(16))
        for name in ("nextn.eh_proj", "attn_q", "ffn_gate_exps")
    )
    keys = {"qwen3moe.block_count": ("u32", 4), "qwen3moe.nextn_predict_layers": ("u32", 1)}
    report = plan(edit_gguf(QWEN3, tmp_path / "a.gguf", keys, extra=nextn))
    assert sorted(report.unused) == sorted(t.name for t in nextn)
    with pytest.raises(UnsupportedError, match=r"3 file tensors nobody used: .*nextn\.eh_proj"):
        plan(edit_gguf(QWEN3, tmp_path / "b.gguf", extra=nextn))


def test_integers_are_no_weights(tmp_path: Path) -> None:
    """A matrix stored as integers is refused by name and type."""
    name = "model.layers.0.self_attn.q_proj.weight"

    def change(tensors: Tensors) -> Tensors:
        return tensors | {name: tensors[name].to(torch.int32)}

    folder = edit_folder(cached("qwen3_moe")[0], tmp_path / "hf", change)
    with pytest.raises(UnsupportedError, match=rf"{name} is I32"):
        plan(folder)


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    """FP8 with no block scales beside it would be off by its scale: refused by name."""
    options = Options(storage="fp8", sizes={"h": 128, "inter": 128, "e": 4, "k": 2}, n_tokens=40)
    name = "model.layers.0.self_attn.q_proj.weight"

    def change(tensors: Tensors) -> Tensors:
        del tensors[name + "_scale_inv"]
        return tensors

    folder = edit_folder(cached("qwen3_moe", options)[0], tmp_path / "hf", change)
    with pytest.raises(UnsupportedError, match=rf"{name} is FP8 but there is no {name}_scale_inv"):
        plan(folder)


def test_nvfp4_matrix_carries_its_tensor_scale(tmp_path: Path) -> None:
    """A dense NVFP4 matrix and the ".scale" tensor llama.cpp puts beside it; 1 without one."""
    rows = np.random.default_rng(1).bytes(32 * 36)
    matrix = Tensor("blk.0.attn_output.weight", (64, 32), 40, rows)
    scale = Tensor("blk.0.attn_output.scale", (1,), F32, np.float32(0.37).tobytes())
    activation = Tensor("blk.0.attn_output.input_scale", (1,), F32, bytes(4))

    def drop(name: str) -> str | None:
        return None if name == matrix.name else name

    for i, (extra, expected) in enumerate(
        [((matrix,), 1.0), ((matrix, scale, activation), float(np.float32(0.37)))]
    ):
        path = edit_gguf(QWEN3, tmp_path / f"{i}.gguf", rename=drop, extra=extra)
        report = plan(path)
        assert list(report.unused) == ([activation.name] if len(extra) == 3 else [])
        found = load(path, copy=True)["layers.0.attn.o"]
        assert isinstance(found, Weight) and found.type == "NVFP4"
        assert found.scale == expected and found.data.numpy().tobytes() == rows
