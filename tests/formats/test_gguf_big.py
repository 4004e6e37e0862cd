"""Real vocabularies are big: opening must not decode them (C03 c and the opening-time target)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tests.formats.gguf_writer import f32_tensor, gguf_bytes

from strata.formats.checkpoint import open_checkpoint
from strata.formats.string_array import StringArray


@pytest.mark.parametrize(("n_tokens", "n_merges"), [(250_000, 250_000), (400_000, 600_000)])
def test_big_vocabulary(tmp_path: Path, n_tokens: int, n_merges: int) -> None:
    # C03 (c): counts are right and the key behind the arrays has its true value. The target for
    # opening is 1.5 s at 250,000 + 250,000; the bound is generous because machines are shared.
    tokens = [b"tok%d" % i for i in range(n_tokens)]
    merges = [b"a%d b%d" % (i, i) for i in range(n_merges)]
    path = tmp_path / "big.gguf"
    keys = [
        ("tokenizer.ggml.tokens", "array", ("str", tokens)),
        ("tokenizer.ggml.token_type", "array", ("i32", [1] * n_tokens)),
        ("tokenizer.ggml.merges", "array", ("str", merges)),
        ("tokenizer.ggml.eos_token_id", "u32", 4242),
    ]
    path.write_bytes(gguf_bytes(keys, [f32_tensor(f"blk.{i}.w", 8) for i in range(1224)]))

    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        seconds = time.perf_counter() - started
        read_tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
        read_merges = checkpoint.metadata["tokenizer.ggml.merges"]
        assert isinstance(read_tokens, StringArray) and isinstance(read_merges, StringArray)
        assert (len(read_tokens), len(read_merges)) == (n_tokens, n_merges)
        assert checkpoint.metadata["tokenizer.ggml.eos_token_id"] == 4242
        assert len(np.asarray(checkpoint.metadata["tokenizer.ggml.token_type"])) == n_tokens
        assert len(checkpoint.tensors) == 1224
        started = time.perf_counter()
        assert read_tokens.tolist() == [token.decode() for token in tokens]
        assert read_merges[-1] == merges[-1].decode()
        decoding = time.perf_counter() - started
    print(f"{n_tokens} + {n_merges}: opened in {seconds:.3f} s, tokens decoded in {decoding:.3f} s")
    assert seconds < 6
