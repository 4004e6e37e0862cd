"""C16: older CPUs take the matching kernels, named in the log; forcing others is an error."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from strata.core.errors import SettingError
from strata.kernels.linear import linear, linear_contract
from strata.native import CpuPool, available_isas
from strata.native.extension import _native
from strata.native.isa import REQUIRED_FLAGS, pick_isa
from tests.kernels.test_linear import make_weight, same_bits

AVX2 = {"avx2", "fma", "f16c"}
FULL = set().union(*REQUIRED_FLAGS.values())


def test_available_sets_follow_the_flags() -> None:
    """Pretended flags only take away. Expectation: the table of required flags."""
    assert available_isas(()) == ("portable",)
    assert available_isas({"avx2", "fma"}) == ("portable",)
    here = available_isas()
    assert here[0] == "portable" and available_isas(FULL) == here
    if "avx2" in here:
        assert available_isas(AVX2) == ("portable", "avx2")


def test_every_set_is_built_on_x86() -> None:
    """Expectation: one object per set wherever the processor family has it; an old compiler leaves
    AVX-VNNI out."""
    if _native.cpu_flags():
        assert {"avxvnni", *_native.built_isas()} == set(REQUIRED_FLAGS)


@pytest.mark.parametrize(("flags", "isa"), [(AVX2, "avx2"), (set(), "portable")])
def test_matching_set_is_chosen_and_logged(
    flags: set[str], isa: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without AVX-512, then without AVX2; rows equal the contract, near the plain product."""
    if not flags <= set(_native.cpu_flags()):
        pytest.skip(f"this processor lacks {flags}")
    with caplog.at_level(logging.INFO, "strata.native"):
        pool = CpuPool(2, flags=flags)
    assert pool.isa == isa
    assert f"CPU kernels: {isa} " in caplog.text
    w = make_weight("Q8_0", 40, 320, np.random.default_rng(2))
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((3, 320)).astype(np.float32))
    y = pool.linear(w, x)
    pool.close()
    same_bits(y, linear_contract(x, w))
    plain = linear(x, w, torch.float64)
    assert (y - plain).abs().max() <= 0.02 * plain.abs().max()


def test_forcing_what_cannot_run_is_an_error_before_any_work() -> None:
    """Expectation: C16; the message names what there is."""
    with pytest.raises(SettingError, match="avx512 cannot run here.*portable, avx2"):
        pick_isa("avx512", ("portable", "avx2"))
    with pytest.raises(SettingError, match="avx2 cannot run here.* portable; use"):
        CpuPool(2, isa="avx2", flags=())
    with pytest.raises(SettingError, match="unknown CPU instruction set 'sse9'.*auto, portable"):
        CpuPool(2, isa="sse9")
