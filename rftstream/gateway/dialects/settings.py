"""The treatment of each setting of a request: one table for each dialect, which its `read` follows and the docs show.

A setting is honoured, or recorded without another effect, or refused. A setting that is not in the table is recorded:
clients send new settings each month, and most concern only their makers' own servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rftstream.gateway.dialects.fields import MAX_ASKED_BYTES, Json, RequestRefused
from rftstream.roles.explorer.model_calls import canonical

ABSENT: tuple[Any, ...] = (None, False, [], {}, "", 0)
"""Values of a refused setting that request nothing."""
MAX_RECORDED = 64
"""Largest number of recorded settings of a call."""


class Fate(StrEnum):
    """The ways in which a setting of a request can be treated."""

    honoured = "honoured"
    recorded = "recorded"
    refused = "refused"


@dataclass(frozen=True, slots=True)
class RequestSetting:
    """A row of a table. `honoured`, `recorded` and `refused` make it."""

    fate: Fate
    note: str
    """Effect of the setting, or the reason why it has none. For a refused setting: the message to the client."""
    is_recorded: bool = False
    """Whether the setting is recorded with the call on the log."""
    passes: tuple[Any, ...] = ()
    """Values of a refused setting that are accepted."""


Table = Mapping[str, RequestSetting]
"""Name of a setting -> its row. A name with a dot is a setting inside another one."""


def honoured(note: str, *, is_recorded: bool = False) -> RequestSetting:
    """Return the row of a setting that is carried out. It is not recorded if it is elsewhere on the log."""
    return RequestSetting(Fate.honoured, note, is_recorded)


def recorded(note: str) -> RequestSetting:
    """Return the row of a setting that is recorded with the call, and has no other effect."""
    return RequestSetting(Fate.recorded, note, True)


def refused(note: str, *passes: Any) -> RequestSetting:
    """Return the row of a setting that is refused, unless it requests nothing or has one of these values."""
    return RequestSetting(Fate.refused, note, True, passes)


SAMPLING = recorded("sampling is the task's (`[sampling]`)")
COUNTED = recorded("for the bills and caches of its maker's servers")
NAMES = recorded("names whom or what the request is for")
FORM = recorded("the form of the answer stays as it is")
REASONING = recorded("how much the model reasons is its own and its template's affair")
CONTEXT = recorded("nothing is removed from the context: a prompt without room is refused")
NO_BANS = refused("tokens are sampled as the task says, and the recorded logprobs are of that; remove it")
CONSTRAINT = honoured("`hf`, `vllm` and `openai` hold the tokens to it; other policies refuse it", is_recorded=True)
TOOL_CHOICE = honoured("`none` hides the tools; what else it says is recorded, and forces no call", is_recorded=True)
STOP = honoured("ends the answer before any of these", is_recorded=True)


CHAT_SETTINGS: Table = {
    "model": honoured("any name is the policy; the answer repeats it"),
    "messages": honoured("the conversation; parts that are no text are refused"),
    "tools": honoured("functions; tools of other types are left out of the prompt, and recorded by their types"),
    "tool_choice": TOOL_CHOICE,
    "stream": honoured("the answer as events, once it is on the log"),
    "stream_options": honoured("`include_usage`"),
    "max_completion_tokens": honoured("limit of this call, within the rollout's", is_recorded=True),
    "max_tokens": honoured("the older name of `max_completion_tokens`", is_recorded=True),
    "stop": STOP,
    "response_format": CONSTRAINT,
    "structured_outputs": CONSTRAINT,
    "guided_json": CONSTRAINT,
    "guided_regex": CONSTRAINT,
    "guided_choice": CONSTRAINT,
    "guided_grammar": CONSTRAINT,
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"), SAMPLING),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"), SAMPLING),
    "parallel_tool_calls": recorded("a turn may hold several calls in any case"),
    **dict.fromkeys(("reasoning_effort", "include_reasoning", "thinking_token_budget"), REASONING),
    **dict.fromkeys(("verbosity", "return_token_ids", "skip_special_tokens", "moderation"), FORM),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"), COUNTED),
    **dict.fromkeys(("store", "cache_salt", "priority"), COUNTED),
    **dict.fromkeys(("user", "safety_identifier", "metadata", "request_id"), NAMES),
    "n": refused("each call is one sample of its rollout; expected 1", 1),
    "best_of": refused("each call is one sample of its rollout; expected 1", 1),
    "use_beam_search": refused("tokens are sampled one by one; remove it"),
    "logprobs": refused("logprobs are not told; the rollout on the log has those of all sampled tokens"),
    "top_logprobs": refused("only the sampled token has a logprob, expected no top_logprobs"),
    "prompt_logprobs": refused("the tokens of prompts have no logprobs; remove it"),
    "logit_bias": NO_BANS,
    "bad_words": NO_BANS,
    "allowed_token_ids": NO_BANS,
    "logits_processors": NO_BANS,
    "functions": refused("got the older form, expected tools"),
    "function_call": refused("got the older form, expected tool_choice"),
    "audio": refused("the model writes text alone"),
    "modalities": refused("the model writes text alone", ["text"]),
    "prediction": refused("tokens are sampled one by one; remove it"),
    "web_search_options": refused("the endpoint has no tools of its own; offer the model a tool for it"),
    "chat_template": refused("the chat template is the run's (model.chat_template); remove it"),
    "chat_template_kwargs": refused("the chat template is the run's (model.chat_template_kwargs); remove it"),
    "documents": refused("the chat template is given messages and tools alone; put them into a message"),
    "add_generation_prompt": refused("the model answers in a turn of its own; remove it", True),
    "continue_final_message": refused("the model answers in a turn of its own; remove it"),
    "truncate_prompt_tokens": refused("a prompt is taken whole, or refused; remove it"),
    "echo": refused("an answer holds what was sampled alone; remove it"),
    "previous_response_id": refused("got a setting of the responses API, expected chat completions"),
}  # fmt: skip

MESSAGES_SETTINGS: Table = {
    "model": honoured("any name is the policy; the answer repeats it"),
    "messages": honoured("the conversation; blocks that are no text, thinking or tool use are refused"),
    "system": honoured("a system message before it"),
    "tools": honoured("tools with an `input_schema`; others are left out of the prompt, and recorded by their types"),
    "tool_choice": TOOL_CHOICE,
    "stream": honoured("the answer as events, once it is on the log"),
    "max_tokens": honoured("limit of this call, within the rollout's", is_recorded=True),
    "stop_sequences": STOP,
    "output_config.format": CONSTRAINT,
    "output_format": CONSTRAINT,
    "output_config": recorded("beside `format`: how much the model writes is its own affair"),
    **dict.fromkeys(("temperature", "top_p", "top_k"), SAMPLING),
    "thinking": REASONING,
    "context_management": CONTEXT,
    **dict.fromkeys(("cache_control", "service_tier", "inference_geo", "speed", "diagnostics"), COUNTED),
    **dict.fromkeys(("betas", "fallbacks", "fallback_credit_token", "billing_policy", "workspace_id"), COUNTED),
    **dict.fromkeys(("metadata", "user_profile_id"), NAMES),
    "container": refused("the endpoint runs no code; remove it"),
    "mcp_servers": refused("the endpoint has no tools of its own; call them in the agent"),
    "compaction": refused("the endpoint does not rewrite the context; do that in the agent"),
    "thread": refused("conversations are not kept; send all messages"),
    "logit_bias": NO_BANS,
}  # fmt: skip

RESPONSES_SETTINGS: Table = {
    "model": honoured("any name is the policy; the answer repeats it"),
    "input": honoured("the conversation; `item_reference` is an item of an earlier answer of the rollout"),
    "instructions": honoured("a system message before it"),
    "tools": honoured(
        "functions, those of a `namespace` as `NAMESPACE.NAME`; tools of other types are left out of the prompt, and "
        "recorded by their types"
    ),
    "tool_choice": TOOL_CHOICE,
    "stream": honoured("the answer as events, once it is on the log"),
    "max_output_tokens": honoured("limit of this call, within the rollout's", is_recorded=True),
    "text.format": CONSTRAINT,
    "text": recorded("beside `format`: how much the model writes is its own affair"),
    "stream_options": FORM,
    **dict.fromkeys(("temperature", "top_p"), SAMPLING),
    "reasoning": REASONING,
    "parallel_tool_calls": recorded("a turn may hold several calls in any case"),
    "max_tool_calls": recorded("the endpoint has no tools of its own"),
    **dict.fromkeys(("truncation", "context_management"), CONTEXT),
    "include": recorded("nothing of it is told; with `message.output_text.logprobs` the request is refused"),
    **dict.fromkeys(("moderation", "image"), FORM),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"), COUNTED),
    **dict.fromkeys(("store", "access_programs"), COUNTED),
    **dict.fromkeys(("user", "safety_identifier", "metadata", "client_metadata"), NAMES),
    "previous_response_id": refused("answers are not kept for later requests; send the whole input"),
    "conversation": refused("conversations are not kept; send the whole input"),
    "prompt": refused("the endpoint has no stored prompts; send the input itself"),
    "background": refused("a call is answered on its own connection; remove it"),
    "background_options": refused("a call is answered on its own connection; remove it"),
    "top_logprobs": refused("only the sampled token has a logprob, expected no top_logprobs"),
    "logit_bias": NO_BANS,
}  # fmt: skip


def check(body: Json, table: Table) -> None:
    """Raise RequestRefused for a body with a setting that cannot be carried out."""
    for name, setting in table.items():
        if setting.fate is Fate.refused:
            value = value_of(body, name)
            if value not in ABSENT and value not in setting.passes:
                raise RequestRefused(f"{name}: {setting.note}")


def asked_for(body: Json, table: Table) -> dict[str, Any]:
    """Return a body's settings to record, including those that are in no table. A large one is recorded as its size."""
    found: dict[str, Any] = {}
    elsewhere = {name for name, setting in table.items() if not setting.is_recorded}
    for name in sorted(body.keys() - elsewhere)[:MAX_RECORDED]:
        value = body[name]
        if value is not None:
            size = len(canonical(value))
            found[name[:64]] = value if size <= MAX_ASKED_BYTES else f"({size} bytes)"
    return found


def value_of(body: Json, name: str) -> Any:
    """Return a setting of a body by its name in a table; None if it is absent."""
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
