"""Where each weight comes from in the file, as data: role -> Source.

Knows no checkpoint and reads nothing.

A Source never widens a matrix: its rows keep the file's own type, and the only things done to them
are choosing rows and laying matrices on top of one another. Numbers that are not matrix rows
(norms, taps, decays) become tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Take:
    """Rows to take, in this order, out of a matrix that must have ``of`` rows."""

    rows: NDArray[np.int64]
    of: int


@dataclass(frozen=True)
class Rows:
    """A matrix: the rows of one or several file tensors on top of one another (3-D: all rows).

    on_disk: stays a view of the file whatever the loader is asked to copy.
    """

    tensors: tuple[str, ...]
    take: Take | None = None
    on_disk: bool = False


@dataclass(frozen=True)
class Values:
    """Numbers: one file tensor in f32 and in its file shape, passed through ``via``.

    The result must have the role's shape up to axes of length 1.
    """

    tensor: str
    via: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The file tensors, as for Rows."""
        return (self.tensor,)


Source: TypeAlias = Rows | Values


@dataclass(frozen=True)
class Sources:
    """What one checkpoint offers for a model.

    roles: role -> Source. read: file tensors that were read while the spec was made, with what they
    gave. unused: (regular expression for whole tensor names, reason) of tensors that are known and
    not needed.
    """

    roles: Mapping[str, Source]
    read: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[tuple[str, str], ...] = ()


def one_plus(weight: torch.Tensor) -> torch.Tensor:
    """Centered norms are stored as an offset from 1."""
    return weight + 1.0


def negative_exp(a_log: torch.Tensor) -> torch.Tensor:
    """Decay rate from its stored logarithm."""
    return -torch.exp(a_log)
