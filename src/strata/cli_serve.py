"""strata serve: a server with the APIs of OpenAI and Anthropic, and a page to chat and watch."""

from __future__ import annotations

from collections.abc import Sequence

from strata.cli_flags import SERVE, CommandParser, asked_settings
from strata.serve.main import serve


def main(arguments: Sequence[str]) -> int:
    """Serve a model until stopped."""
    parser = CommandParser("serve", "Serve a model over HTTP (OpenAI and Anthropic APIs).")
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_settings(SERVE)
    args = parser.read(arguments)
    return serve(args.model, asked_settings(args))
