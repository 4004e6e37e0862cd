"""One scripted server for all tests that do not need one of their own: starting takes half a
second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.kit import Running

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "%s"}}\n</tool_call>'
SCRIPT = {
    "context": 3000,
    "control": ["<|role|>"],
    "template": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ '<|' + m.role + '|>' }}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' }}{{ c.function.arguments }}"
        "{% endfor %}{{ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
        "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    ),
    "answers": [
        {"when": "kettle", "write": [*"seven", " green", " kett", "les", " boil"]},
        {"when": "slow", "write": [f"w{i} " for i in range(400)], "delay_s": 0.01},
        {"when": "heavy", "write": ["read"], "prompt_s": 8},
        {"when": "two calls", "write": [CALL % "a", "\n", CALL[:20], CALL[20:] % "b"]},
        {
            "when": "cut call",
            "write": [CALL[:43] + '"n": 1, "at', '": "Ro', 'me\\n</p"}}\n</tool_call>'],
        },
        {"when": "nothing but thought", "write": ["hm ", "hm ", "</think>", "out"]},
        {"when": "unclosed call", "write": ["hm ", CALL % "a"]},
        {"when": "spelled tag", "write": ["hm", "</think>", "say ", "</think>", " again"]},
        {"when": "emoji 2", "write": ["a", "\udcf0\udc9f", "\udc98\udc80", "b"]},
        {"when": "emoji 3", "write": ["a", "\udcf0", "\udc9f\udc98", "\udc80", "b"]},
        {"when": "emoji 4", "write": ["a", "\udcf0", "\udc9f", "\udc98", "\udc80", "b"]},
        {"when": "not text", "write": ["a", "\udcff", "b", "\udcf0\udc9f", "c"]},
        {"when": "error now", "write": ["a ", "b ", "c "], "fault": "error", "at": 2},
        {"when": "nan now", "write": ["a ", "b ", "c "], "fault": "nan", "at": 2},
        {"when": "long answer", "write": [f"{i} " for i in range(300)]},
    ],
}


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The shared server."""
    server = Running(tmp_path_factory.mktemp("served"), SCRIPT)
    yield server
    server.stop()
