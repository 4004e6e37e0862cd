"""The HTTP process's view of a model: its name, tokenizer, chat template and suggested sampling.

Reads the checkpoint's metadata only; imports no torch. Prompts become token ids here, so that the
engine process has nothing to do but to compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from strata.core.errors import InputError
from strata.core.setting_kinds import SettingInfo
from strata.core.settings import SETTINGS
from strata.formats.checkpoint import open_checkpoint
from strata.formats.tokenizer import load_tokenizer
from strata.serve.text.specs import TokenizerLike
from strata.serve.text.template_style import TemplateStyle, style_of

TAIL_TOKENS = 256
TAIL_CHARS = 500


class ServedTokenizer(TokenizerLike, Protocol):
    """What the server needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat_prompt`` can be used."""

    @property
    def template_source(self) -> str:
        """Source of the chat template."""

    @property
    def strip_space(self) -> bool:
        """Whether a text's first space belongs to the tokenizer, not to the text."""

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids."""

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **template_vars: Any,
    ) -> list[int]:
        """Ids of a conversation."""


@dataclass(frozen=True)
class ModelText:
    """tokenizer: None when the checkpoint has none that works (why_not says why). sampling:
    what the checkpoint suggests, by setting name. context_tokens: what the model was made for, 0
    when the checkpoint does not say."""

    name: str
    family: str = ""
    tokenizer: ServedTokenizer | None = None
    why_not: str = "this model has no tokenizer; send token ids"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    context_tokens: int = 0

    @property
    def tokens(self) -> ServedTokenizer:
        """The tokenizer; InputError without one."""
        if self.tokenizer is None:
            raise InputError(self.why_not)
        return self.tokenizer

    @property
    def template(self) -> str:
        """Source of the chat template, or nothing."""
        return self.tokenizer.template_source if self.tokenizer else ""

    @cached_property
    def style(self) -> TemplateStyle:
        """What the template wants."""
        return style_of(self.template)

    @property
    def kind(self) -> str | None:
        """Chat or plain text; None while nothing is known but the name."""
        if self.tokenizer is None and not self.why_not:
            return None
        return "chat" if self.tokenizer and self.tokenizer.has_chat_template else "completion"

    def tail(self, ids: Sequence[int]) -> str:
        """The end of a prompt as text, control tokens spelled."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(list(ids[-TAIL_TOKENS:]), skip_special=False)
        return text[-TAIL_CHARS:]


def served_name(model: str) -> str:
    """Name of a model that nobody named: the file's without its ending, or the folder's."""
    if model.startswith("synthetic:"):
        return model
    path = Path(model).resolve()
    return path.name.removesuffix(".gguf").removesuffix(".safetensors")


def read_model_text(model: str, name: str = "") -> ModelText:
    """Open a checkpoint and read what is said above."""
    name = name or served_name(model)
    if model.startswith("synthetic:"):
        return ModelText(name)
    with open_checkpoint(model) as checkpoint:
        family = str(
            checkpoint.metadata.get("general.architecture")
            or checkpoint.config.get("model_type", "")
        )
        sampling = suggested(checkpoint.metadata, checkpoint.generation_config)
        described = checkpoint.config.get("text_config") or checkpoint.config
        context = checkpoint.metadata.get(
            f"{family}.context_length", described.get("max_position_embeddings")
        )
        context = context if isinstance(context, int) else 0
        try:
            tokenizer = load_tokenizer(checkpoint)
        except InputError as error:
            return ModelText(name, family, None, str(error), sampling, context)
        return ModelText(name, family, tokenizer, "", sampling, context)


def suggested(metadata: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling that a checkpoint asks for: generation_config.json, or a GGUF's general.sampling
    keys. What is out of range is left out."""
    names = {
        "temperature": ("temp", "temperature"),
        "top_k": ("top_k", "top_k"),
        "top_p": ("top_p", "top_p"),
        "min_p": ("min_p", "min_p"),
        "repeat_penalty": ("penalty_repeat", "repetition_penalty"),
    }
    found: dict[str, Any] = {}
    for setting, (gguf, hugging) in names.items():
        value = generation.get(hugging, metadata.get(f"general.sampling.{gguf}"))
        if isinstance(value, int | float) and not isinstance(value, bool) and _fits(setting, value):
            found[setting] = value
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _fits(setting: str, value: float) -> bool:
    info: SettingInfo = SETTINGS[setting]
    try:
        info.parse(value)
    except InputError:
        return False
    return True
