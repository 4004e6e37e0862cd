"""Text to token ids and back, and conversations to prompts. Knows no model and no sampling.

One class over both kinds of checkpoints. Added tokens are found here (``added_tokens``), the text
between them goes through a tokenizers object. Control tokens are written by the chat template and
by callers who ask for it; text that merely spells one is ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from strata.core.errors import InputError, UnsupportedError
from strata.formats import detokenize
from strata.formats.added_tokens import AddedToken, MayMatch
from strata.formats.chat_template import ChatTemplate
from strata.formats.marked_text import ASSISTANT, level_within
from strata.formats.tokenizer_gguf import vocabulary_from_gguf
from strata.formats.tokenizer_json import vocabulary_from_json
from strata.formats.vocabulary import Vocabulary, piece_bytes

__all__ = ["Tokenizer", "load_tokenizer"]

_LONG_CHARACTERS = 4096
_SURROGATE = re.compile("[\ud800-\udfff]")


class TokenizerSource(Protocol):
    """What loading a tokenizer needs of a checkpoint (see ``checkpoint.Checkpoint``)."""

    @property
    def format(self) -> str:
        """ "gguf" or "safetensors"."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF keys and values."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Contents of config.json."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Contents of generation_config.json."""

    @property
    def tokenizer_files(self) -> Mapping[str, Path]:
        """Files beside the weights by name."""


def load_tokenizer(checkpoint: TokenizerSource) -> Tokenizer:
    """The tokenizer of an open checkpoint, from its GGUF metadata or its tokenizer.json.

    FormatError when what describes it is damaged, UnsupportedError when there is none or it is of a
    kind that we do not have. A broken chat template does not stop loading; using it does.
    """
    if checkpoint.format == "gguf":
        return Tokenizer(vocabulary_from_gguf(checkpoint.metadata))
    return Tokenizer(
        vocabulary_from_json(
            checkpoint.tokenizer_files, checkpoint.config, checkpoint.generation_config
        )
    )


class Tokenizer:
    """Encodes and decodes by one vocabulary; safe to share between threads.

    n_vocab: largest id + 1 (a model may have more rows). bos_id, eos_id, unk_id, pad_id: None when
    the checkpoint names none. eos_ids: every id that ends an answer. add_bos: text begins with the
    begin token. strip_space: see ``detokenize``. has_chat_template: ``chat_prompt`` can be used.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.n_vocab = vocabulary.n_vocab
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.unk_id = vocabulary.unk_id
        self.pad_id = vocabulary.pad_id
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.strip_space = vocabulary.strip_space
        self._added = {token.id: token for token in vocabulary.added}
        self._templates = {
            name: ChatTemplate(source, vocabulary.named)
            for name, source in vocabulary.templates.items()
        }

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of ``text``.

        special: spelled control tokens become those tokens; else they are ordinary text.
        add_bos: begin with the begin token (never twice); None: as the checkpoint asks.
        InputError when it is asked for and the checkpoint names none.
        """
        ids = self._encode(text, control=special)
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise InputError("the checkpoint names no begin token; leave add_bos away")
            if ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
        return ids

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, *, continues: bool = False
    ) -> str:
        """Text of ``ids``; what is not UTF-8 becomes U+FFFD.

        skip_special: without control tokens. continues: the ids continue a text (see
        ``StreamDecoder``).
        """
        return detokenize.decode(self, ids, skip_special=skip_special, continues=continues)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; empty for ids that name no token (padding rows)."""
        added = self._added.get(token)
        if added is not None:
            return added.text.encode()
        piece = self._vocabulary.piece(token) if token >= 0 else None
        return b"" if piece is None else piece_bytes(piece, self._vocabulary.spelling)

    def is_control(self, token: int) -> bool:
        """Whether the token is no text: begin, end, roles, padding."""
        added = self._added.get(token)
        return added is not None and added.control

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._templates)

    @property
    def template_source(self) -> str:
        """Jinja2 source of the default chat template; empty without one."""
        template = self._templates.get("default")
        return template.source if template else ""

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **template_vars: Any,
    ) -> list[int]:
        """Ids of the prompt that the checkpoint's template makes of ``messages``.

        continue_final: the prompt ends with the last message's content, to be gone on from.
        The begin token comes once when the template writes it or the checkpoint asks for it.
        Control tokens are those the template wrote; spelled ones in messages, tools and variables
        are ordinary text. User-defined tokens that the template uses (``<tool_call>``) are text in
        what others than the assistant said.
        TemplateError when the template refuses, with its message; UnsupportedError without a
        template or for content that is not text.
        """
        template = self._template(bool(tools))
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            **template_vars,
        )

        def may_match(token: AddedToken, start: int, end: int) -> bool:
            level = level_within(text, start, end)
            if token.control:
                return level == 0
            return level <= ASSISTANT or token.text not in template.source

        ids = self._encode(text, control=True, may_match=may_match)
        if self.add_bos and self.bos_id is not None and not self._begins_with_bos(text, ids):
            ids.insert(0, self.bos_id)
        return ids

    def _begins_with_bos(self, text: str, ids: list[int]) -> bool:
        """Whether the template wrote the begin token, maybe behind white space."""
        bos = self._added.get(self.bos_id) if self.bos_id is not None else None
        start = len(text) - len(text.lstrip())
        return ids[:1] == [self.bos_id] or (
            bos is not None
            and text.startswith(bos.text, start)
            and level_within(text, start, start + len(bos.text)) == 0
        )

    def _template(self, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise UnsupportedError(
                "the checkpoint has no chat template; use a plain prompt, or an instruct model"
            )
        wanted = ("tool_use", "default") if with_tools else ("default",)
        for name in wanted:
            if name in self._templates:
                return self._templates[name]
        raise UnsupportedError(
            f"the checkpoint has no default chat template, only {', '.join(self._templates)}"
        )

    def _encode(self, text: str, *, control: bool, may_match: MayMatch | None = None) -> list[int]:
        # Lone surrogates (from JSON escapes) are no characters; one for one keeps positions.
        clean = text if text.isascii() else _SURROGATE.sub("\ufffd", text)
        ids: list[int] = []
        backend = self._vocabulary.first
        for part in self._vocabulary.added.split(str(clean), control=control, may_match=may_match):
            if isinstance(part, str):
                ids += _ids(backend, part)
            else:
                ids.append(part.id)
                vocabulary = self._vocabulary
                backend = vocabulary.after_control if part.control else vocabulary.after_ordinary
        return ids


def _ids(backend: Any, text: str) -> list[int]:
    """Ids of ordinary text. Long ones go as a batch of one, which lets other threads run: a server
    must answer while a prompt of a million characters is cut."""
    if len(text) < _LONG_CHARACTERS:
        return list(backend.encode(text, add_special_tokens=False).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
