"""Reads prompts on a device a layer at a time, with the bits of windows.

A window of PIECE tokens reads each of its experts once, so a prompt in windows reads experts again
and again. Here all pieces of a chunk go through a layer before the next one begins, and the layer's
experts are copied to the device once (``experts.stream``). A layer has two passes over the pieces:
up to the plan, after which the CPU may begin with its share (``experts.prompt_share``), and the
rows of the device's own experts; then one sum over the whole chunk. The kernels are those of
windows of PIECE tokens, so the result has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from strata.experts.prompt_experts import PromptExperts
from strata.kernels.combine.triton import combine
from strata.kernels.expert_rows.triton_gemm import groups_of_rows
from strata.kernels.gdn.triton import flip
from strata.models.gpu.ffn import GpuMoe
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
class LayerLaunches:
    """One layer of one piece. rows: None in a layer without routed experts."""

    plan: Launch
    """Up to the plan, and the commit of recurrent state."""
    rows: Launch | None
    """The plan again (its buffers serve all pieces in turn), the device's rows, the shared
    expert."""


@dataclass(frozen=True)
class Recorded:
    """One piece: its frame, and what to launch at the start, in each layer, and for its logits."""

    frame: GpuFrame
    embed: Launch
    layers: tuple[LayerLaunches, ...]
    head: Launch


class Carried:
    """Tensors of a piece by name, and for each ``chunk[name]``, which keeps it of all pieces."""

    def __init__(self, piece: Mapping[str, torch.Tensor], pieces: int) -> None:
        self._piece = dict(piece)
        self.chunk: dict[str, torch.Tensor] = {}
        self._parts: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, one in self._piece.items():
            every = one.new_empty((pieces, *one.shape))
            self._parts[name] = every.unbind(0)
            self.chunk[name] = every.view(pieces * len(one), *one.shape[1:])

    def keep(self, index: int, names: Iterable[str]) -> None:
        """From the piece."""
        for parts, piece in self._by_type(index, names):
            torch._foreach_copy_(parts, piece)

    def bring(self, index: int, names: Iterable[str]) -> None:
        """Into the piece."""
        for parts, piece in self._by_type(index, names):
            torch._foreach_copy_(piece, parts)

    def _by_type(
        self, index: int, names: Iterable[str]
    ) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """(of the chunk, of the piece): tensors of one type are copied by one launch."""
        found: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name in names:
            piece = self._piece[name]
            parts, pieces = found.setdefault(piece.dtype, ([], []))
            parts.append(self._parts[name][index])
            pieces.append(piece)
        return found.values()


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

    def __init__(self, network: GpuNetwork, state: DeviceState, experts: PromptExperts) -> None:
        self._net, self._state, self.experts = network, state, experts
        self._recorded: Recorded | None = None
        self._compiled = network.device.type == "cuda"
        # all else is recorded
        self._kinds = [(type(ffn), i in network.ngrams) for i, ffn in enumerate(network.ffns)]

    def read(self, tokens: Sequence[int], n_head: int) -> torch.Tensor:
        """Commit the tokens, a multiple of PIECE; logits f32 [n_head, V] of the last, on the host.

        ContextLengthError before any work.
        """
        assert len(tokens) % PIECE == 0, f"{len(tokens)} tokens are not whole pieces"
        self._state.require_room(len(tokens))
        recorded = self._record()
        pieces = len(tokens) // PIECE
        frame = recorded.frame
        start = self._state.length
        names = ["ids", "residual", *(["ngram_rows"] if self._net.ngram_rows else [])]
        carry = Carried({"pos": frame.pos_T} | {name: frame[name] for name in names}, pieces)
        chunk = carry.chunk
        chunk["pos"].copy_(torch.arange(start, start + len(tokens), dtype=torch.int32))
        chunk["ids"].copy_(torch.tensor(tokens))
        for rows in self._net.ngram_rows.values():
            chunk["ngram_rows"].copy_(rows(self._state.tokens, tokens))
        with self.experts.reading(len(tokens), "exact", self._kinds):
            for i in range(pieces):
                carry.bring(i, ("ids",))
                recorded.embed()
                carry.keep(i, ("residual",))
            self._state.settle()
            which = self._state.which.clone()
            for layer in range(len(recorded.layers)):
                self._state.which.copy_(which)
                self._layer(recorded, layer, carry, pieces)
        self._state.which.copy_(which ^ (pieces & 1))
        if pieces & 1:
            self._state.flip_all()
        self._state.tokens.extend(tokens)
        return self._logits(recorded, chunk["residual"], n_head)

    def _layer(self, recorded: Recorded, layer: int, inputs: Carried, pieces: int) -> None:
        """One layer of all pieces; the residual of the chunk is read and written."""
        frame, launches, experts = recorded.frame, recorded.layers[layer], self.experts
        ffn = self._net.ffns[layer]
        experts.begun(layer)
        taken = ["pos", "residual", *(["ngram_rows"] if layer in self._net.ngrams else [])]
        kept = Carried(self._planned(frame, layer), pieces)
        for i in range(pieces):
            inputs.bring(i, taken)
            launches.plan()
            inputs.keep(i, ("residual",))
            kept.keep(i, kept.chunk)
        if launches.rows is None:
            return
        assert isinstance(ffn, GpuMoe)
        address_E = experts.service.shown(layer)[1]
        groups = groups_of_rows(kept.chunk["expert"], ffn.spec.n_active, address_E)
        experts.routed(layer, kept.chunk["ffn_x"], groups)
        experts.start(layer)
        again = [name for name in kept.chunk if name.startswith(("ffn_x", "router_logits"))]
        made = Carried(self._rows_of(frame, ffn), pieces)
        with experts.own_rows(layer):
            for i in range(pieces):
                kept.bring(i, again)
                launches.rows()
                made.keep(i, made.chunk)
        rows, gate = made.chunk["rows"], kept.chunk.get("shared_gate")
        experts.joined(layer, rows)
        combine(
            rows, kept.chunk["weight"], pieces * PIECE, shared_TD=made.chunk.get("shared_out"),
            shared_gate_T=None if gate is None else gate.view(-1),
            residual=inputs.chunk["residual"], coeff_TC=kept.chunk.get("coeff_ffn"),
        )  # fmt: skip

    def _planned(self, frame: GpuFrame, layer: int) -> dict[str, torch.Tensor]:
        """What the first pass leaves of a piece for the second, for the CPU and for the sum."""
        ffn, found = self._net.ffns[layer], {}
        if not isinstance(ffn, GpuMoe):
            return {}
        for name in ("ffn_x", "ffn_x.q", "ffn_x.meta"):
            if name in frame.tensors():
                found[name] = frame[name]
        found["router_logits"] = ffn.logits(frame)
        if ffn.has_gate:
            found["shared_gate"] = frame["shared_gate"]
        coeff = self._net.residual.coeff("ffn", frame)
        if coeff is not None:
            found["coeff_ffn"] = coeff
        made, n_rows = self.experts.service.buffers(PIECE), PIECE * ffn.spec.n_active
        found["expert"] = made.expert_LR[layer, :n_rows]
        found["weight"] = made.weight_LR[layer, :n_rows]
        return found

    def _rows_of(self, frame: GpuFrame, ffn: GpuMoe) -> dict[str, torch.Tensor]:
        """What the second pass makes of a piece."""
        found = {"rows": frame["rows"][: PIECE * ffn.spec.n_active]}
        if ffn.has_shared:
            found["shared_out"] = frame["shared_out"]
        return found

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
        built = device_program(net, frame, self.experts.service, nobody, host=False)
        check(built.program)
        program = fuse(built.program, built.fusions)
        check(program)
        n_layers = net.spec.n_layers
        by_layer: list[list[Step]] = [[] for _ in range(n_layers + 1)]
        for step in program.steps:
            by_layer[step.layer].append(step)
        embed = by_layer[0].pop(0)
        assert embed.name == "embed", embed.id
        layers = tuple(self._of_layer(frame, i, by_layer[i]) for i in range(n_layers))
        plain = Recorded(frame, embed.launch, layers, _all(by_layer[n_layers]))
        return self._graphs(plain) if self._compiled else plain

    def _of_layer(self, frame: GpuFrame, layer: int, steps: Sequence[Step]) -> LayerLaunches:
        names = [step.name for step in steps]
        plan = names.index("plan") if "plan" in names else len(steps) - 1
        first = self._committing(frame, layer, steps[: plan + 1])
        if "plan" not in names:
            return LayerLaunches(first, None)
        # the sum is that of the whole chunk
        assert names[-1] == "combine", names
        return LayerLaunches(first, _all(steps[plan:-1]))

    def _committing(self, frame: GpuFrame, layer: int, steps: Sequence[Step]) -> Launch:
        """The steps, and the commit of what they left in recurrent state."""
        run = _all(steps)
        if not isinstance(self._net.mixers[layer], GpuGdn):
            return run

        def committed() -> None:
            run()
            flip(frame.n_tokens, self._state.which)

        return committed

    def _graphs(self, plain: Recorded) -> Recorded:
        """Each as a graph, after a rehearsal behind the committed length with cached experts only
        (rows of others are left out, since their address is 0)."""
        start = self._state.length
        plain.frame.pos_T.copy_(torch.arange(start, start + PIECE, dtype=torch.int32))
        which = self._state.which.clone()
        kept = {key: tensor.clone() for key, tensor in self._state.recurrent().items()}
        launches = [plain.embed, plain.head]
        for layer in plain.layers:
            launches += [layer.plan] if layer.rows is None else [layer.plan, layer.rows]
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        made = {launch: graph(launch) for launch in launches}
        self._state.which.copy_(which)
        for key, tensor in kept.items():
            self._state.both(*key).copy_(tensor)
        layers = tuple(
            LayerLaunches(made[one.plan], None if one.rows is None else made[one.rows])
            for one in plain.layers
        )
        return Recorded(plain.frame, made[plain.embed], layers, made[plain.head])


def _all(steps: Sequence[Step]) -> Callable[[], None]:
    launches = [step.launch for step in steps]

    def run() -> None:
        for launch in launches:
            launch()

    return run
