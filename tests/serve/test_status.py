"""C45: what was asked for and got in part is said with numbers and reasons, in the status and in
every response that it concerns."""

from __future__ import annotations

from pathlib import Path

from strata.serve.model_text import ModelText, read_model_text
from strata.serve.status import features
from tests.serve.kit import running
from tests.serve.test_demo_model import ENGINE, MODEL


def test_c45_asked_for_all_got_some() -> None:
    """The demo model has 12 expert layers; the last one and the one before the n-gram block cannot
    be late."""
    with running(None, None, model=str(MODEL), defer_cpu="1", **ENGINE) as server:
        status = server.status
        (line,) = [x for x in status["report"] if "may be late" in x]
        assert " of 12 expert layers" in line and int(line.split(" of ")[1].split()[-1]) < 12
        assert status["mode"]["exact"] is False
        assert "defer_cpu" in status["mode"]["changes_output"]
        (feature,) = [f for f in status["features"] if f["name"] == "defer-cpu"]
        assert feature["state"] == "on (changes the output)"
        answer = server.chat("What does ls do?", max_tokens=3)
        mode = answer["strata"]["answers"][0]["mode"]
        assert mode != "exact" and answer["system_fingerprint"].endswith(mode)
        exact = server.chat("What does ls do?", max_tokens=3, overlap="exact")
        assert exact["strata"]["answers"][0]["mode"] == "exact"


def test_each_answer_says_where_its_time_went() -> None:
    """--decode-timing gives a line for each answer (its help); a mode names all that changes the
    output; Anthropic's route takes ``overlap`` as the others do."""
    lossy = {"defer_cpu": "1", "route_tail_skip": 7, "decode_timing": True}
    with running(None, None, model=str(MODEL), **lossy, **ENGINE) as server:
        (own,) = server.chat("What does ls do?", max_tokens=3)["strata"]["answers"]
        assert own["mode"] == "skip-7+defer-1"
        (line,) = own["notes"]
        assert line.startswith("decode timing: ") and server.status["last"]["notes"] == [line]
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        told = server.post("/v1/messages", {**body, "overlap": "exact"})
        assert told.status_code == 200 and server.status["last"]["mode"] == "exact"
        told = server.post("/v1/messages", {**body, "overlap": "most"})
        assert told.status_code == 400 and "overlap" in told.text


def test_features_are_read_from_the_report() -> None:
    report = [
        "models: x, 3 layers",
        "device = cpu (--device): on",
        "defer-cpu = 1 (environment STRATA_DEFER_CPU): off here: no layer can",
        "top-k = 5 (file a.toml): on (changes the output)",
    ]
    assert features(report) == [
        {"name": "device", "value": "cpu", "source": "--device", "state": "on"},
        {
            "name": "defer-cpu",
            "value": "1",
            "source": "environment STRATA_DEFER_CPU",
            "state": "off here: no layer can",
        },
        {
            "name": "top-k",
            "value": "5",
            "source": "file a.toml",
            "state": "on (changes the output)",
        },
    ]


def test_the_servers_own_settings_are_shown_as_they_are(tmp_path: Path) -> None:
    """C44: the engine does not know them, so their defaults must not stand for them."""
    script = {"answers": []}
    with running(tmp_path, script, max_queue=6, api_key="secret", wait=False) as server:
        status = server.status
    row = status["settings"]["max_queue"]
    assert row["value"] == status["server"]["max_queue"] == "6" and row["source"] != "default"
    assert "secret" not in str(status)


def test_c39_the_model_is_described_while_it_loads(tmp_path: Path) -> None:
    """What is said before the engine is there is what is said afterwards."""
    script = {"answers": [], "load_s": 1.5, "context": 700}
    with running(tmp_path, script, context=700, wait=False) as server:
        (listed,) = server.get("/v1/models").json()["data"]
        status = server.status
        assert not status["ready"] and (listed["context_length"], listed["type"]) == (700, "chat")
        assert (status["model"]["context_tokens"], status["model"]["type"]) == (700, "chat")
        server.wait_ready()
        assert server.get("/v1/models").json()["data"] == [listed]


def test_what_is_known_of_a_model_from_its_file() -> None:
    """The demo model was made for 2048 tokens (its GGUF says so); of an unread one nothing is."""
    assert read_model_text(str(MODEL)).context_tokens == 2048
    assert ModelText("x", why_not="").kind is None and ModelText("x").kind == "completion"
