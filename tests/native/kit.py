"""Pools for the native tests, and expert batches with the rows they must give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from strata.kernels.expert_rows import ExpertShape, expert_rows_contract
from strata.native import CpuPool, available_isas
from tests.kernels.test_expert_rows import fill

ISAS = available_isas()


@cache
def pool(isa: str = "auto", workers: int = 2) -> CpuPool:
    """One pool per kind for all tests; pools end with the interpreter."""
    return CpuPool(workers, isa=isa)


@dataclass
class Batch:
    """Arguments of submit_experts, and the blobs kept alive."""

    shape: ExpertShape
    blobs: list[torch.Tensor]
    expert: np.ndarray
    address: np.ndarray
    start: np.ndarray
    row: np.ndarray
    token: np.ndarray
    x_TD: torch.Tensor

    @property
    def n_rows(self) -> int:
        return len(self.row)

    def out(self) -> torch.Tensor:
        """Rows full of NaN, so that a row left out shows."""
        return torch.full((self.n_rows, self.shape.d_model), float("nan"))

    def submit(self, pool: CpuPool, out_RD: torch.Tensor, late: bool = False) -> int:
        return pool.submit_experts(
            self.shape, self.x_TD, self.address, self.start, self.row, self.token, out_RD, late
        )

    def run(self, pool: CpuPool) -> torch.Tensor:
        out = self.out()
        pool.wait(self.submit(pool, out))
        return out

    def expected(self) -> torch.Tensor:
        """Every row by the contract's reference, expert by expert."""
        out = self.out()
        for g, expert in enumerate(self.expert):
            entries = slice(int(self.start[g]), int(self.start[g + 1]))
            rows = torch.from_numpy(self.row[entries].astype(np.int64))
            x = self.x_TD[torch.from_numpy(self.token[entries].astype(np.int64))]
            out[rows] = expert_rows_contract(self.shape, self.blobs[int(expert)], x)
        return out


def make_batch(
    shape: ExpertShape, n_experts: int, n_tokens: int, per_token: int, seed: int = 0
) -> Batch:
    """per_token random distinct experts a token, as the plan op groups them."""
    rng = np.random.default_rng(seed)
    blobs = [fill(shape, rng)[0] for _ in range(n_experts)]
    chosen = np.stack([rng.permutation(n_experts)[:per_token] for _ in range(n_tokens)]).reshape(-1)
    order = np.argsort(chosen, kind="stable").astype(np.int32)
    expert, first = np.unique(chosen[order], return_index=True)
    return Batch(
        shape,
        blobs,
        expert,
        np.array([blobs[e].data_ptr() for e in expert], np.int64),
        np.append(first, len(order)).astype(np.int32),
        order,
        (order // per_token).astype(np.int32),
        torch.from_numpy(rng.standard_normal((n_tokens, shape.d_model)).astype(np.float32)),
    )
