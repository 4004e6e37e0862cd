"""Load on a running server: requests at a given rate, whatever the server makes of them.

Arrivals are drawn beforehand (exponential gaps, by seed) and times count from when a request was
due, so a server that falls behind is not spared. Speaks the OpenAI chat API over HTTP and knows
nothing else of the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core.errors import InputError, UnsupportedError

try:
    import httpx
except ImportError:  # it belongs to the extra "test"; require_httpx says so
    httpx = None  # type: ignore[assignment]

_WORDS = (
    "river", "stone", "lamp", "winter", "copper", "garden", "letter", "window", "engine", "paper",
    "forest", "harbour", "silver", "morning", "bridge", "kettle", "mountain", "orchard", "violin",
)  # fmt: skip
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Load:
    """rate: requests a second. abort_share: of requests whose client leaves after a few pieces.
    timeout_s: for one request, from when it was due."""

    url: str
    rate: float = 1.0
    requests: int = 20
    prompt_words: int = 50
    max_tokens: int = 64
    abort_share: float = 0.0
    timeout_s: float = 120.0
    api_key: str = ""
    model: str = ""
    seed: int = 0


@dataclass
class Outcome:
    """One request. Times in seconds since it was due; kind: "ok", "aborted" or what went wrong."""

    kind: str = "ok"
    late_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    pieces: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    finish: str = ""

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


def require_httpx() -> None:
    """UnsupportedError when the client library is not installed."""
    if httpx is None:
        raise UnsupportedError("strata bench serve needs the package httpx: pip install httpx")


def arrivals(load: Load) -> list[float]:
    """When each request is due, in seconds from the begin."""
    dice = random.Random(load.seed)
    due, now = [], 0.0
    for _ in range(load.requests):
        due.append(now)
        now += dice.expovariate(load.rate)
    return due


def prompt(load: Load, n: int) -> str:
    """The text of request n: varied words, and its number, so that no two are alike."""
    dice = random.Random(f"{load.seed}/{n}")
    words = " ".join(dice.choice(_WORDS) for _ in range(load.prompt_words))
    return f"Request {n}. Go on with this list of words: {words}"


def run(load: Load) -> dict[str, Any]:
    """Carry the load out; the report (see ``report``). InputError when nobody answers there."""
    require_httpx()
    return asyncio.run(_run(load))


async def _run(load: Load) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=load.url.rstrip("/"), headers=headers, limits=limits, timeout=load.timeout_s
    ) as client:
        model = load.model or await _model(client)
        begin = time.perf_counter()
        tasks = [
            asyncio.create_task(_one(client, load, model, n, begin + due))
            for n, due in enumerate(arrivals(load))
        ]
        outcomes = await asyncio.gather(*tasks)
        return report(load, outcomes, time.perf_counter() - begin)


async def _model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{client.base_url}: no model answers there ({error})") from None


async def _one(client: httpx.AsyncClient, load: Load, model: str, n: int, due: float) -> Outcome:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    outcome = Outcome(late_s=max(0.0, time.perf_counter() - due))
    leaves = random.Random(f"{load.seed}/abort/{n}").random() < load.abort_share
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt(load, n)}],
        "max_tokens": load.max_tokens,
        "seed": load.seed + n,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with asyncio.timeout(load.timeout_s):
            await _stream(client, body, outcome, due, 3 if leaves else None)
    except TimeoutError:
        outcome.kind = "timeout"
    except httpx.TimeoutException:
        outcome.kind = "timeout"
    except httpx.ConnectError:
        outcome.kind = "connect"
    except httpx.HTTPError:
        outcome.kind = "broken connection"
    return outcome


async def _stream(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    outcome: Outcome,
    due: float,
    leave_after: int | None,
) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            outcome.kind = f"http {response.status_code}"
            await response.aread()
            return
        async for event in _events(response):
            if "error" in event:
                outcome.kind = "error event"
                return
            _note(outcome, event, time.perf_counter() - due)
            if leave_after is not None and outcome.pieces >= leave_after:
                outcome.kind = "aborted"
                return
    if not outcome.finish:
        outcome.kind = "cut stream"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _note(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            outcome.first_s = now if outcome.first_s is None else outcome.first_s
            outcome.last_s = now
            outcome.pieces += 1
        outcome.finish = choice.get("finish_reason") or outcome.finish
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        outcome.reused_tokens = details.get("cached_tokens") or 0


def percentile(values: Sequence[float], p: int) -> float | None:
    """The smallest value that at least p % of all do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)]


def report(load: Load, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Counts by kind, percentiles in milliseconds, tokens; for JSON."""
    good = [o for o in outcomes if o.kind == "ok"]

    def spread(values: Sequence[float | None]) -> dict[str, float | None]:
        known = [1e3 * value for value in values if value is not None]
        return {f"p{p}": percentile(known, p) for p in PERCENTILES}

    return {
        "url": load.url,
        "rate": load.rate,
        "requests": load.requests,
        "prompt_words": load.prompt_words,
        "max_tokens": load.max_tokens,
        "seed": load.seed,
        "seconds": seconds,
        "outcomes": dict(Counter(o.kind for o in outcomes).most_common()),
        "finishes": dict(Counter(o.finish for o in good).most_common()),
        "first_token_ms": spread([o.first_s for o in good]),
        "token_ms": spread([o.token_s for o in good]),
        "request_ms": spread([o.last_s for o in good]),
        "generator_late_ms": spread([o.late_s for o in outcomes]),
        "prompt_tokens": sum(o.prompt_tokens for o in good),
        "reused_tokens": sum(o.reused_tokens for o in good),
        "tokens": sum(o.tokens for o in good),
        "tokens_s": sum(o.tokens for o in good) / seconds if seconds > 0 else 0.0,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    outcomes = ", ".join(f"{n} {kind}" for kind, n in found["outcomes"].items())

    def row(name: str, key: str) -> str:
        values = found[key].values()
        cells = "".join(f"{'-' if v is None else format(v, '.1f'):>12}" for v in values)
        return f"{name:<24}{cells}"

    return [
        f"{found['requests']} requests at {found['rate']:g} a second in {found['seconds']:.1f} s: "
        f"{outcomes}",
        f"{'milliseconds':<24}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES),
        row("to the first token", "first_token_ms"),
        row("a token after it", "token_ms"),
        row("whole answer", "request_ms"),
        row("generator was late", "generator_late_ms"),
        f"{found['tokens']} tokens written, {found['tokens_s']:.1f} a second; prompts "
        f"{found['prompt_tokens']} tokens, {found['reused_tokens']} reused",
    ]
