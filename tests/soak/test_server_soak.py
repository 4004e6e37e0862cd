"""1,000 mixed requests with random aborts on the demo model (`make soak`).

No answer lost, none mixed up, every completed text that of its solo run, memory flat.
``mixed(n, window)`` runs fewer by hand.
"""

from __future__ import annotations

import ast
import random
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.kit import Running, content, messages, running, wait_for
from tests.serve.test_faults import raw_request, read_chunks

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-flash-next-Q8_0.gguf"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENGINE = {"device": "cpu", "context": 1024, "prompt_chunk": 64, "workers": 1, "max_queue": 64}
CLIENTS = 6
WARM_SHARE = 0.3
DRIFT = 0.02


def kinds(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """(what, route, body) of one request out of about 60 different ones."""
    topic = f"{rng.choice(['ls', 'cp', 'grep', 'tar', 'ssh'])} number {rng.randrange(4)}"
    n = rng.choice([1, 5, 12, 20])
    if rng.random() < 0.3:
        body: dict[str, Any] = {"prompt": f"The command {topic} is", "max_tokens": n}
        return "text", COMPLETIONS, body
    body = {**messages(f"What does {topic} do? " * rng.choice([1, 1, 12])), "max_tokens": n}
    if rng.random() < 0.2:
        body |= {"temperature": 0.9, "seed": 7}
    if rng.random() < 0.1:
        body |= {"stop": [" the", "."]}
    return "chat", CHAT, body


def solo(server: Running, what: str, route: str, body: dict[str, Any]) -> str:
    """The text of an answer given at once."""
    choice = server.post(route, body).json()["choices"][0]
    return str(choice["message"]["content"] if what == "chat" else choice["text"])


def one(server: Running, rng: random.Random, seen: dict[str, set[str]], lost: list[str]) -> None:
    """One request: at once, streamed, or left at a random place."""
    what, route, body = kinds(rng)
    key = repr((what, sorted(body.items(), key=str)))
    way = rng.random()
    if way < 0.25:
        if what == "chat":
            sock = raw_request(server, {**body, "stream": True})
            if rng.random() < 0.7:
                read_chunks(sock, rng.randrange(1, 3))
            sock.close()
        return
    try:
        if way < 0.6:
            chunks = server.chunks(route, body)
            text = content(chunks) if what == "chat" else _joined(chunks)
        else:
            text = solo(server, what, route, body)
    except Exception as error:
        lost.append(f"{key}: {error!r}")
        return
    seen.setdefault(key, set()).add(text)


def _joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"])


def memory(server: Running) -> int:
    """Bytes of both processes."""
    engine = psutil.Process(server.status["engine"]["pid"])
    return int(engine.memory_info().rss + psutil.Process().memory_info().rss)


@pytest.mark.soak
@pytest.mark.parametrize("window", [1, 4])
def test_mixed_requests(window: int) -> None:
    mixed(500, window)


def mixed(n_requests: int, window: int) -> dict[str, float]:
    """Run them; fails for any wrong answer. Facts for a report."""
    with running(None, None, model=str(MODEL), spec=window, park_gb=0.05, **ENGINE) as server:
        seen: dict[str, set[str]] = {}
        lost: list[str] = []
        counter = iter(range(n_requests))
        lock = threading.Lock()
        samples: list[int] = []

        def client(seed: int) -> None:
            rng = random.Random(seed)
            while True:
                with lock:
                    i = next(counter, None)
                if i is None:
                    return
                one(server, rng, seen, lost)
                if i % 20 == 0 and i >= WARM_SHARE * n_requests:
                    samples.append(memory(server))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(server.idle, 10)
        assert not lost, lost[:3]
        assert server.status["engine"]["faults"] == 0
        mixed_up = {key: texts for key, texts in seen.items() if len(texts) != 1}
        assert not mixed_up, mixed_up
    solo_texts(seen, window)
    third = max(1, len(samples) // 3)
    first, last = sum(samples[:third]) / third, sum(samples[-third:]) / third
    assert last < first * (1 + DRIFT), (first, last)
    return {"different": len(seen), "first_mib": first / 2**20, "last_mib": last / 2**20}


def solo_texts(seen: dict[str, set[str]], window: int) -> None:
    """Each on a server that keeps nothing, one after the other."""
    with running(
        None, None, model=str(MODEL), spec=window, checkpoints=0, park_gb=0.0, **ENGINE
    ) as server:
        for key, texts in seen.items():
            what, items = ast.literal_eval(key)
            route = CHAT if what == "chat" else COMPLETIONS
            assert texts == {solo(server, what, route, dict(items))}, key
