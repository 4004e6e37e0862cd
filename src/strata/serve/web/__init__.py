"""The page at ``/``: chat and a live monitor. Three files, no build step, nothing from elsewhere.

``load_page()`` gives the files with their headers; a server answers GET on each path with them.
Text of the model only ever becomes DOM text nodes: no file here assigns innerHTML, and the policy
below forbids it to browsers (Trusted Types) along with inline scripts and other hosts.

What the page asks for, with ``Authorization: Bearer KEY`` once a key was typed in:

    POST /v1/chat/completions   stream, stream_options.include_usage; deltas' reasoning_content
    GET  /v1/models             data[0].id
    GET  /v1/status             once a second while the page is visible; 401 shows the key field

Keys of /v1/status that it shows, each of which may be missing:

    ready, phase, progress (0..1), detail         the line at the top until ready
    model.id, model.context_tokens
    mode.name, mode.exact, mode.changes_output[]  which settings change the output
    queue.running.generated, queue.waiting[]      tokens/s is the growth of ``generated``
    rows {PLACE: [rows of layer 0, ...]}          PLACE: FAST, PCIE, CPU, CPU_LATE, SKIPPED, REMOTE
    timeline_ms [[layer, ms since the window's begin], ...]
    plan.lines [{tier, owner, bytes}], plan.limits {tier: {bytes}}
    shares.hit_share, shares.late_share, shares.context_share
    settings.quality_budget.value                 nats, as text; the meter is shown when it is > 0
    quality {conditional_kl, _top1, _positions, cumulative_kl, ...}   the running meters
    features [{name, value, state}]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:",
    "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    "require-trusted-types-for 'script'", "trusted-types 'none'",
))  # fmt: skip
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/web/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/web/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/web/monitor.js": ("monitor.js", "text/javascript; charset=utf-8"),
    "/web/style.css": ("style.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True)
class Asset:
    """One file. headers: content type, policy, and not to be kept past a new version."""

    body: bytes
    headers: Mapping[str, str]


def load_page() -> dict[str, Asset]:
    """The page's files by path."""
    folder = Path(__file__).parent
    return {
        path: Asset(
            (folder / name).read_bytes(),
            {
                "content-type": kind,
                "content-security-policy": POLICY,
                "cache-control": "no-cache",
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
            },
        )
        for path, (name, kind) in _FILES.items()
    }
