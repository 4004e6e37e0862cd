"""The whole server on the demo model: cases C19, C25, C36, and structured output that is real.

Expected texts come from the model through the Python API, with nothing kept and one request.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import strata
from tests.serve.kit import Running, content, messages
from tests.serve.test_faults import raw_request, read_chunks

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-flash-next-Q8_0.gguf"
CHAT = "/v1/chat/completions"
ENGINE = {"device": "cpu", "context": 1024, "prompt_chunk": 64, "workers": 1}
MARKERS = ["apple", "brick", "cloud", "delta", "ember", "flint", "grape", "house"]
PROMPTS = [f"Write about {word}. What does the command {word} do?" for word in MARKERS]
N = 12


@pytest.fixture(scope="module", params=[1, 4])
def demo(request: pytest.FixtureRequest) -> Iterator[Running]:
    server = Running(None, None, model=str(MODEL), spec=request.param, **ENGINE)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def fresh() -> Iterator[strata.Model]:
    """A model that keeps nothing; forget before each use."""
    with strata.load(MODEL, checkpoints=0, park_gb=0, **ENGINE) as model:
        yield model


@pytest.fixture(scope="module")
def solo(fresh: strata.Model) -> dict[str, str]:
    """Each prompt on its own."""
    texts = {}
    for prompt in PROMPTS:
        fresh.session.forget()
        events = fresh.generate([{"role": "user", "content": prompt}], max_tokens=N)
        texts[prompt] = "".join(event.text for event in events)
    return texts


def test_c36_no_mixing_between_requests(demo: Running, solo: dict[str, str]) -> None:
    """Sent together, some left: every answer is its solo run, and only known texts appear."""
    rng = random.Random(36)
    got: dict[str, list[str]] = {prompt: [] for prompt in PROMPTS}

    def ask(prompt: str, leave: bool) -> None:
        body = {**messages(prompt), "max_tokens": N}
        if leave:
            sock = raw_request(demo, {**body, "stream": True})
            read_chunks(sock, 2)
            sock.close()
        else:
            got[prompt].append(demo.text(prompt, max_tokens=N))

    jobs = [(p, rng.random() < 0.4) for p in PROMPTS] + [(p, False) for p in PROMPTS]
    threads = [threading.Thread(target=ask, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for prompt, texts in got.items():
        assert texts and set(texts) == {solo[prompt]}
    assert len(set(solo.values())) > 4


def test_c19_the_same_prompt_three_times(demo: Running, solo: dict[str, str]) -> None:
    prompt = PROMPTS[0]
    answers = [demo.chat(prompt, max_tokens=N) for _ in range(3)]
    assert {a["choices"][0]["message"]["content"] for a in answers} == {solo[prompt]}
    assert all(a["strata"]["answers"][0]["mode"] == "exact" for a in answers)
    assert demo.status["mode"]["exact"] is True and demo.status["mode"]["changes_output"] == []


def test_c25_reuse_that_is_right_and_explains_itself(demo: Running, fresh: strata.Model) -> None:
    """A second turn equals that of a fresh model; a change is named by its position; the same
    prompt again rereads at most one chunk."""
    long = "The ls command lists files. " * 30
    first = [{"role": "user", "content": long}]
    body = {"messages": first, "max_tokens": N}
    one = demo.post(CHAT, body).json()
    again = demo.post(CHAT, body).json()
    assert again["choices"] == one["choices"]
    used = again["usage"]
    reused = used["prompt_tokens_details"]["cached_tokens"]
    assert 0 < used["prompt_tokens"] - reused <= ENGINE["prompt_chunk"]
    reply = one["choices"][0]["message"]["content"]
    turn = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": "More."}]
    two = demo.post(CHAT, {"messages": turn, "max_tokens": N}).json()
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    changed = [{"role": "user", "content": long.replace("ls", "cp", 8)[:-9]}]
    three = demo.post(CHAT, {"messages": changed, "max_tokens": N}).json()
    report = three["strata"]["answers"][0]
    ids = [demo.post("/tokenize", {"messages": m}).json()["tokens"] for m in (turn, changed)]
    differs = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert report["first_difference"] == differs
    assert report["reused_tokens"] <= differs
    for given, answer in ((turn, two), (changed, three)):
        fresh.session.forget()
        text = "".join(e.text for e in fresh.generate(given, max_tokens=N))
        assert answer["choices"][0]["message"]["content"] == text


def test_a_schema_is_obeyed_by_a_model_that_knows_none(demo: Running) -> None:
    """The masks enter windows: the same bytes come out of windows of 1 and 4, streamed or not."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ls", "cp"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {**messages("What does ls do?"), "response_format": form, "max_tokens": 60}
    choice = demo.post(CHAT, body).json()["choices"][0]
    value = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert value["name"] in ("ls", "cp") and value["n"] <= 9
    assert content(demo.chunks(CHAT, body)) == choice["message"]["content"]


def test_status_says_what_is_in_effect(demo: Running) -> None:
    status = demo.status
    assert status["model"]["family"] == "qwen4_exp" and status["plan"]["fits"]
    named = {f["name"]: f for f in status["features"]}
    assert named["device"]["state"] == "on"
    assert status["settings"]["context"]["value"] == "1024"
    assert sum(map(sum, status["rows"].values())) > 0
    assert len(status["timeline_ms"]) == status["model"]["layers"]
    assert demo.metric("strata:routed_rows_total") > 0
