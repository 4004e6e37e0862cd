"""The Checkpoint face: numbers of every kind, neighbours, refusals (C05, C06, C08), closing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.formats.gguf_writer import BF16, F16, Q8_0, Tensor, f32_tensor, gguf_bytes
from tests.formats.safetensors_writer import Entry, f32, safetensors_bytes

from strata.core.errors import FormatError, InputError, UnsupportedError
from strata.formats.checkpoint import Checkpoint, open_checkpoint


def gguf_file(folder: Path, *tensors: Tensor, keys: Any = ()) -> Path:
    """A GGUF file of these tensors."""
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(keys, tensors))
    return path


def model_folder(folder: Path, tensors: dict[str, Entry], config: dict[str, Any]) -> Path:
    """A Hugging Face style folder."""
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(path: Path, error: type[Exception]) -> str:
    """The one-line message of this error for ``path``."""
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert type(caught.value) is error and str(path) in message and "\n" not in message
    return message


def test_bfloat16_float16_float32_mixed(tmp_path: Path) -> None:
    # C08: written by torch; 100,000 is beyond float16 and must survive, counts are per format
    tensors = {
        "brain": torch.tensor([100_000.0, -0.0, 3.0e38]).to(torch.bfloat16),
        "half": torch.tensor([[1.5], [-65504.0]]).to(torch.float16),
        "full": torch.tensor([0.1, 1e-40]),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "more": torch.ones(2, 2, dtype=torch.bfloat16),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with open_checkpoint(path) as checkpoint:
        for name, tensor in tensors.items():
            read = checkpoint.float32(name)
            assert read.dtype == np.float32 and read.flags.writeable
            assert read.tobytes() == tensor.float().numpy().tobytes(), name
            assert read.shape == tuple(tensor.shape)
        assert abs(float(checkpoint.float32("brain")[0]) - 100_000) < 400
        assert checkpoint.dtype_counts() == {"BF16": 2, "F16": 1, "F32": 1, "F64": 1}


def test_fp8_bytes_are_widened_exactly(tmp_path: Path) -> None:
    # expectation: torch's own float8 types, all 256 codes of each
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    tensors = {
        "e4m3": codes.view(torch.float8_e4m3fn).reshape(2, 128),
        "e5m2": codes.clone().view(torch.float8_e5m2),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with open_checkpoint(path) as checkpoint:
        for name, tensor in tensors.items():
            expected = tensor.float().numpy()
            assert np.array_equal(checkpoint.float32(name), expected, equal_nan=True)


def test_gguf_types_and_rows(tmp_path: Path) -> None:
    # expectation: Q8_0 = f16 scale, then 32 int8 codes; value = scale * code (ggml)
    codes = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    blocks = b"".join(
        np.float16(s).tobytes() + c.tobytes() for s, c in zip((0.5, 2), codes, strict=True)
    )
    path = gguf_file(
        tmp_path,
        Tensor("experts", (32, 1, 2), Q8_0, blocks),
        Tensor("brain", (2,), BF16, np.array([0x47C3, 0x3F80], "<u2").tobytes()),
        Tensor("half", (2, 1), F16, np.array([1.5, -2], "<f2").tobytes()),
        Tensor("ids", (3,), 26, np.array([1, -2, 3], "<i4").tobytes()),
        Tensor("one", (), 0, np.float32(9).tobytes()),
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "gguf" and checkpoint.config == {}
        assert checkpoint.tokenizer_files == {} and checkpoint.generation_config == {}
        expected = codes.astype(np.float32) * np.array([[0.5], [2.0]], np.float32)
        assert checkpoint.float32("experts").tolist() == expected.reshape(2, 1, 32).tolist()
        rows = checkpoint.rows("experts")
        assert rows.shape == (2, 34) and rows.tobytes() == blocks
        assert checkpoint.float32("brain").tolist() == [99840.0, 1.0]
        assert checkpoint.float32("half").tolist() == [[1.5, -2.0]]
        assert checkpoint.array("ids").tolist() == [1, -2, 3]
        assert checkpoint.rows("one").shape == (1, 4) and checkpoint.float32("one") == 9
        with pytest.raises(UnsupportedError, match=r"holds integers \(I32\)"):
            checkpoint.float32("ids")
        with pytest.raises(UnsupportedError, match="Q8_0"):
            checkpoint.array("experts")
        with pytest.raises(InputError, match="no tensor 'absent'"):
            checkpoint.raw("absent")


def test_views_are_read_only_and_not_copies(tmp_path: Path) -> None:
    # expectation: numpy's own report of memory; two views of one tensor share it
    with open_checkpoint(gguf_file(tmp_path, f32_tensor("w", 4, 8))) as checkpoint:
        raw, rows = checkpoint.raw("w"), checkpoint.rows("w")
        assert np.shares_memory(raw, rows) and np.shares_memory(raw, checkpoint.raw("w"))
        assert not raw.flags.writeable and not rows.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            raw[0] = 1


def test_closing(tmp_path: Path) -> None:
    # expectation: a clear error afterwards; views handed out stay valid, metadata stays readable
    path = gguf_file(
        tmp_path, f32_tensor("w", 8), keys=[("t", "array", ("str", ["a"])), ("n", "u32", 3)]
    )
    checkpoint = open_checkpoint(path)
    view = checkpoint.raw("w")
    checkpoint.close()
    checkpoint.close()
    for read in (checkpoint.raw, checkpoint.rows, checkpoint.float32):
        with pytest.raises(InputError, match="is closed"):
            read("w")
    assert view.view(np.float32).tolist() == list(range(8))
    assert checkpoint.metadata["n"] == 3 and list(checkpoint.metadata["t"]) == ["a"]  # type: ignore[call-overload]
    assert list(checkpoint.tensors) == ["w"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_no_file_stays_open(tmp_path: Path) -> None:
    # expectation: the system's list of open files, after success and after each kind of refusal
    good = gguf_file(tmp_path, f32_tensor("w", 8))
    (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:-8])
    (tmp_path / "odd.gguf").write_bytes(gguf_bytes([], [Tensor("t", (4,), 199, bytes(32))]))
    (tmp_path / "cut.safetensors").write_bytes(safetensors_bytes({"w": f32(8)})[:-8])
    before = len(os.listdir("/proc/self/fd"))
    errors = []
    for name in ("model.gguf", "cut.gguf", "odd.gguf", "cut.safetensors"):
        try:
            with open_checkpoint(tmp_path / name) as checkpoint:
                checkpoint.float32("w")
        except InputError as error:
            # kept with its frames, so that nothing is closed by the garbage collector alone
            errors.append(error)
    assert len(errors) == 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_unknown_and_retired_types_stop_loading(tmp_path: Path) -> None:
    # C05: all affected tensors are listed with their numbers; known ones are not
    path = gguf_file(
        tmp_path,
        f32_tensor("fine", 8),
        Tensor("odd", (64,), 199, bytes(64)),
        Tensor("old", (64,), 4, bytes(64)),
        Tensor("old.2", (64,), 36, bytes(64)),
        Tensor("activations", (64,), 15, bytes(64)),
    )
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    for words in (
        "4 tensors", "'odd' type 199 (unknown)", "'old' type 4 (retired: Q4_2)",
        "'old.2' type 36 (retired: IQ4_NL_4_4)", "'activations' type 15 (unsupported: Q8_K)",
    ):  # fmt: skip
        assert words in message
    assert "'fine'" not in message and "\n" not in message
    with open_checkpoint(path, for_inspection=True) as checkpoint:
        assert checkpoint.float32("fine").tolist() == list(range(8))
        with pytest.raises(UnsupportedError, match="199"):
            checkpoint.rows("odd")


def test_folder_with_descriptions(tmp_path: Path) -> None:
    # expectation: the files written; only those that exist are offered
    model_folder(tmp_path, {"w": f32(4)}, {"model_type": "tiny", "n": [1]})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.config == {"model_type": "tiny", "n": [1]}
            assert checkpoint.generation_config == {"eos_token_id": 2}
            assert checkpoint.tokenizer_files == {
                "tokenizer.json": tmp_path / "tokenizer.json",
                "chat_template.jinja": tmp_path / "chat_template.jinja",
            }
            assert checkpoint.root == tmp_path


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ' * 50_000, "\ufeff"])
def test_damaged_config(tmp_path: Path, text: str) -> None:
    # expectation: a broken description is named, not taken for an empty one
    model_folder(tmp_path, {"w": f32(4)}, {})
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refused(tmp_path, FormatError)


BF16_WEIGHT = {"w": Entry("BF16", [2, 2], bytes(8))}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "brand-new"}, "brand-new"),
        ({"bits": 4}, "without a quant_method"),
        ({"quant_method": "fp8"}, "128 x 128"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "128 x 128"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_quantizations_without_a_decoder(
    tmp_path: Path, claim: dict[str, Any], words: str, nested: bool
) -> None:
    # expectation: the names the packages write into config.json; refused by name, with the reason
    config: dict[str, Any] = {"quantization_config": claim}
    model_folder(tmp_path, BF16_WEIGHT, {"text_config": config} if nested else config)
    assert words in refused(tmp_path, UnsupportedError)
    open_checkpoint(tmp_path, for_inspection=True).close()


def test_other_marks_of_packed_weights(tmp_path: Path) -> None:
    # expectation: MLX's key in config.json; GPTQ's and AWQ's tensor names when the config is silent
    model_folder(tmp_path, BF16_WEIGHT, {"quantization": {"bits": 4, "group_size": 64}})
    assert "MLX" in refused(tmp_path, UnsupportedError)
    mlx = {"w": Entry("U32", [2], bytes(8))}
    model_folder(tmp_path, mlx, {"quantization": {"bits": 4, "group_size": 64}})
    assert "MLX" in refused(tmp_path, UnsupportedError)
    packed = {"l.qweight": Entry("I32", [2], bytes(8)), "l.scales": Entry("F16", [2], bytes(4))}
    model_folder(tmp_path, packed, {})
    assert "'l.qweight'" in refused(tmp_path, UnsupportedError)


@pytest.mark.parametrize("claim", [FP8, {"quant_method": "mxfp4"}])
def test_claim_of_quantization_with_plain_tensors(tmp_path: Path, claim: dict[str, Any]) -> None:
    # C06: the config claims 4 or 8 bit, the tensors are bfloat16: refused, not cast
    model_folder(tmp_path, BF16_WEIGHT, {"quantization_config": claim})
    assert "bfloat16" in refused(tmp_path, FormatError)
    model_folder(tmp_path, BF16_WEIGHT, {"quantization_config": None})
    open_checkpoint(tmp_path).close()


def test_four_bit_claim_with_plain_tensors_says_so(tmp_path: Path) -> None:
    # C06: also where the claimed method itself has no decoder
    claim = {"quant_method": "gptq", "bits": 4}
    model_folder(tmp_path, BF16_WEIGHT, {"quantization_config": claim})
    message = refused(tmp_path, UnsupportedError)
    assert "GPTQ" in message and "bfloat16" in message


def test_supported_quantizations_open(tmp_path: Path) -> None:
    # expectation: the layouts of block-FP8 checkpoints and of gpt-oss
    fp8 = {
        "w": Entry("F8_E4M3", [128, 128], bytes(128 * 128)),
        "w_scale_inv": Entry("F32", [1, 1], np.float32(2).tobytes()),
    }
    model_folder(tmp_path, fp8, {"quantization_config": FP8})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.dtype_counts() == {"F8_E4M3": 1, "F32": 1}
    mxfp4 = {
        "mlp.experts.down_proj_blocks": Entry("U8", [1, 2, 1, 16], bytes(32)),
        "mlp.experts.down_proj_scales": Entry("U8", [1, 2, 1], bytes(2)),
    }
    model_folder(tmp_path, mxfp4, {"quantization_config": {"quant_method": "mxfp4"}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.rows("mlp.experts.down_proj_blocks").shape == (2, 16)
    del mxfp4["mlp.experts.down_proj_scales"]
    model_folder(tmp_path, mxfp4, {"quantization_config": {"quant_method": "mxfp4"}})
    assert "_scales" in refused(tmp_path, FormatError)


def test_empty_folder_and_odd_paths(tmp_path: Path) -> None:
    # expectation: each names the path and what is wrong with it
    assert "holds no .gguf" in refused(tmp_path, FormatError)
    assert "does not exist" in refused(tmp_path / "absent", InputError)
    refused(tmp_path / ("x" * 5000), InputError)
    (tmp_path / "Q2_0").mkdir()
    gguf_file(tmp_path / "Q2_0", f32_tensor("w", 8))
    assert "Q2_0" in refused(tmp_path, FormatError)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    # expectation: opening a pipe would wait for a writer for ever
    os.mkfifo(tmp_path / "model.gguf")
    assert "neither a regular file" in refused(tmp_path / "model.gguf", FormatError)


def test_folder_with_both_formats(tmp_path: Path) -> None:
    # expectation: no guessing
    model_folder(tmp_path, {"w": f32(4)}, {})
    gguf_file(tmp_path, f32_tensor("w", 8))
    message = refused(tmp_path, FormatError)
    assert "model.gguf" in message and "model.safetensors" in message
    open_checkpoint(tmp_path / "model.gguf").close()


def test_folder_with_unrelated_ggufs(tmp_path: Path) -> None:
    # expectation: two quantizations in one folder; vision towers do not count
    for name in ("m-Q4_0.gguf", "mmproj-m.gguf", "MMPROJ-F16.gguf"):
        (tmp_path / name).write_bytes(gguf_bytes([], [f32_tensor("w", 8)]))
    open_checkpoint(tmp_path).close()
    (tmp_path / "m-Q8_0.gguf").write_bytes(gguf_bytes())
    message = refused(tmp_path, FormatError)
    assert "m-Q4_0.gguf" in message and "m-Q8_0.gguf" in message and "mmproj" not in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "y.ckpt"])
def test_pickles(tmp_path: Path, name: str) -> None:
    # expectation: never opened, by file or by folder
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert "pickle" in refused(tmp_path / name, UnsupportedError)
    assert "pickle" in refused_folder(tmp_path)
    hidden = (tmp_path / name).rename(tmp_path / "model.safetensors")
    assert "pickle" in refused(hidden, UnsupportedError)


def refused_folder(folder: Path) -> str:
    """The message of the UnsupportedError for a folder."""
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def test_lora_adapters(tmp_path: Path) -> None:
    # expectation: the names the adapter packages use, and general.type of a GGUF adapter
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes({"a": f32(2)}))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA" in refused_folder(tmp_path)
    assert "LoRA" in refused(tmp_path / "adapter_model.safetensors", UnsupportedError)
    keys = [("general.type", "str", "adapter"), ("general.architecture", "str", "llama")]
    path = gguf_file(tmp_path, f32_tensor("w", 8), keys=keys)
    assert "LoRA" in refused(path, UnsupportedError)
    open_checkpoint(path, for_inspection=True).close()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([("general.architecture", "str", "clip")], "vision tower"),
        ([("general.type", "str", "mmproj")], "vision tower"),
        ([("general.type", "str", "imatrix")], "importance matrix"),
    ],
)
def test_ggufs_that_are_no_language_model(tmp_path: Path, keys: Any, words: str) -> None:
    # expectation: what llama.cpp's converter writes into such files
    path = gguf_file(tmp_path, f32_tensor("w", 8), keys=keys)
    assert words in refused(path, UnsupportedError)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    # expectation: the text Git LFS leaves when the content was not fetched
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    assert "git lfs pull" in refused(path, FormatError)


def test_file_of_another_kind(tmp_path: Path) -> None:
    # expectation: neither format's first bytes
    path = tmp_path / "notes.txt"
    path.write_text("just some text about models")
    assert "neither GGUF nor safetensors" in refused(path, FormatError)


def test_content_decides_where_the_name_says_nothing(tmp_path: Path) -> None:
    # expectation: download caches name files by their hash
    blob = tmp_path / "d34db33f"
    blob.write_bytes(gguf_bytes([], [f32_tensor("w", 8)]))
    with open_checkpoint(blob) as checkpoint:
        assert checkpoint.format == "gguf"
    blob.write_bytes(safetensors_bytes({"w": f32(4)}))
    with open_checkpoint(str(blob)) as checkpoint:
        assert isinstance(checkpoint, Checkpoint) and checkpoint.format == "safetensors"
