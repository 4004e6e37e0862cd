"""Fills a model's roles from a checkpoint and accounts for every file tensor and every weight.

Matrices are views of the file or plain copies of it, never widened; norms and the like become f32
tensors. Nothing is read before the whole table has been checked.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.checkpoint import Checkpoint
from strata.formats.text import counted, listed
from strata.kernels.weight import ShardedWeight, Weight
from strata.models.expert_source import ExpertSource
from strata.models.file_rows import (
    companions,
    matrix_rows,
    row_bytes,
    row_type,
    shape_error,
    tensor_scale,
)
from strata.models.inventory import Role, inventory
from strata.models.roles import Roles
from strata.models.sources import Rows, Source, Sources, Values
from strata.models.spec import ModelSpec


@dataclass(frozen=True)
class PlannedWeight:
    """One role before anything is read. on_disk: stays a view of the file whatever is copied."""

    role: str
    type: str
    shape: tuple[int, ...]
    n_bytes: int
    on_disk: bool


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint held and what became of it.

    tensors_by_type: number of file tensors per type. unused: known tensors that are not needed,
    with the reason. read: tensors that gave settings instead of weights. n_expert_tensors: those
    behind the routed experts.
    """

    tensors_by_type: Mapping[str, int]
    unused: Mapping[str, str]
    read: Mapping[str, str]
    n_roles: int
    n_expert_tensors: int
    planned: tuple[PlannedWeight, ...]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all roles that do not stay on disk."""
        return sum(w.n_bytes for w in self.planned if not w.on_disk)

    @property
    def on_disk_bytes(self) -> int:
        """Bytes of the roles that stay views of the file."""
        return sum(w.n_bytes for w in self.planned if w.on_disk)

    def lines(self) -> list[str]:
        """The report for people, one fact a line."""
        types = ", ".join(f"{n} {name}" for name, n in self.tensors_by_type.items())
        total = sum(self.tensors_by_type.values())
        lines = [
            f"{counted(total, 'tensor')}: {types}",
            f"{counted(self.n_roles, 'weight')} filled",
            f"{counted(self.n_expert_tensors, 'tensor')} of experts",
        ]
        for reason in dict.fromkeys(self.unused.values()):
            n = sum(r == reason for r in self.unused.values())
            lines.append(f"{counted(n, 'tensor')} not used: {reason}")
        return lines


def plan_weights(
    ckpt: Checkpoint, spec: ModelSpec, sources: Sources, experts: ExpertSource
) -> LoadReport:
    """Check names, shapes and types of everything, reading no weights.

    Raises UnsupportedError naming every weight nobody filled and every file tensor nobody used, or
    FormatError naming a tensor with its shape and the one expected.
    """
    needed = _needed(ckpt, sources)
    expert_names = experts.tensor_names()
    unused = _known_unused(ckpt, sources)
    _account(ckpt, spec, sources, {*needed, *expert_names, *sources.read}, expert_names, unused)
    planned = tuple(
        _planned(ckpt, name, role, sources.roles[name]) for name, role in inventory(spec).items()
    )
    experts.check()
    used = {*needed, *expert_names}
    return LoadReport(
        ckpt.dtype_counts(),
        {name: reason for name, reason in unused.items() if name not in used},
        dict(sources.read),
        len(planned),
        len(expert_names),
        planned,
    )


def load_weights(
    ckpt: Checkpoint, spec: ModelSpec, sources: Sources, *, copy: bool, workers: int = 1
) -> Roles:
    """Every role of the model: Weight (uint8 rows in the file's type) or f32 tensor.

    Call ``plan_weights`` first.

    copy: matrices are copied into memory of their own; otherwise they are views of the file where
    the layout allows. workers: threads that put matrices together.
    """
    roles = inventory(spec)
    if workers <= 1:
        return {n: _load(ckpt, n, role, sources.roles[n], copy) for n, role in roles.items()}
    with ThreadPoolExecutor(workers, thread_name_prefix="strata-load") as pool:
        waiting = {n: pool.submit(_load, ckpt, n, role, sources.roles[n], copy)
                   for n, role in roles.items()}  # fmt: skip
        return {name: future.result() for name, future in waiting.items()}


def _needed(ckpt: Checkpoint, sources: Sources) -> set[str]:
    names = {name for source in sources.roles.values() for name in source.tensors}
    beside = {c for n in names if n in ckpt.tensors for c in companions(ckpt, n)}
    return names | beside


def _known_unused(ckpt: Checkpoint, sources: Sources) -> dict[str, str]:
    rules = [(re.compile(pattern), reason) for pattern, reason in sources.unused]
    found: dict[str, str] = {}
    for name in ckpt.tensors:
        reason = next((reason for rule, reason in rules if rule.fullmatch(name)), None)
        if reason is not None:
            found[name] = reason
    return found


def _account(
    ckpt: Checkpoint,
    spec: ModelSpec,
    sources: Sources,
    used: set[str],
    expert_names: tuple[str, ...],
    unused: Mapping[str, str],
) -> None:
    unfilled = []
    for role in inventory(spec):
        source = sources.roles.get(role)
        missing = [n for n in source.tensors if n not in ckpt.tensors] if source else []
        if source is None:
            unfilled.append(role)
        elif missing:
            unfilled.append(f"{role} (from {', '.join(missing)})")
    unfilled += [f"routed experts (from {n})" for n in expert_names if n not in ckpt.tensors]
    left = [name for name in ckpt.tensors if name not in used and name not in unused]
    if unfilled or left:
        raise UnsupportedError(
            f"{ckpt.path}: the names in the file are not those of a {spec.family} model. "
            f"{counted(len(unfilled), 'weight')} nobody filled: {listed(unfilled) or 'none'}. "
            f"{counted(len(left), 'file tensor')} nobody used: {listed(left) or 'none'}. "
            f"Use a file in a layout that is known, or report these names"
        )


def _matrix_type(ckpt: Checkpoint, source: Rows) -> str:
    """The one type of a matrix's pieces."""
    types = {row_type(ckpt, name) for name in source.tensors}
    if len(types) > 1:
        raise UnsupportedError(
            f"tensors {listed(source.tensors)} belong to one matrix but have the types "
            f"{listed(sorted(types))}; they must share one"
        )
    return types.pop()


def _planned(ckpt: Checkpoint, name: str, role: Role, source: Source) -> PlannedWeight:
    if isinstance(source, Values):
        info = ckpt.info(source.tensor)
        if math.prod(role.shape) > info.n_elements:  # conversions drop numbers but make none
            raise shape_error(info, name, role.shape)
        return PlannedWeight(name, "F32", role.shape, 4 * math.prod(role.shape), False)
    n_rows = _check_rows(ckpt, name, role, source)
    kind = _matrix_type(ckpt, source)
    n_bytes = n_rows * row_bytes(kind, role.shape[1])
    return PlannedWeight(name, kind, (n_rows, role.shape[1]), n_bytes, source.on_disk)


def _check_rows(ckpt: Checkpoint, name: str, role: Role, source: Rows) -> int:
    """Compare the file's shapes with the role's; the number of rows the matrix will have."""
    infos = [ckpt.info(tensor) for tensor in source.tensors]
    wanted = source.take.of if source.take is not None else role.shape[0]
    n_rows = sum(info.n_rows for info in infos)
    fits = n_rows == wanted or (role.padded and n_rows > wanted)
    wrong = next((info for info in infos if info.n_cols != role.shape[1]), None)
    if wrong is not None or not fits:
        info = wrong or infos[0]
        if len(infos) == 1 or wrong is not None:
            raise shape_error(info, name, (wanted, role.shape[1]))
        raise FormatError(
            f"{len(infos)} tensors from {info.name} on have {n_rows} rows together, but {name} "
            f"needs {wanted}; settings and weights belong to different models"
        )
    return n_rows if source.take is None else len(source.take.rows)


def _load(
    ckpt: Checkpoint, name: str, role: Role, source: Source, copy: bool
) -> Weight | torch.Tensor:
    if isinstance(source, Values):
        return _values(ckpt, name, role, source)
    kind = _matrix_type(ckpt, source)
    scales = {tensor_scale(ckpt, tensor) for tensor in source.tensors}
    if len(scales) > 1:
        raise UnsupportedError(
            f"tensors {listed(source.tensors)} belong to one matrix but have different scales"
        )
    scale, n_cols = scales.pop(), role.shape[1]
    pieces = [matrix_rows(ckpt, tensor) for tensor in source.tensors]
    if source.on_disk and len(pieces) > 1:
        shards = tuple(_as_torch(piece) for piece in pieces)
        n_rows = sum(len(shard) for shard in shards)
        return ShardedWeight(kind, n_rows, n_cols, shards[0][:0], scale, shards=shards)
    rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if source.take is not None:
        rows = rows[source.take.rows]
    elif copy and not source.on_disk and not rows.flags.writeable:
        rows = rows.copy()
    return Weight(kind, len(rows), n_cols, _as_torch(rows), scale)


def _as_torch(rows: NDArray[np.uint8]) -> torch.Tensor:
    """The same memory as a tensor; nothing in this program writes to weights."""
    with warnings.catch_warnings():
        # torch warns about read-only memory, which is what a file mapping is
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(rows))


def _values(ckpt: Checkpoint, name: str, role: Role, source: Values) -> torch.Tensor:
    numbers = torch.from_numpy(ckpt.float32(source.tensor))
    try:
        made = numbers if source.via is None else source.via(numbers)
    except (RuntimeError, IndexError):
        raise shape_error(ckpt.info(source.tensor), name, role.shape) from None
    if [n for n in made.shape if n != 1] != [n for n in role.shape if n != 1]:
        raise shape_error(ckpt.info(source.tensor), name, role.shape)
    return made.reshape(role.shape).contiguous()
