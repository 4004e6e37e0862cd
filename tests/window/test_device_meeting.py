"""Without a GPU the ring is the host's work itself, and none is done where the plan leaves none:
the payload is then an earlier layer's. Expectation: the plan writes it only when there are groups.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from strata.window.device_run import DeviceRunner


def test_a_layer_without_host_rows_is_not_answered() -> None:
    served, any_host = [], torch.zeros(1, dtype=torch.int32)
    runner = object.__new__(DeviceRunner)
    runner.service = SimpleNamespace(  # type: ignore[assignment]
        buffers=lambda n_tokens: SimpleNamespace(any_host=any_host),
        serve=lambda layer, n_tokens: served.append((layer, n_tokens)),
        handshake=None,
    )
    runner._compiled = False
    meeting = runner._meeting(4)
    meeting.ring(1)
    any_host.fill_(2)
    meeting.ring(2)
    assert served == [(2, 4)]
