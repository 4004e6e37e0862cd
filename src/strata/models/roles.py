"""Looking up the weights of a part by role, with the shape that the spec demands.

Knows no files. A role that is missing or has another shape than the spec implies is refused with
both shapes (FormatError).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from strata.core.errors import FormatError
from strata.kernels.weight import Weight

Roles = Mapping[str, Weight | torch.Tensor]
"""Role name -> matrix, or tensor for norms, biases and small tables."""

_ADVICE = "config and weights belong to different models, or a file is missing"


def rows_matrix(roles: Roles, role: str, n_rows: int) -> Weight:
    """The matrix of that role with n_rows rows of any width."""
    found = roles.get(role)
    if not isinstance(found, Weight):
        raise FormatError(f"the weights have no matrix {role} of {n_rows} rows; {_ADVICE}")
    return matrix(roles, role, n_rows, found.n_cols)


def matrix(roles: Roles, role: str, n_rows: int, n_cols: int) -> Weight:
    """The matrix of that role and shape."""
    found = roles.get(role)
    if not isinstance(found, Weight):
        raise FormatError(f"the weights have no matrix {role} [{n_rows}, {n_cols}]; {_ADVICE}")
    if (found.n_rows, found.n_cols) != (n_rows, n_cols):
        raise FormatError(
            f"{role} has shape [{found.n_rows}, {found.n_cols}], the config implies "
            f"[{n_rows}, {n_cols}]; {_ADVICE}"
        )
    return found


def vector(roles: Roles, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The plain tensor of that role and shape (any number of axes), widened to dtype."""
    found = roles.get(role)
    if not isinstance(found, torch.Tensor):
        raise FormatError(f"the weights have no tensor {role} {list(shape)}; {_ADVICE}")
    if tuple(found.shape) != shape:
        raise FormatError(
            f"{role} has shape {list(found.shape)}, the config implies {list(shape)}; {_ADVICE}"
        )
    return found.to(dtype)
