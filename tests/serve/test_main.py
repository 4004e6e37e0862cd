"""strata serve as a person starts it: refusals in one line, and a stop that loses nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from strata import cli
from tests.serve.kit import messages
from tests.serve.test_demo_model import MODEL


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.gguf"], ["nowhere.gguf", "No such file"]),
        ([str(MODEL), "--host", "0.0.0.0"], ["0.0.0.0", "--api-key"]),
        ([str(MODEL), "--port", "99999"], ["--port 99999", "65535"]),
        ([str(MODEL), "--prot", "1"], ["--prot", "--port"]),
        ([str(MODEL), "--host", "no.such.host.invalid", "--api-key", "k"], ["no.such.host"]),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("strata: ") and err.count("\n") == 1
    assert all(word in err for word in words)


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(MODEL), "--port", str(port)]) == 2
    assert "in use" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    """The engine's own message, exit code 2; asked for nothing that a restart could mend."""
    command = [sys.executable, "-m", "strata.cli", "serve", str(MODEL), "--port", "0"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--ram-gb", "0.001"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "does not fit" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_park_folder_that_cannot_be(tmp_path: Path, place: str) -> None:
    """Exit code 2 and, behind the line of the start, one that names the option and the place."""
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    command = [sys.executable, "-m", "strata.cli", "serve", str(MODEL), "--port", "0"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--park-dir", str(tmp_path / place)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = [line for line in done.stderr.splitlines() if "answers; loading" not in line]
    assert f"--park-dir {tmp_path / place}" in last[-1], done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_stop_lets_the_answer_end_and_keeps_the_conversation(tmp_path: Path) -> None:
    """SIGTERM while an answer is streamed: it is completed, the exit code is 0, nothing is left
    running, and the conversation is in its folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "strata.cli", "serve", str(MODEL), "--device", "cpu"]
    command += ["--port", str(port), "--prompt-chunk", "16", "--park-dir", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        body = {**messages("What does the ls command do? " * 3), "max_tokens": 30, "stream": True}
        text = ""
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
            for piece in stream.iter_text():
                if not text:
                    process.send_signal(signal.SIGTERM)
                text += piece
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
        assert process.wait(30) == 0
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()
    assert len(list(tmp_path.glob("*.conversation"))) == 1


def test_the_http_process_imports_no_torch() -> None:
    code = "import sys, strata.cli_serve, strata.serve.main; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
