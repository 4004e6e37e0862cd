"""The last events of the windows, kept in a ring and written out when one fails: what was rung,
what was waited for, and what never came.

A window transformation for the CPU; the host's loop of a device adds its own events with ``add``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from strata.core.log import LOG
from strata.memory.frame import Frame
from strata.window.program import Program, Step

KEPT, SHOWN = 4096, 160
_NAMES = {"ring": "RANG", "wait_cpu": "WAIT", "wait_late": "WAIT-LATE"}


class EventRing:
    """(time, window, name, layer) of the last 4,096 events."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._events: deque[tuple[float, int, str, int]] = deque(maxlen=KEPT)
        self.window = 0

    def add(self, name: str, layer: int = -1) -> None:
        """Note an event of the running window."""
        self._events.append((self._clock(), self.window, name, layer))

    def lines(self, n: int = SHOWN) -> list[str]:
        """The last n events, oldest first, times in milliseconds before the last."""
        last = list(self._events)[-n:]
        end = last[-1][0] if last else 0.0
        return [
            f"{1e3 * (at - end):10.3f} ms  window {window}  {name}"
            + (f" layer {layer}" if layer >= 0 else "")
            for at, window, name, layer in last
        ]

    def dump(self, why: BaseException) -> None:
        """Log the last events with what went wrong."""
        self.add(f"FAILED ({type(why).__name__})")
        LOG.error("verify trace: %s\n%s", why, "\n".join(self.lines()))

    def __call__(self, program: Program, frame: Frame) -> Program:
        """The program whose rings and waits are noted, and whose failures are written out."""
        steps = list(program.steps)
        last = max(i for i, step in enumerate(steps) if step.stream != "host")
        for i, step in enumerate(steps):
            if step.stream != "host":
                steps[i] = self._noted(step, i == 0, i == last, frame.T)
        return program.edited(steps)

    def _noted(self, step: Step, first: bool, last: bool, n_tokens: int) -> Step:
        launch, name = step.launch, _NAMES.get(step.name)

        def run() -> None:
            if first:
                self.window += 1
                self.add(f"WINDOW of {n_tokens}")
            try:
                if name is not None and name != "RANG":
                    self.add(name, step.layer)
                launch()
            except BaseException as why:
                self.add(f"IN {step.name}", step.layer)
                self.dump(why)
                raise
            if name is not None:
                self.add("SERVED" if name != "RANG" else name, step.layer)
            if last:
                self.add("DONE")

        return replace(step, launch=run)
