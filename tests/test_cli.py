"""The command line without a model: dispatch, flags, errors, and run/chat/logpos over a scripted
engine.
"""

from __future__ import annotations

import io
import logging
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import strata
from strata import cli, cli_chat, cli_logpos, cli_run
from strata.cli_flags import ENGINE, REQUEST, SERVE, CommandParser, asked_settings
from strata.core.errors import EngineError, InputError, NumericsError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import Effective
from strata.engine.model import Model
from strata.experts.service import RowCounters
from strata.window.run import PLAIN
from tests.engine.scripted import ALPHABET, EOS, ScriptedEngine, V

ROOT = Path(__file__).resolve().parents[1]
USER, ASSISTANT, SYSTEM = 30, 31, 32
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}


class LetterTokenizer:
    """One character a token; messages become role, text, end of turn."""

    strip_space = False
    eos_ids = (EOS,)

    def __init__(self, chats: bool) -> None:
        self.has_chat_template = chats

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(c) for c in text]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        out = []
        for message in messages:
            out += [ROLES[message["role"]], *self.encode(message["content"]), EOS]
        return [*out, ASSISTANT]

    def token_bytes(self, token: int) -> bytes:
        return ALPHABET[token].encode() if token < len(ALPHABET) else b""

    def is_control(self, token: int) -> bool:
        return token >= len(ALPHABET)


class ScriptedModelEngine(ScriptedEngine):
    """What Model needs besides windows."""

    def __init__(
        self, row: Callable[[Sequence[int]], np.ndarray], chats: bool, **more: Any
    ) -> None:
        super().__init__(row, more.pop("context_tokens", 200))
        draft = "lookup" if more.get("spec", 1) > 1 else "none"
        self.settings = Settings(device="cpu", draft=draft, **more)
        self.spec = SimpleNamespace(eos_tokens=(EOS,))
        self.tokenizer = LetterTokenizer(chats)
        self.report = ["a start-up line"]
        self.service = SimpleNamespace(counters=RowCounters())
        self.runner = SimpleNamespace(variant=PLAIN)
        self.adapter = None
        self.closed = False

    def run_window(self, tokens: Sequence[int]) -> np.ndarray:
        window = self.verify(tokens)
        return np.stack([window.row(t) for t in range(len(tokens))])

    def commit(self, n: int) -> None:
        assert not self.closed
        super().commit(n)

    def close(self) -> None:
        self.closed = True


def answers(text: str) -> Callable[[Sequence[int]], np.ndarray]:
    """A model that writes this text after the last assistant mark (or after a plain text)."""

    def row(tokens: Sequence[int]) -> np.ndarray:
        turn = [i for i, token in enumerate(tokens) if token == ASSISTANT]
        at = len(tokens) - 1 - turn[-1] if turn else len(tokens) - 1
        out = np.zeros(V, np.float32)
        out[ALPHABET.index(text[at]) if at < len(text) else EOS] = 9
        return out

    return row


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ScriptedModelEngine]]:
    """Replace model loading of the commands; returns the engines that get opened."""

    def install(
        row: Callable[[Sequence[int]], np.ndarray], chats: bool = True, **more: Any
    ) -> list[ScriptedModelEngine]:
        engines: list[ScriptedModelEngine] = []

        @contextmanager
        def open_model(
            path: str, asked: Effective, *, quiet: bool, check: object
        ) -> Iterator[Model]:
            given = {
                name: getattr(asked.settings, name)
                for name in SETTINGS
                if asked.asked(name) and name not in ("device", "draft")
            }
            engine = ScriptedModelEngine(row, chats, **{**more, **given})
            engines.append(engine)
            with Model(engine) as model:  # type: ignore[arg-type]
                yield model

        for module in (cli_run, cli_chat, cli_logpos):
            monkeypatch.setattr(module, "open_model", open_model)
        return engines

    return install


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# --- dispatch and errors ---


def test_version_equals_the_project_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"strata {strata.__version__}\n"
    assert f'version = "{strata.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_version_and_help_load_no_torch() -> None:
    code = (
        "import sys, strata.cli as c; c.main(['--version']); c.main(['-h']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_help_lists_every_command_and_each_has_a_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["-h"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"  {command} " in text
        assert (ROOT / "src" / "strata" / f"cli_{command}.py").exists()
    assert cli.main([]) == 2


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "-h"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: strata {command}" in text
    if command != "inspect":
        assert "--prompt-chunk" in text and "tokens, default auto" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "unknown command 'rnu'; did you mean 'run'?"),
        (["run", "m", "hi", "--temprature", "1"], "--temprature; did you mean '--temperature'?"),
        (["run", "m", "hi", "--temprature=1"], "--temprature; did you mean '--temperature'?"),
        (["run", "m", "hi", "there"], "unexpected argument 'there'"),
        (["run", "m", "hi", "--spec", "12"], "--spec 12: must be between 1 and 8"),
        (["run", "m", "hi", "--kv"], "expected one argument"),
        (["run", "m", "hi", "--raw", "--system", "x"], "--raw and --system exclude each other"),
        (["run"], "MODEL"),
        (["plan", "m", "--temperature", "1"], "--temperature has no effect here"),
        (["logpos", "m", "--text", "t"], "--out"),
        (["logpos", "m", "--text", __file__, "--out", "o", "--top", "300"], "--top 300: must be"),
        (["logpos", "m", "--text", __file__, "--out", "o", "--window", "9"], "--window 9: must be"),
        (["logpos", "m", "--text", "nowhere.txt", "--out", "o"], "nowhere.txt: No such file"),
        (["explain", "m", "--window", "x"], "--window x: must be between 1 and 8"),
        (["inspect", "nowhere.gguf"], "nowhere.gguf"),
        (["run", "nowhere.gguf", "hi", "--device", "cpu"], "nowhere.gguf"),
        (["plan", "nowhere.gguf", "--device", "cpu"], "nowhere.gguf"),
        (["run", "m", "hi", "--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_mistakes_are_one_clear_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and err.startswith("strata: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("a\nb"), 1),
        (SettingError("x"), 2),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 1),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(given: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main([]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_warnings_of_the_library_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(given: list[str]) -> int:
        logging.getLogger("strata.formats.anything").info("unheard")
        logging.getLogger("strata.formats.anything").warning("odd file")
        return 0

    monkeypatch.setattr(cli, "_dispatch", warn)
    assert cli.main([]) == 0
    assert capsys.readouterr().err == "warning: odd file\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "import sys; from strata import cli\n"
        "def endless(given):\n    while True: print('x' * 1000)\n"
        "cli._dispatch = endless; sys.exit(cli.main([]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(30) == cli.PIPE_CLOSED
    assert process.stderr.read() == b""
    process.stderr.close()


# --- flags ---


def test_the_command_line_is_the_settings_table() -> None:
    """Every setting has its flag, in the group of its scope, and no other flag sets a setting."""
    parser = CommandParser("serve", "")
    parser.add_settings(SERVE)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    extra = {"-h", "--help", "--config"}
    extra |= {f"--no-{i.flag[2:]}" for i in SETTINGS.values() if isinstance(i.default, bool)}
    assert flags - extra == {info.flag for info in SETTINGS.values()}
    engine_only = CommandParser("plan", "")
    engine_only.add_settings(ENGINE)
    dests = {action.dest for action in engine_only._actions}
    assert {i.name for i in SETTINGS.values() if i.scope == "engine"} <= dests
    assert "temperature" not in dests


def test_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_TOP_K", "7")
    parser = CommandParser("run", "")
    parser.add_settings(REQUEST)
    line = (
        "--spec 4 --stop a --stop b --logit-bias 5=-1 --logit-bias 6=2 --poison --top-p 0.5 "
        "--frequency-penalty -0.5"
    )
    asked = asked_settings(parser.read(line.split()))
    expected = Settings(
        spec=4, stop=("a", "b"), logit_bias={5: -1, 6: 2}, poison=True, top_p=0.5, top_k=7,
        frequency_penalty=-0.5,
    )  # fmt: skip
    assert asked.settings == expected
    assert asked.sources["spec"] == "--spec"
    assert asked.sources["top_k"] == "environment STRATA_TOP_K"
    assert asked_settings(parser.read(["--no-poison"])).sources["poison"] == "--poison"


# --- run ---


def test_run_streams_the_answer(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engines = scripted(answers("hello there"))
    assert cli.main(["run", "m", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello there\n"
    assert "mode: chat" in err and "no drafts offered" in err and "finish stop" in err
    assert engines[0].closed
    prompt = [USER, *LetterTokenizer(True).encode("hi"), EOS, ASSISTANT]
    assert engines[0].n_read == [len(prompt)]
    assert engines[0].tokens == prompt + LetterTokenizer(True).encode("hello there")


@pytest.mark.parametrize("chats", [True, False])
def test_run_raw_or_without_template_continues_the_text(
    chats: bool, scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = scripted(answers("xbcd"), chats=chats)
    assert cli.main(["run", "m", "a", *(["--raw"] if chats else [])]) == 0
    out, err = capsys.readouterr()
    assert out == "xbcd\n" and "mode: plain text" in err
    assert engines[0].n_read == [1]


def test_run_quiet_says_nothing_else(scripted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(answers("ok"))
    assert cli.main(["run", "m", "hi", "--quiet", "--max-tokens", "1"]) == 0
    assert capsys.readouterr() == ("o\n", "")


def test_run_reads_standard_input_and_a_system_message(
    scripted: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = scripted(answers("ok"))
    typed("from a pipe")
    assert cli.main(["run", "m", "--system", "be brief", "--quiet"]) == 0
    assert engines[0].n_read == [len("be brief") + len("from a pipe") + 5]
    assert capsys.readouterr().out == "ok\n"


def test_run_on_a_broken_number_ends_with_code_1(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(tokens: Sequence[int]) -> np.ndarray:
        out = answers("hello")(tokens)
        if len(tokens) > 7:
            out[0] = np.nan
        return out

    scripted(row)
    assert cli.main(["run", "m", "hi", "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "hel\n" and err.startswith("strata: the logits for position 8 hold nan")


def test_run_refuses_a_prompt_beyond_the_context(
    scripted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """C24: both counts, nothing generated."""
    engines = scripted(answers("x"), context_tokens=10)
    assert cli.main(["run", "m", "a" * 11, "--raw", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "11 tokens" in err and "10" in err
    assert engines[0].n_read == []


# --- chat ---


def test_chat_keeps_the_conversation_and_its_state(
    scripted: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = scripted(answers("hello"))
    typed("one\n\ntwo\n/stats\n/nosuch\n/new\nthree\n")
    assert cli.main(["chat", "m", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\nhello\nhello\n"
    first = 1 + 3 + 2
    kept = first + len("hello")
    second = kept + 1 + 1 + 3 + 2  # end of turn, role, text, end of turn, assistant
    assert f"prompt: {second} tokens, {kept} reused" in err
    assert "unknown command /nosuch" in err
    assert engines[0].n_read == [first, second - kept, 1 + 5 + 2]


def test_chat_survives_a_refused_turn(
    scripted: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(answers("ok"), context_tokens=30)
    typed(f"{'a' * 40}\nshort\n/exit\nnever\n")
    assert cli.main(["chat", "m", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == "ok\n" and "43 tokens" in err


def test_chat_drops_a_turn_with_a_broken_number_and_goes_on(
    scripted: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [True]

    def row(tokens: Sequence[int]) -> np.ndarray:
        out = answers("hello")(tokens)
        if broken[0] and len(tokens) == 9:
            broken[0] = False
            out[0] = np.nan
        return out

    scripted(row)
    typed("one\none\n")
    assert cli.main(["chat", "m", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "hello" and err.count("the turn is dropped") == 1


def test_interrupting_an_answer_keeps_what_was_shown(
    scripted: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the third character is computed: it is the last one; the next turn reuses it."""

    def row(tokens: Sequence[int]) -> np.ndarray:
        if len(tokens) == 8 and tokens[-1] != EOS:
            signal.raise_signal(signal.SIGINT)
        return answers("hello")(tokens)

    engines = scripted(row)
    typed("one\ntwo\n/stats\n")
    assert cli.main(["chat", "m", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == "hel\nhello\n"
    assert "8 reused" in err and len(engines[0].n_read) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupting_a_prompt_drops_the_turn(
    scripted: Any, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(tokens: Sequence[int]) -> np.ndarray:
        if list(tokens[:1]) == [USER] and len(tokens) == 8:
            signal.raise_signal(signal.SIGINT)
        return answers("ok")(tokens)

    scripted(row)
    typed("fiver\nyes\n")
    assert cli.main(["chat", "m", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "ok" and "interrupted before the answer" in err


# --- logpos ---


@pytest.mark.parametrize("window", ["1", "4", None])
def test_logpos_writes_a_line_for_each_token(
    window: str | None, scripted: Any, tmp_path: Path
) -> None:
    scripted(answers("bcdefg"))
    text = tmp_path / "text.txt"
    text.write_text("abcdxfg")
    out = tmp_path / "out.tsv"
    arguments = ["logpos", "m", "--text", str(text), "--out", str(out), "--top", "3", "--quiet"]
    assert cli.main([*arguments, *(["--window", window] if window else ["--spec", "2"])]) == 0
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    assert [int(line[0]) for line in lines] == list(range(7))
    targets = [*LetterTokenizer(False).encode("bcdxfg"), -1]
    assert [int(line[1]) for line in lines] == targets
    # the scripted row: 9 for one token, 0 for the other 39
    likely = 9 - math.log(math.exp(9) + 39)
    assert [line[5] for line in lines] == ["1", "1", "1", "0", "1", "1", "0"]
    assert float(lines[0][2]) == pytest.approx(likely, abs=1e-9)
    assert float(lines[3][2]) == pytest.approx(likely - 9, abs=1e-9)
    assert all(len(line) == 8 + 3 for line in lines)


def test_logpos_refuses_empty_and_too_long_texts(
    scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(answers("x"), context_tokens=10)
    text, out = tmp_path / "text.txt", tmp_path / "out.tsv"
    arguments = ["logpos", "m", "--text", str(text), "--out", str(out), "--quiet"]
    for content, message in (("", "empty"), ("a" * 11, "11 tokens")):
        text.write_text(content)
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err
    text.write_bytes(b"ab\xff")
    assert cli.main(arguments) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert not out.exists() or out.read_text() == ""


# --- the model object ---


def scripted_model(text: str, **more: Any) -> Model:
    return Model(ScriptedModelEngine(answers(text), True, **more))  # type: ignore[arg-type]


def test_generate_takes_text_ids_and_messages() -> None:
    model = scripted_model("hello", max_tokens=20)
    ids = LetterTokenizer(True).encode("a")
    for prompt, expected in (("a", "hello"), (ids, "hello"), (np.array(ids), "hello")):
        assert "".join(e.text for e in model.generate(prompt)) == expected
    chat = model.generate([{"role": "user", "content": "hi"}], max_tokens=3)
    assert "".join(e.text for e in chat) == "hel" and chat.report.finish == "length"
    with pytest.raises(InputError, match="a prompt is a text"):
        model.generate([object()])  # type: ignore[list-item]


def test_generate_refuses_unknown_and_engine_settings() -> None:
    model = scripted_model("x")
    with pytest.raises(SettingError, match="did you mean 'temperature'"):
        model.generate("a", temprature=1)
    with pytest.raises(SettingError, match="fixed when a model is loaded"):
        model.generate("a", workers=2)


def test_logpos_setting_writes_while_generating(tmp_path: Path) -> None:
    out = tmp_path / "out.tsv"
    with scripted_model("hello", logpos=out, logpos_top=2, max_tokens=4) as model:
        list(model.generate("a"))
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    # the first token comes from the prompt, not from a window
    assert [line[0] for line in lines] == ["1", "2", "3"]
    assert [int(line[1]) for line in lines] == LetterTokenizer(True).encode("ell")
    assert all(len(line) == 10 for line in lines)


def test_closing_ends_an_answer_in_progress_first() -> None:
    model = scripted_model("hello")
    engine: Any = model.engine
    answer = model.generate("a")
    seen = [next(answer).token for _ in range(3)]
    model.close()
    assert engine.closed and engine.tokens == [*LetterTokenizer(True).encode("a"), *seen[:2]]
    with pytest.raises(EngineError):
        next(answer)
    model.close()


def test_a_failed_answer_leaves_the_model_usable() -> None:
    model = scripted_model("hello")
    engine: Any = model.engine
    good = engine.row

    def broken(tokens: Sequence[int]) -> np.ndarray:
        return np.full(V, np.nan, np.float32)

    engine.row = broken
    with pytest.raises(NumericsError):
        list(model.generate("a"))
    engine.row = good
    assert "".join(e.text for e in model.generate("a")) == "hello"
