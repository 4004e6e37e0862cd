"""What other servers call their fields: other names of ours, and what we do not have.

Clients written for llama.cpp, vLLM, SGLang and others send their fields to any server that speaks
the OpenAI API. A field that means one of ours is taken as ours. One that would change the answer
and that we do not have is refused unless its value says "do not" (most clients send defaults).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from strata.core.settings import SETTINGS
from strata.serve.errors import ApiError

NO_LIMIT = 1 << 31
"""Tokens: as many as the context has room for."""
_LENGTH = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict",
           "max_new_tokens", "num_predict")  # fmt: skip
_FIXED = tuple(n for n, i in SETTINGS.items() if i.scope == "engine" and i.changes_output)
_STOP = ("stop", "stop_sequences", "stopping_strings")
_REPEAT = ("repetition_penalty", "repeat_penalty")
SYNONYMS = (_LENGTH, _STOP, _REPEAT)
"""Names of one thing each; a body's own name is the first that it declares."""
FORMS: Mapping[str, str] = {
    "guided_json": "json", "json_schema": "json", "guided_regex": "regex", "regex": "regex",
    "guided_choice": "choice", "guided_grammar": "grammar", "grammar": "grammar",
    "ebnf": "grammar",
}  # fmt: skip
"""Fields that ask for a form of the answer, and what of structured_outputs they mean."""

_NONE = (None,)
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_OFF = (None, False)
_ON = (None, True)
_ZERO = (None, 0, -1)
_ONE = (None, 1)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # where an answer ends, and which tokens it may hold
    "ignore_eos": _OFF, "ban_eos_token": _OFF, "min_tokens": _ZERO, "min_new_tokens": _ZERO,
    "min_length": _ZERO, "max_length": _NONE, "t_max_predict_ms": _ZERO, "n_indent": _ZERO,
    "stop_token_ids": _EMPTY, "stop_regex": _EMPTY, "include_stop_str_in_output": _OFF,
    "no_stop_trim": _OFF, "skip_special_tokens": _ON, "bad_words": _EMPTY, "bad_words_ids": _EMPTY,
    "allowed_token_ids": _EMPTY, "custom_token_bans": _EMPTY, "logits_processors": _EMPTY,
    "custom_logit_processor": _EMPTY,
    # samplers
    "mirostat": _ZERO, "mirostat_mode": _ZERO, "typical_p": _ONE, "typ_p": _ONE, "typical": _ONE,
    "tfs": _ONE, "tfs_z": _ONE, "top_a": _ZERO, "top_n_sigma": _ZERO, "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO, "xtc_probability": _ZERO, "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO, "dynamic_temperature": _OFF, "smoothing_factor": _ZERO,
    "adaptive_target": _ZERO, "min_keep": _ZERO, "samplers": _EMPTY, "sampler_order": _EMPTY,
    "no_repeat_ngram_size": _ZERO, "encoder_repetition_penalty": _ONE, "guidance_scale": _ONE,
    "negative_prompt": _EMPTY, "penalty_alpha": _ZERO, "length_penalty": _ONE, "num_beams": _ONE,
    "early_stopping": _OFF, "do_sample": _ON, "sampling_params": _EMPTY, "options": _EMPTY,
    # the prompt
    "truncate_prompt_tokens": _NONE, "truncation": (None, "disabled"), "chat_template": _EMPTY,
    "documents": _EMPTY, "prompt_embeds": _EMPTY, "image_data": _EMPTY, "images": _EMPTY,
    "mm_processor_kwargs": _EMPTY, "input_embeds": _EMPTY, "n_keep": _ZERO, "n_discard": _ZERO,
    "lora": _EMPTY, "lora_path": _EMPTY, "lora_request": _EMPTY,
    # thinking
    "thinking": _NONE, "enable_thinking": _NONE, "thinking_budget": _NONE,
    "thinking_token_budget": _NONE, "thinking_budget_tokens": _NONE, "reasoning_budget": (None, -1),
    "think": _NONE, "reasoning": _EMPTY, "reasoning_format": (None, "auto", "deepseek"),
    "thinking_forced_open": _OFF, "separate_reasoning": _ON, "parse_tool_calls": _ON,
    # forms
    "guided_json_object": _OFF, "guided_whitespace_pattern": _NONE, "grammar_lazy": _OFF,
    "grammar_triggers": _EMPTY, "structural_tag": _EMPTY, "format": _EMPTY,
    # fields of our own routes that a route may lack
    "messages": _EMPTY, "prompt": _EMPTY, "input": _EMPTY, "system": _EMPTY,
    "instructions": _EMPTY, "tools": _EMPTY, "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": _ON, "reasoning_effort": _NONE, "include_reasoning": _ON,
    "chat_template_kwargs": _EMPTY, "response_format": (None, {"type": "text"}),
    "structured_outputs": _EMPTY, "text": _EMPTY, "output_config": _EMPTY, "suffix": _EMPTY,
    "logit_bias": _EMPTY, "seed": (None, -1), "n": _ONE, "echo": _OFF,
    "add_special_tokens": _OFF, "logprobs": _OFF, "top_logprobs": _ZERO, "min_p": _ZERO,
    "frequency_penalty": _ZERO[:2], "presence_penalty": _ZERO[:2], "overlap": (None, "auto"),
    **dict.fromkeys(_REPEAT, _ONE), **dict.fromkeys(_STOP, _EMPTY),
    **dict.fromkeys(_LENGTH, _NONE), **dict.fromkeys(FORMS, (None, "")),
    **dict.fromkeys(_FIXED, _NONE),
}  # fmt: skip
"""What would change an answer and is not had, and the values that mean "do not"."""
_RANGES = ("repeat_last_n", "penalty_last_n", "repetition_penalty_range", "rep_pen_range")
_INSTEAD = {
    **dict.fromkeys(("thinking", "think", "reasoning", "thinking_budget", "thinking_token_budget",
                     "thinking_budget_tokens", "reasoning_budget"), "reasoning_effort"),
    "enable_thinking": "chat_template_kwargs or reasoning_effort",
    "truncate_prompt_tokens": "a shorter prompt", "stop_token_ids": "stop",
    "bad_words": "logit_bias", "bad_words_ids": "logit_bias", "allowed_token_ids": "logit_bias",
    "do_sample": "temperature", "system": "a message of the role system",
    **dict.fromkeys(_FIXED, "overlap, or give it when the server is started"),
}  # fmt: skip


def own_names(data: Any, declared: Collection[str]) -> Any:
    """A body with other servers' names replaced by those that it declares. ApiError when two names
    of one thing differ."""
    if not isinstance(data, Mapping):
        return data
    out = dict(data)
    for names in SYNONYMS:
        own = next((name for name in names if name in declared), None)
        if own is None:
            continue
        for name in names:
            if name in declared or name not in out:
                continue
            value = _own_value(own, out.pop(name))
            if value is None:
                continue
            if out.get(own) not in (None, value):
                raise ApiError(
                    400, f"{name} and {own} differ; give one", "invalid_request", field=name
                )
            out[own] = value
    return out


def _own_value(own: str, value: Any) -> Any:
    if own in _LENGTH and value in (-1, -2):
        return NO_LIMIT
    if own == "stop_sequences" and isinstance(value, str):
        return [value]
    return value


def given_name(field: str, body: Any) -> str:
    """The name under which the client gave a field of ours."""
    if isinstance(body, Mapping) and field not in body:
        for names in SYNONYMS:
            if field in names:
                return next((name for name in names if name in body), field)
    return field


def refuse_range(name: str, value: Any, penalized: bool) -> bool:
    """Whether the field says how many tokens penalties look at; ApiError when there are penalties
    (penalized) and it is not all of them."""
    if name not in _RANGES:
        return False
    if penalized and value not in (None, -1):
        raise ApiError(
            400, f"{name}: penalties count all tokens here, not the last {value!r}; use -1",
            "unsupported_field", field=name,
        )  # fmt: skip
    return True


def refuse(name: str, value: Any) -> bool:
    """ApiError when the field would change the answer; whether it is known at all."""
    if name not in NEUTRAL:
        return False
    if value not in NEUTRAL[name]:
        instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise ApiError(
            400, f"{name} is not supported here{instead}", "unsupported_field", field=name
        )
    return True
