"""strata inspect: metadata, tensors, types and sizes of a model file, also of one that cannot be
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from strata.cli_flags import CommandParser
from strata.formats.inspect import describe, render


def main(arguments: Sequence[str]) -> int:
    """Describe a checkpoint."""
    parser = CommandParser("inspect", "Show what is in a model file, split set or folder.")
    parser.add_argument("file", metavar="FILE", help="GGUF or safetensors file, part, or folder")
    parser.add_argument("--no-tensors", action="store_true", help="leave the list of tensors out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.read(arguments)
    description = describe(args.file)
    if args.json:
        print(json.dumps(asdict(description), indent=1, default=str))
    else:
        print("\n".join(render(description, tensors=not args.no_tensors)))
    return 0
