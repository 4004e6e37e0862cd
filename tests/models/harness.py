"""Runs one mixer over a token sequence in any cut into windows, with every unwritten number NaN.

Rejected tokens are real runs: a window of T tokens whose last T - n inputs are made up is run, n
are committed, and the next window starts n further on, so the made-up ones must leave no trace.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from strata.kernels.weight import Weight
from strata.memory.frame import BufferSpec, Frame
from strata.memory.state import SequenceState
from strata.models.parts import Mixer


def f32_weight(matrix: torch.Tensor) -> Weight:
    """A matrix of float32-exact numbers as an F32 Weight."""
    data = matrix.detach().float().contiguous()
    assert torch.equal(data.to(matrix.dtype), matrix), "the test's weights must be float32-exact"
    return Weight("F32", data.shape[0], data.shape[1], data.view(torch.uint8))


def fill(module: torch.nn.Module, seed: int, dtype: torch.dtype, std: float = 1.0) -> None:
    """Seeded float32-exact parameters: matrices of row norm ``std``, vectors around their value."""
    generator = torch.Generator().manual_seed(seed)
    module.to(dtype)
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=generator)
        value = noise * std / p.shape[-1] ** 0.5 if p.ndim > 1 else 1 + 0.3 * noise
        p.data.copy_(value)
        p.requires_grad_(False)


def poisoned_state(mixer: Mixer, context: int) -> SequenceState:
    """A new sequence whose positional and ring entries are NaN (codes: 85); recurrent ones start at
    zero."""
    specs = mixer.state()
    state = SequenceState([{}] * mixer.layer + [specs], context, torch.device("cpu"))
    for name, spec in specs.items():
        if spec.kind != "recurrent":
            state.tensor(mixer.layer, name).fill_(torch.nan if spec.dtype.is_floating_point else 85)
    return state


def make_frame(
    mixer: Mixer, state: SequenceState, n_tokens: int, d_model: int, whole: bool = False
) -> Frame:
    """A frame of NaN; whole: a prompt chunk, which is committed whole."""
    dtype = next(iter(mixer.buffers().values())).dtype
    wide = BufferSpec((d_model,), dtype)
    specs = {"x": wide, "mixer_out": wide} | dict(mixer.buffers())
    layers = {name: (mixer.layer,) for name, s in specs.items() if s.per_layer}
    frame = Frame(n_tokens, 1, specs, layers, state, torch.device("cpu"), keep_inputs=not whole)
    for tensor in frame.tensors().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -7)
    return frame


def run_window(mixer: Mixer, state: SequenceState, x_TD: torch.Tensor, n: int) -> torch.Tensor:
    """Run one window at the committed length, commit n of its tokens; mixer_out [T, D]."""
    frame = make_frame(mixer, state, len(x_TD), x_TD.shape[1], whole=n == len(x_TD) > 8)
    frame.start = state.length
    frame["x"].copy_(x_TD)
    for part in mixer.parts():
        part.run(frame)
    mixer.commit(frame, n)
    state.tokens.extend([0] * n)
    return frame["mixer_out"]


@dataclass(frozen=True)
class Window:
    """T tokens are run, the first n of them are accepted."""

    T: int
    n: int


def schedule(n_tokens: int, seed: int, first: int = 0) -> Iterator[Window]:
    """A first chunk, then windows of 1..8 tokens of which 0..T are accepted, up to n_tokens."""
    rng = random.Random(seed)
    done = first
    if first:
        yield Window(first, first)
    while done < n_tokens:
        T = rng.randint(1, 8)
        n = min(rng.choice((0, 1, T // 2, T, T)), n_tokens - done)
        done += n
        yield Window(T, n)


def run_windows(
    mixer: Mixer, x_TD: torch.Tensor, windows: Sequence[Window], context: int | None = None
) -> torch.Tensor:
    """mixer_out of every accepted token, [T, D]."""
    state = poisoned_state(mixer, context or len(x_TD) + 8)
    generator = torch.Generator().manual_seed(99)
    outs: list[torch.Tensor] = []
    for window in windows:
        true = x_TD[state.length : state.length + window.n]
        made_up = torch.randn(window.T - window.n, x_TD.shape[1], generator=generator) * 3
        out = run_window(mixer, state, torch.cat([true, made_up.to(x_TD.dtype)]), window.n)
        outs.append(out[: window.n].clone())
    return torch.cat(outs)


def run_at_once(mixer: Mixer, x_TD: torch.Tensor) -> torch.Tensor:
    """mixer_out of all tokens as one prompt chunk, [T, D]."""
    return run_windows(mixer, x_TD, [Window(len(x_TD), len(x_TD))])


def assert_within(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Every number within tolerance times the largest expected one."""
    assert out.isfinite().all()
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


class _Recorder:
    """A frame (or its state) that notes every name it is asked for."""

    def __init__(self, frame: Frame, names: set[str]) -> None:
        self._frame, self._names = frame, names
        self.T, self.start, self.device = frame.T, frame.start, frame.device
        self.keep_inputs = frame.keep_inputs
        self.state = self

    def __getitem__(self, name: str) -> torch.Tensor:
        self._names.add(name)
        return self._frame[name]

    def tensor(self, layer: int, name: str) -> torch.Tensor:
        self._names.add(name)
        return self._frame.state.tensor(layer, name)


def assert_parts_touch_what_they_declare(mixer: Mixer, x_TD: torch.Tensor, n_past: int) -> None:
    """Every part uses exactly the names it declares, and changes only those it writes."""
    state = poisoned_state(mixer, len(x_TD))
    run_window(mixer, state, x_TD[:n_past], n_past)
    frame = make_frame(mixer, state, len(x_TD) - n_past, x_TD.shape[1])
    frame.start = n_past
    frame["x"].copy_(x_TD[n_past:])
    tensors = dict(frame.tensors()) | {n: state.tensor(mixer.layer, n) for n in mixer.state()}
    for part in mixer.parts():
        before = {name: t.clone() for name, t in tensors.items()}
        names: set[str] = set()
        part.run(_Recorder(frame, names))  # type: ignore[arg-type]
        assert names == {*part.reads, *part.writes}, part.name
        changed = {
            n for n, t in tensors.items() if not torch.equal(t.nan_to_num(), before[n].nan_to_num())
        }
        assert changed == set(part.writes), part.name
