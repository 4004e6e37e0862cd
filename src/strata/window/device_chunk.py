"""Reads prompts on a device a layer at a time, with the bits of windows.

A window of PIECE tokens reads each of its experts once, so a prompt in windows reads experts again
and again. Here all pieces of a chunk go through a layer before the next one begins, and the layer's
experts are copied to the device once (``experts.stream``). The kernels are those of windows of
PIECE tokens, one graph a layer, so the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from strata.experts.device_service import DeviceService
from strata.experts.stream import LayerStream
from strata.kernels.gdn.triton import flip
from strata.models.gpu.frame import DeviceState, GpuFrame
from strata.models.gpu.gdn import GpuGdn
from strata.models.gpu.network import GpuNetwork
from strata.window.device_layer import Meeting, device_program
from strata.window.device_record import Launch, graph
from strata.window.fuse import fuse
from strata.window.program import Step, check
from strata.window.run import MAX_WINDOW_TOKENS

PIECE = MAX_WINDOW_TOKENS


@dataclass(frozen=True)
class Recorded:
    """One piece: its frame, and what to launch at the start, in each layer, and for its logits."""

    frame: GpuFrame
    embed: Launch
    layers: tuple[Launch, ...]
    head: Launch


class PromptReader(Protocol):
    """Who reads long prompts."""

    piece: int
    """Tokens that ``read`` takes multiples of."""

    def read(self, tokens: Sequence[int], n_head: int) -> torch.Tensor:
        """Commit the tokens; logits f32 [n_head, V] of the last, on the host."""
        ...


class ChunkReader:
    """Reads whole pieces; what is left of a prompt goes through windows."""

    piece = PIECE

    def __init__(
        self,
        network: GpuNetwork,
        service: DeviceService,
        state: DeviceState,
        stream: LayerStream,
    ) -> None:
        self._net, self._service, self._state, self._stream = network, service, state, stream
        self._recorded: Recorded | None = None
        self._compiled = network.device.type == "cuda"

    def read(self, tokens: Sequence[int], n_head: int) -> torch.Tensor:
        """Commit the tokens, a multiple of PIECE; logits f32 [n_head, V] of the last, on the host.

        ContextLengthError before any work.
        """
        assert len(tokens) % PIECE == 0, f"{len(tokens)} tokens are not whole pieces"
        self._state.require_room(len(tokens))
        recorded = self._record()
        pieces = len(tokens) // PIECE
        frame, device = recorded.frame, self._net.device
        start = self._state.length
        ids = torch.tensor(tokens, dtype=torch.int64).to(device)
        pos = torch.arange(start, start + len(tokens), dtype=torch.int32).to(device)
        ngram_rows = [
            rows(self._state.tokens, tokens).to(device) for rows in self._net.ngram_rows.values()
        ]
        shape = (len(tokens), *frame["residual"].shape[1:])
        residual = torch.empty(shape, dtype=torch.float32, device=device)
        self._service.show(self._stream.begin())
        spans = [slice(i * PIECE, (i + 1) * PIECE) for i in range(pieces)]
        for span in spans:
            frame["ids"].copy_(ids[span])
            recorded.embed()
            residual[span].copy_(frame["residual"])
        self._state.settle()
        which = self._state.which.clone()
        for layer, launch in enumerate(recorded.layers):
            self._stream.enter(layer)
            self._state.which.copy_(which)
            for span in spans:
                frame["residual"].copy_(residual[span])
                frame.pos_T.copy_(pos[span])
                if ngram_rows:
                    frame["ngram_rows"].copy_(ngram_rows[0][span])
                launch()
                residual[span].copy_(frame["residual"])
            self._stream.leave(layer)
        self._state.which.copy_(which ^ (pieces & 1))
        if pieces & 1:
            self._state.flip_all()
        self._state.tokens.extend(tokens)
        return self._logits(recorded, residual, n_head)

    def _logits(self, recorded: Recorded, residual: torch.Tensor, n_head: int) -> torch.Tensor:
        """Of the last n_head tokens."""
        frame, n = recorded.frame, len(residual)
        rows = []
        for first in range((n - n_head) // PIECE * PIECE, n, PIECE):
            if n_head == 0:
                break
            frame["residual"].copy_(residual[first : first + PIECE])
            recorded.head()
            wanted = frame["logits"][max(0, n - n_head - first) :]
            rows.append(wanted.to("cpu", copy=True))
        return torch.cat(rows) if rows else torch.empty(0, self._net.spec.n_vocab)

    def _record(self) -> Recorded:
        if self._recorded is None:
            self._recorded = self._new()
        return self._recorded

    def _new(self) -> Recorded:
        net = self._net
        frame = net.new_frame(PIECE, self._state)
        nobody = Meeting(lambda layer: None, lambda layer, place: None)
        built = device_program(net, frame, self._service, nobody, host=False)
        check(built.program)
        program = fuse(built.program, built.fusions)
        check(program)
        n_layers = net.spec.n_layers
        by_layer: list[list[Step]] = [[] for _ in range(n_layers + 1)]
        for step in program.steps:
            by_layer[step.layer].append(step)
        embed = by_layer[0].pop(0)
        assert embed.name == "embed", embed.id
        launches = [self._layer(frame, layer, by_layer[layer]) for layer in range(n_layers)]
        every = [embed.launch, *launches, _all(by_layer[n_layers])]
        if self._compiled:
            every = self._graphs(frame, every)
        return Recorded(frame, every[0], tuple(every[1:-1]), every[-1])

    def _layer(self, frame: GpuFrame, layer: int, steps: Sequence[Step]) -> Launch:
        """The steps, and the commit of what they left in recurrent state."""
        run = _all(steps)
        if not isinstance(self._net.mixers[layer], GpuGdn):
            return run

        def committed() -> None:
            run()
            flip(frame.n_tokens, self._state.which)

        return committed

    def _graphs(self, frame: GpuFrame, launches: Sequence[Launch]) -> list[Launch]:
        """Each as a graph, after a rehearsal behind the committed length with cached experts only
        (rows of others are left out, since their address is 0)."""
        start = self._state.length
        frame.pos_T.copy_(torch.arange(start, start + PIECE, dtype=torch.int32))
        which = self._state.which.clone()
        kept = {key: tensor.clone() for key, tensor in self._state.recurrent().items()}
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        made = [graph(launch) for launch in launches]
        self._state.which.copy_(which)
        for key, tensor in kept.items():
            self._state.both(*key).copy_(tensor)
        return made


def _all(steps: Sequence[Step]) -> Callable[[], None]:
    launches = [step.launch for step in steps]

    def run() -> None:
        for launch in launches:
            launch()

    return run
