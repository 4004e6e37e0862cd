"""The weights of a model on the GPU, by role.

Knows no parts. Shapes were checked when the network was put together without memory
(``engine.checkpoint_plan``), so a role is looked up without checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from strata.kernels.gpu_weight import GpuWeight, to_gpu
from strata.kernels.weight import Weight

HOST_ROLES = ("ngram.table",)
"""Tables that are gathered from on the host, by the end of their role."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GpuRoles:
    """Roles under a prefix ("" or "layers.<l>.")."""

    found: Mapping[str, GpuWeight | torch.Tensor]
    prefix: str = ""

    def layer(self, index: int) -> GpuRoles:
        """The roles of one layer."""
        return GpuRoles(self.found, f"layers.{index}.")

    def matrix(self, role: str) -> GpuWeight:
        """A matrix."""
        weight = self.found[self.prefix + role]
        assert isinstance(weight, GpuWeight), f"{self.prefix}{role} is no matrix"
        return weight

    def vector(self, role: str) -> torch.Tensor:
        """A plain tensor, f32."""
        values = self.found[self.prefix + role]
        assert isinstance(values, torch.Tensor), f"{self.prefix}{role} is no tensor"
        return values

    def has(self, role: str) -> bool:
        """Whether there is one."""
        return self.prefix + role in self.found


def to_device(
    roles: Mapping[str, Weight | torch.Tensor],
    device: torch.device,
    progress: Progress | None = None,
    *,
    workers: int = 1,
) -> GpuRoles:
    """Copy every weight but the host's tables, on that many threads; quantized matrices become
    tiles.

    UnsupportedError for a matrix of integers.
    """
    wanted = {n: w for n, w in roles.items() if not n.endswith(HOST_ROLES)}
    total = sum(_n_bytes(w) for w in wanted.values())
    done = 0
    found: dict[str, GpuWeight | torch.Tensor] = dict.fromkeys(wanted, torch.empty(0))
    # the largest first, so that none is left over at the end
    names = sorted(wanted, key=lambda n: -_n_bytes(wanted[n]))
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="strata-load") as pool:
        waiting = {pool.submit(_moved, wanted[name], device): name for name in names}
        try:
            for future in as_completed(waiting):
                name = waiting[future]
                found[name] = future.result()
                done += _n_bytes(wanted[name])
                if progress is not None:
                    progress("dense weights to the GPU", done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return GpuRoles(found)


def _moved(weight: Weight | torch.Tensor, device: torch.device) -> GpuWeight | torch.Tensor:
    if isinstance(weight, Weight):
        return to_gpu(weight, device)
    return weight.to(device=device, dtype=torch.float32).contiguous()


def _n_bytes(weight: Weight | torch.Tensor) -> int:
    if isinstance(weight, Weight):
        return weight.n_bytes
    return weight.numel() * weight.element_size()
