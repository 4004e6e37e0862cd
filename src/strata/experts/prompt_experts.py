"""A prompt's experts, layer after layer: cached, brought over the link, or computed by the CPU.

Both readers of prompts (``window/device_chunk``, ``window/device_fast``) go through the same calls
a layer: ``routed``, ``own_rows``, ``joined``. Knows no steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from strata.experts.device_service import DeviceService
from strata.experts.host_rows import HostRows
from strata.experts.prompt_share import LayerClock
from strata.experts.stream import LayerStream
from strata.kernels.expert_rows.launch import GpuGroups


class PromptExperts:
    """share: of the experts outside the device's memory, so many are the CPU's."""

    def __init__(
        self, service: DeviceService, stream: LayerStream, d_model: int, share: float = 0.0
    ) -> None:
        device, n_layers = service.device, len(service.n_active)
        self.service, self.stream, self.share = service, stream, share
        self.host = HostRows(service, device, d_model, service.n_active)
        self.clock = LayerClock(n_layers, device.type == "cuda")
        self.known: set[tuple[str, int, bool]] = set()
        """(numerics, tokens, whether the CPU had a share) of chunks that were read before: all
        their kernels are loaded."""
        self._ahead = False

    @contextmanager
    def reading(self, n_tokens: int, numerics: str) -> Iterator[None]:
        """Around a chunk; what it leaves on the device's stream may still run at the end."""
        share = self.share if self.host.fits(n_tokens) else 0.0
        self.service.show(self.stream.begin(share))
        self.host.begin(n_tokens, self.stream.host_LE)
        # a kernel's first launch may wait for the device, and the device for the CPU's rows
        kind = (numerics, n_tokens, share > 0)
        self._ahead = kind in self.known
        numerator = self.service.rules.numerator.clone()
        self.service.rules.numerator.zero_()
        try:
            yield
            self.host.settle()
        except BaseException:
            self.host.abandon()
            raise
        finally:
            self.service.rules.numerator.copy_(numerator)
        self.known.add(kind)

    def begun(self, layer: int) -> None:
        """The layer's mixer follows."""
        self.clock.mark(layer, "begun")

    def routed(self, layer: int, x_ND: torch.Tensor, groups: GpuGroups) -> None:
        """The layer's routing is known: all rows by expert, of the inputs f32 [N, D]."""
        self.clock.mark(layer, "routed")
        if self.host.has(layer):
            self.host.hand(layer, x_ND, groups)

    def start(self, layer: int) -> None:
        """Wait on the host until the CPU may begin, and let it; the device goes on meanwhile."""
        if self.host.has(layer):
            self.host.start(layer)

    @contextmanager
    def own_rows(self, layer: int) -> Iterator[None]:
        """Around all that reads the layer's experts in the device's memory."""
        self.stream.enter(layer)
        yield
        self.stream.leave(layer)
        self.clock.mark(layer, "computed")

    def joined(self, layer: int, rows_RD: torch.Tensor) -> None:
        """The CPU's rows are in their places of rows_RD f32 [R, D] from here on."""
        if self.host.has(layer):
            if not self._ahead:
                self.host.settle()
            self.host.join(layer, rows_RD)
        self.clock.mark(layer, "joined")
