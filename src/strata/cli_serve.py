"""strata serve: a server with the APIs of OpenAI and Anthropic, and a page to chat and watch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from strata.cli_flags import SERVE, CommandParser, asked_settings
from strata.serve.early import EarlyPort, listen, require_servable


def main(arguments: Sequence[str]) -> int:
    """Serve a model until stopped."""
    parser = CommandParser("serve", "Serve a model over HTTP (OpenAI and Anthropic APIs).")
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_settings(SERVE)
    args = parser.read(arguments)
    asked = asked_settings(args)
    require_servable(args.model, asked.settings)
    with EarlyPort(listen(asked.settings.host, asked.settings.port)) as port:
        # a second of imports, during which the port answers already
        server = importlib.import_module("strata.serve.main")
        return int(server.serve(args.model, asked, port))
