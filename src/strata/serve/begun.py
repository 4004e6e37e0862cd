"""Answers that the client has begun: the last message is the assistant's, and the model goes on.

Anthropic's API and llama.cpp do so without being asked, vLLM for continue_final_message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata.serve.errors import ApiError
from strata.serve.text.parsers import THINK_CLOSE, THINK_OPEN, call_format
from strata.serve.text.prompt import Conversation

HARMONY_BEGUN = "<|start|>assistant<|channel|>final<|message|>"


def begun_text(conversation: Conversation, go_on: bool | None) -> str | None:
    """What the answer begins with, or None for an answer of the model's own.

    go_on: what the client says about it, None for nothing; then an answer at the end is gone on
    from, unless it is one with calls. An empty one is no answer: it is taken off the conversation.
    ApiError when there is nothing to go on from.
    """
    messages = conversation.messages
    last: Mapping[str, Any] = messages[-1] if messages else {}
    finished = last.get("role") != "assistant" or bool(last.get("tool_calls"))
    if go_on and finished:
        raise ApiError(
            400, "continue_final_message needs a last message of the assistant, without calls",
            "invalid_request", field="continue_final_message",
        )  # fmt: skip
    if finished or go_on is False:
        return None
    text = last.get("content")
    if not text:
        if len(messages) > 1:
            messages.pop()
        return None
    return str(text)


def begun_tail(family: str, template: str, text: str) -> str:
    """The end of a prompt as parsers of answers are to see it when the answer begins with a text:
    inside thinking when the text is, else inside content."""
    if call_format(family, template) == "harmony":
        return HARMONY_BEGUN
    return THINK_OPEN if text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE) else ""


def refuse_begun(text: str | None, fields: Sequence[str]) -> None:
    """400 when a form is asked of an answer whose begin is given: it holds for whole answers."""
    if text is not None and fields:
        raise ApiError(
            400,
            f"{fields[0]} cannot be held together with an answer that is begun; leave the last "
            f"message of the assistant away",
            "invalid_request",
            field=fields[0],
        )
