"""strata bench serve: time to the first token and a token on a running server, under load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from strata.bench.serve import Load, lines, require_httpx, run
from strata.cli_flags import CommandParser
from strata.core.errors import SettingError


def main(arguments: Sequence[str]) -> int:
    """Put load on a server, print a table; 1 when a request failed."""
    parser = CommandParser("bench serve", str(__doc__))
    parser.add_argument("url", help="address of the server, as http://127.0.0.1:8080")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (1)")
    parser.add_argument("--requests", type=int, default=20, help="how many (20)")
    parser.add_argument("--prompt-words", type=int, default=50, help="words in a prompt (50)")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer (64)")
    parser.add_argument(
        "--abort-share", type=float, default=0.0, help="share of clients that leave"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a request (120)")
    parser.add_argument("--api-key", default="", help="the server's key")
    parser.add_argument("--model", default="", help="name of the model (the server's first)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (0)")
    parser.add_argument("--json", help="write the report to this file")
    args = parser.read(arguments)
    require_httpx()
    for name, least in (("rate", 0.001), ("requests", 1), ("prompt_words", 1), ("max_tokens", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise SettingError(f"--{flag} {getattr(args, name)}: must be {least} or more")
    if not 0 <= args.abort_share <= 1:
        raise SettingError(f"--abort-share {args.abort_share}: must be between 0 and 1")
    if not args.url.startswith(("http://", "https://")):
        raise SettingError(f"{args.url}: the address must begin with http:// or https://")
    found = run(
        Load(
            args.url,
            args.rate,
            args.requests,
            args.prompt_words,
            args.max_tokens,
            args.abort_share,
            args.timeout,
            args.api_key,
            args.model,
            args.seed,
        )
    )
    print("\n".join(lines(found)))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(kind not in ("ok", "aborted") for kind in found["outcomes"]))
