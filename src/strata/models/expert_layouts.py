"""The ways in which files store the routed experts of one layer.

PerExpert    one 2-D tensor per expert and projection
Stacked      one 3-D tensor [E, rows, cols] per projection (GGUF)
FusedGateUp  gate and up in one 3-D tensor [E, 2F, D], gate rows first
GptOssFloat  input axis first: gate and up [E, D, 2F], columns taking turns; down [E, F, D]
GptOssMxfp4  packed: *_blocks [E, rows, cols/32, 16] and *_scales, gate and up rows taking turns
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import UnsupportedError
from strata.formats.checkpoint import Checkpoint
from strata.formats.quants import mxfp4_from_gptoss
from strata.models.file_rows import (
    companions,
    float_row,
    matrix_rows,
    row_bytes,
    row_type,
    shape_error,
    tensor_scale,
)

Proj = Literal["gate", "up", "down"]
PROJS: tuple[Proj, ...] = ("gate", "up", "down")


@dataclass(frozen=True)
class ExpertSizes:
    """E experts of gate, up [F, D] and down [D, F]."""

    E: int
    F: int
    D: int

    def of(self, proj: Proj) -> tuple[int, int]:
        """[rows, columns] of a projection."""
        return (self.D, self.F) if proj == "down" else (self.F, self.D)


class ExpertLayout(Protocol):
    """The experts of one layer; see ExpertSource for what the functions give."""

    def tensor_names(self) -> tuple[str, ...]:
        """Every file tensor needed, present or not."""
        ...

    def check(self) -> None:
        """FormatError or UnsupportedError when a tensor does not fit."""
        ...

    def type(self, proj: Proj) -> str:
        """Weight type of the projection's rows."""
        ...

    def rows(self, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """uint8 [rows, row_bytes]."""
        ...

    def bias(self, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """f32 [rows] or None."""
        ...

    def scale(self, expert: int, proj: Proj) -> float:
        """Tensor scale."""
        ...


def _with_companions(ckpt: Checkpoint, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names and those of their scale tensors."""
    beside = [c for n in names if n in ckpt.tensors for c in companions(ckpt, n)]
    return names + tuple(beside)


def _check_shape(ckpt: Checkpoint, name: str, what: str, expected: tuple[int, ...]) -> None:
    if ckpt.info(name).shape != expected:
        raise shape_error(ckpt.info(name), what, expected)


def _check_biases(ckpt: Checkpoint, sizes: ExpertSizes, biases: Mapping[Proj, str]) -> None:
    for proj, name in biases.items():
        _check_shape(ckpt, name, f"{proj} bias of all experts", (sizes.E, sizes.of(proj)[0]))


@dataclass(frozen=True)
class PerExpert:
    """``names``: proj -> tensor name with {} for the expert."""

    ckpt: Checkpoint
    sizes: ExpertSizes
    names: Mapping[Proj, str]

    def tensor_names(self) -> tuple[str, ...]:
        """E tensors per projection."""
        names = [self.names[p].format(e) for p in PROJS for e in range(self.sizes.E)]
        return _with_companions(self.ckpt, tuple(names))

    def check(self) -> None:
        """All experts of a projection have the same shape and type."""
        for proj in PROJS:
            for expert in range(self.sizes.E):
                name = self.names[proj].format(expert)
                _check_shape(self.ckpt, name, f"expert {expert}'s {proj}", self.sizes.of(proj))
                if row_type(self.ckpt, name) != self.type(proj):
                    raise UnsupportedError(
                        f"tensor {name} is {row_type(self.ckpt, name)}, but expert 0 of its layer "
                        f"is {self.type(proj)}; a layer's experts must share a type"
                    )

    def type(self, proj: Proj) -> str:
        """Weight type of the projection's rows."""
        return row_type(self.ckpt, self.names[proj].format(0))

    def rows(self, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """uint8 [rows, row_bytes]."""
        return matrix_rows(self.ckpt, self.names[proj].format(expert))

    def bias(self, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """No known file stores biases this way."""
        return None

    def scale(self, expert: int, proj: Proj) -> float:
        """Tensor scale."""
        return tensor_scale(self.ckpt, self.names[proj].format(expert))


@dataclass(frozen=True)
class Stacked:
    """``names``: proj -> tensor [E, rows, cols]; ``biases``: proj -> tensor [E, rows], or empty."""

    ckpt: Checkpoint
    sizes: ExpertSizes
    names: Mapping[Proj, str]
    biases: Mapping[Proj, str] = field(default_factory=dict)

    def tensor_names(self) -> tuple[str, ...]:
        """Three matrices, and three biases if any."""
        names = (*self.names.values(), *self.biases.values())
        return _with_companions(self.ckpt, names)

    def check(self) -> None:
        """Shapes and types."""
        e = self.sizes.E
        for proj, name in self.names.items():
            _check_shape(self.ckpt, name, f"{proj} of {e} experts", (e, *self.sizes.of(proj)))
            row_type(self.ckpt, name)
        _check_biases(self.ckpt, self.sizes, self.biases)

    def type(self, proj: Proj) -> str:
        """Weight type of the projection's rows."""
        return row_type(self.ckpt, self.names[proj])

    def rows(self, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """uint8 [rows, row_bytes]."""
        return matrix_rows(self.ckpt, self.names[proj], expert)

    def bias(self, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """f32 [rows] or None."""
        return float_row(self.ckpt, self.biases[proj], expert) if self.biases else None

    def scale(self, expert: int, proj: Proj) -> float:
        """Tensor scale."""
        return tensor_scale(self.ckpt, self.names[proj], expert)


@dataclass(frozen=True)
class FusedGateUp:
    """``gate_up`` [E, 2F, D], gate rows first; ``down`` [E, D, F]; ``biases`` as for Stacked."""

    ckpt: Checkpoint
    sizes: ExpertSizes
    gate_up: str
    down: str
    biases: Mapping[Proj, str] = field(default_factory=dict)

    def tensor_names(self) -> tuple[str, ...]:
        """Two matrices, and three biases if any."""
        return _with_companions(self.ckpt, (self.gate_up, self.down, *self.biases.values()))

    def check(self) -> None:
        """Shapes and types."""
        e, f, d = self.sizes.E, self.sizes.F, self.sizes.D
        _check_shape(self.ckpt, self.gate_up, f"gate and up of {e} experts", (e, 2 * f, d))
        _check_shape(self.ckpt, self.down, f"down of {e} experts", (e, d, f))
        row_type(self.ckpt, self.gate_up)
        row_type(self.ckpt, self.down)
        _check_biases(self.ckpt, self.sizes, self.biases)

    def _name(self, proj: Proj) -> str:
        return self.down if proj == "down" else self.gate_up

    def type(self, proj: Proj) -> str:
        """Weight type of the projection's rows."""
        return row_type(self.ckpt, self._name(proj))

    def rows(self, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """uint8 [rows, row_bytes]."""
        rows = matrix_rows(self.ckpt, self._name(proj), expert)
        f = self.sizes.F
        return rows if proj == "down" else rows[:f] if proj == "gate" else rows[f:]

    def bias(self, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """f32 [rows] or None."""
        return float_row(self.ckpt, self.biases[proj], expert) if self.biases else None

    def scale(self, expert: int, proj: Proj) -> float:
        """Tensor scale."""
        return tensor_scale(self.ckpt, self._name(proj), expert)


@dataclass(frozen=True)
class _GptOss:
    """What both gpt-oss layouts share: biases [E, 2F] with gate and up taking turns, and [E, D]."""

    ckpt: Checkpoint
    sizes: ExpertSizes
    prefix: str

    def _base(self, proj: Proj) -> str:
        return self.prefix + ("down_proj" if proj == "down" else "gate_up_proj")

    def _bias_names(self) -> tuple[str, str]:
        return self._base("gate") + "_bias", self._base("down") + "_bias"

    def _turn(self, proj: Proj) -> slice:
        """Which of the taking-turns rows (or columns) belong to the projection."""
        return slice(None) if proj == "down" else slice(0 if proj == "gate" else 1, None, 2)

    def _check_biases(self) -> None:
        e, f, d = self.sizes.E, self.sizes.F, self.sizes.D
        for name, width in zip(self._bias_names(), (2 * f, d), strict=True):
            _check_shape(self.ckpt, name, f"bias of {e} experts", (e, width))

    def bias(self, expert: int, proj: Proj) -> NDArray[np.float32] | None:
        """f32 [rows]."""
        row = float_row(self.ckpt, self._base(proj) + "_bias", expert)
        return np.ascontiguousarray(row[self._turn(proj)])

    def scale(self, expert: int, proj: Proj) -> float:
        """These types have no tensor scale."""
        return 1.0


@dataclass(frozen=True)
class GptOssFloat(_GptOss):
    """Float experts with the input axis first; rows are copies because the file holds columns."""

    def tensor_names(self) -> tuple[str, ...]:
        """Two matrices, two biases."""
        return (self._base("gate"), self._base("down"), *self._bias_names())

    def check(self) -> None:
        """Shapes and types."""
        e, f, d = self.sizes.E, self.sizes.F, self.sizes.D
        _check_shape(self.ckpt, self._base("gate"), f"gate and up of {e} experts", (e, d, 2 * f))
        _check_shape(self.ckpt, self._base("down"), f"down of {e} experts", (e, f, d))
        for proj in PROJS:
            if self.type(proj) not in ("F32", "F16", "BF16"):
                raise UnsupportedError(
                    f"tensor {self._base(proj)} is {self.type(proj)}; experts stored input axis "
                    f"first must be F32, F16 or BF16"
                )
        self._check_biases()

    def type(self, proj: Proj) -> str:
        """Weight type of the projection's rows."""
        return row_type(self.ckpt, self._base(proj))

    def rows(self, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """uint8 [rows, row_bytes], a copy."""
        columns = matrix_rows(self.ckpt, self._base(proj), expert)
        n_bytes = row_bytes(self.type(proj), 1)
        # [in, out, bytes of a number] -> [out, in, bytes of a number]
        numbers = columns.reshape(columns.shape[0], -1, n_bytes)[:, self._turn(proj)]
        return np.ascontiguousarray(numbers.transpose(1, 0, 2)).reshape(numbers.shape[1], -1)


@dataclass(frozen=True)
class GptOssMxfp4(_GptOss):
    """Packed experts, recoded exactly into MXFP4 rows."""

    def tensor_names(self) -> tuple[str, ...]:
        """Blocks, scales and biases."""
        packed = [self._base(p) + end for p in ("gate", "down") for end in ("_blocks", "_scales")]
        return (*packed, *self._bias_names())

    def check(self) -> None:
        """Shapes and types."""
        e, f, d = self.sizes.E, self.sizes.F, self.sizes.D
        shapes: dict[Proj, tuple[int, int]] = {"gate": (2 * f, d), "down": (d, f)}
        for proj, (rows, cols) in shapes.items():
            blocks, scales = self._base(proj) + "_blocks", self._base(proj) + "_scales"
            row_bytes("MXFP4", cols)
            _check_shape(self.ckpt, blocks, f"blocks of {e} experts", (e, rows, cols // 32, 16))
            _check_shape(self.ckpt, scales, f"scales of {e} experts", (e, rows, cols // 32))
            for name in (blocks, scales):
                if self.ckpt.info(name).type.name != "U8":
                    raise UnsupportedError(
                        f"tensor {name} is {self.ckpt.info(name).type.name}; packed MXFP4 is U8"
                    )
        self._check_biases()

    def type(self, proj: Proj) -> str:
        """Always MXFP4."""
        return "MXFP4"

    def rows(self, expert: int, proj: Proj) -> NDArray[np.uint8]:
        """uint8 [rows, row_bytes], recoded."""
        name = self._base(proj)
        blocks = self.ckpt.raw(name + "_blocks").reshape(self.ckpt.info(name + "_blocks").shape)
        scales = self.ckpt.raw(name + "_scales").reshape(self.ckpt.info(name + "_scales").shape)
        turn = self._turn(proj)
        return mxfp4_from_gptoss(blocks[expert, turn], scales[expert, turn])
