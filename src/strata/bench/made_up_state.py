"""A sequence of N tokens that was never read: drawn tokens, and drawn numbers in every tensor of
the state. Enough to time windows at a long context in seconds; what they say means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strata.memory.state import SequenceState

_SCALE = 0.1


def fill_state(state: SequenceState, tokens: Sequence[int], seed: int = 0) -> None:
    """Let the state be that of these tokens. ContextLengthError when they do not fit."""
    state.reset()
    state.require_room(len(tokens))
    for number, ((layer, name), spec) in enumerate(state.specs.items()):
        tensor = state.tensor(layer, name)
        generator = torch.Generator(tensor.device).manual_seed(seed + number)
        if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
            tensor.normal_(0.0, _SCALE, generator=generator)
        else:  # codes of a quantized cache
            tensor.view(torch.uint8).random_(0, 128, generator=generator)
        if spec.kind == "recurrent":  # whichever copy is the committed one
            tensor[1].copy_(tensor[0])
    state.tokens.extend(tokens)
