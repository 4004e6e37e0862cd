"""The tokenizer of scripted engines: bytes, the script's pieces, and control tokens.

Both processes make it from the same script, so ids mean the same on both sides. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strata.core.errors import InputError
from strata.formats import detokenize
from strata.formats.chat_template import ChatTemplate
from strata.formats.marked_text import level_within

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLES = ("system", "tool", "developer")


class ScriptedTokenizer:
    """Ids 0 to 255 are bytes, then control tokens, then pieces."""

    strip_space = False
    has_chat_template = True

    def __init__(self, script: Mapping[str, Any]) -> None:
        more = [f"<|{role}|>" for role in ROLES]
        self._control: list[str] = [END, USER, ASSISTANT, *more, *script.get("control", ())]
        written = [piece for rule in script.get("answers", ()) for piece in rule.get("write", ())]
        self._pieces: list[str] = sorted(set(written) - set(self._control))
        self._first_piece = 256 + len(self._control)
        self.n_vocab = self._first_piece + len(self._pieces)
        self.eos_ids = (256,)
        self.template_source = str(script.get("template", TEMPLATE))
        self._template = ChatTemplate(self.template_source)

    def pieces(self, pieces: Iterable[str]) -> list[int]:
        """Ids of an answer; a piece the script does not hold is spelled in bytes."""
        ids: list[int] = []
        for piece in pieces:
            if piece in self._control:
                ids.append(256 + self._control.index(piece))
            elif piece in self._pieces:
                ids.append(self._first_piece + self._pieces.index(piece))
            else:
                ids += piece.encode()
        return ids

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Bytes; control tokens only when asked for."""
        if add_bos:
            raise InputError("this model has no begin token")
        ids: list[int] = []
        while text:
            found = [(text.find(c), c) for c in self._control if special and c in text]
            start, control = min(found, default=(len(text), ""))
            ids += text[:start].encode("utf-8", "replace")
            if control:
                ids.append(256 + self._control.index(control))
            text = text[start + len(control) :]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids."""
        return detokenize.decode(self, ids, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token."""
        if token < 256:
            return bytes([token])
        if token < self._first_piece:
            return self._control[token - 256].encode()
        return self._pieces[token - self._first_piece].encode("utf-8", "surrogateescape")

    def is_control(self, token: int) -> bool:
        """Whether it is no text."""
        return 256 <= token < self._first_piece

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **template_vars: Any,
    ) -> list[int]:
        """Ids of a conversation; control tokens are those that the template wrote."""
        text = self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            **template_vars,
        )
        ids: list[int] = []
        at = 0
        while at < len(text):
            control = next((c for c in self._control if text.startswith(c, at)), None)
            if control and level_within(text, at, at + len(control)) == 0:
                ids.append(256 + self._control.index(control))
                at += len(control)
            else:
                ids += str(text[at : at + 1]).encode("utf-8", "replace")
                at += 1
        return ids
