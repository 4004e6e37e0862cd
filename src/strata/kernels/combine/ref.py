"""Weighted sum of expert rows in plain torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def combine(
    rows_RD: torch.Tensor,
    weight_TK: torch.Tensor,
    valid_R: torch.Tensor | None = None,
    shared_TD: torch.Tensor | None = None,
    out_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of each token's rows in rank order: [T, D] in the dtype of rows_RD.

    valid_R: bool [R], False for rows nobody computed (they may hold anything); None: all are valid.
    shared_TD: the shared expert's result, the sum's start; left unchanged.
    """
    n_tokens, n_active = weight_TK.shape
    rows_TKD = rows_RD.view(n_tokens, n_active, rows_RD.shape[1])
    weight_TK = weight_TK.to(rows_RD.dtype)
    if shared_TD is None:
        acc_TD = rows_RD.new_zeros(n_tokens, rows_RD.shape[1])
    else:
        acc_TD = shared_TD.to(rows_RD.dtype)
    for j in range(n_active):
        # multiplication and addition are two kernels, hence two roundings
        added = acc_TD + weight_TK[:, j, None] * rows_TKD[:, j]
        if valid_R is None:
            acc_TD = added
        else:
            acc_TD = torch.where(valid_R.view(n_tokens, n_active)[:, j, None], added, acc_TD)
    return acc_TD if out_TD is None else out_TD.copy_(acc_TD)


def combine_all(
    rows_RD: torch.Tensor,
    weight_TK: torch.Tensor,
    shared_TD: torch.Tensor | None,
    out_TD: torch.Tensor,
) -> None:
    """``combine`` of rows that are all valid, into out."""
    combine(rows_RD, weight_TK, None, shared_TD, out_TD)


def copy_rows(
    index_n: npt.NDArray[np.int32], source_RD: torch.Tensor, out_RD: torch.Tensor
) -> None:
    """out[i] = source[i] for every i of the index."""
    index = torch.from_numpy(index_n).long()
    out_RD[index] = source_RD[index]
