"""python -m strata.serve.engine_process FD: the engine process. FD: its end of the pipe."""

from __future__ import annotations

import os
import signal
import sys

from strata.core.log import log_to
from strata.serve.engine_loop import EngineLoop
from strata.serve.model_backend import ModelBackend
from strata.serve.pipe import Pipe


def main(arguments: list[str]) -> int:
    """Serve one HTTP process until it says stop or is gone."""
    # a terminal's Ctrl-C goes to the whole group; the HTTP process decides when we end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to(quiet=True)
    return EngineLoop(Pipe(int(arguments[0])), ModelBackend()).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking the interpreter apart would only take time
