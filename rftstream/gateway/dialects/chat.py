"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.events import Event, event
from rftstream.gateway.dialects.fields import Json, RequestRefused
from rftstream.gateway.dialects.said import Said, said_of
from rftstream.gateway.dialects.settings import (
    CONSTRAINT,
    COUNTED,
    FORM,
    NAMES,
    NO_BANS,
    REASONING,
    SAMPLING,
    STOP,
    TOOL_CHOICE,
    Table,
    asked_for,
    check,
    honoured,
    recorded,
    refused,
)
from rftstream.policies.base import CONSTRAINTS, Constraint
from rftstream.roles.explorer.model_calls import ModelCall, SampledCall

ROLES = ("system", "developer", "user", "assistant", "tool")

SETTINGS: Table = {
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


class ChatCompletions:
    """The dialect of chat completions, as `Dialect` describes it; `read` and `events` are the server's."""

    name = "chat"
    settings = SETTINGS

    def read(self, body: Json, *, digest: str, idempotency_key: str | None, is_retry: bool) -> ModelCall:
        """Return the call that a request asks for. RequestRefused for what cannot be done exactly."""
        check(body, SETTINGS)
        options = body.get("stream_options")
        tools, left_out = _tools(body)
        shown = tuple(tools) if body.get("tool_choice") != "none" else ()
        return ModelCall(
            dialect=self,
            digest=digest,
            idempotency_key=idempotency_key,
            is_retry=is_retry,
            messages=_messages(body),
            tools=shown,
            model=fields.string(body, "model", default=""),
            max_tokens=fields.limit(body, "max_completion_tokens", "max_tokens"),
            stop=fields.stops(body, "stop"),
            constraint=fields.constraint(
                bool(shown),
                fields.schema_format(body.get("response_format"), "response_format"),
                *structured_outputs(body),
            ),
            asked=asked_for(body, SETTINGS) | left_out,
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def answer(self, result: SampledCall) -> dict[str, Any]:
        """Return the chat completion."""
        said = said_of(result)
        message: dict[str, Any] = {"role": "assistant", "content": said.content or None, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.tool_calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        return {
            "id": f"chatcmpl-{result.call_id}",
            "object": "chat.completion",
            "created": result.created,
            "model": result.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(said)}],
            "usage": {
                "prompt_tokens": result.num_prompt_tokens,
                "completion_tokens": result.num_sampled_tokens,
                "total_tokens": result.num_prompt_tokens + result.num_sampled_tokens,
            },
        }

    def served(self, answer: Mapping[str, Any]) -> ChatMessage:
        """Return the message of a chat completion as a history holds it."""
        return _message(answer["choices"][0]["message"], "")

    def events(self, answer: Json, *, include_usage: bool) -> list[Event]:
        """Return the answer as the chunks of a stream."""
        head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        usage = {"usage": None} if include_usage else {}
        (choice,) = answer["choices"]
        message = choice["message"]

        def chunk(delta: Json, reason: str | None = None) -> Event:
            return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **usage})

        chunks = [chunk({"role": "assistant", "content": ""})]
        if message.get("reasoning_content"):
            chunks.append(chunk({"reasoning_content": message["reasoning_content"]}))
        if message["content"]:
            chunks.append(chunk({"content": message["content"]}))
        for i, call in enumerate(message.get("tool_calls", ())):
            function = call["function"]
            chunks.append(
                chunk(
                    {
                        "tool_calls": [
                            {**call, "index": i, "function": {"name": function["name"], "arguments": ""}},
                        ]
                    }
                )
            )
            chunks.append(chunk({"tool_calls": [{"index": i, "function": {"arguments": function["arguments"]}}]}))
        chunks.append(chunk({}, choice["finish_reason"]))
        if include_usage:
            chunks.append(event({**head, "choices": [], "usage": answer["usage"]}))
        return [*chunks, Event(b"data: [DONE]\n\n")]

    def error(self, status: int, sentence: str) -> dict[str, Any]:
        """Return the body of a refusal."""
        return openai_error(status, sentence)


def openai_error(status: int, sentence: str) -> dict[str, Any]:
    """Return a refusal as OpenAI's APIs write it."""
    kinds = {401: "authentication_error", 409: "conflict_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sentence, "type": kind, "param": None, "code": None}}


def _finish_reason(said: Said) -> str:
    if said.is_cut_short:
        return "length"
    return "tool_calls" if said.tool_calls else "stop"


def _messages(body: Json) -> tuple[ChatMessage, ...]:
    messages = fields.items(body, "messages")
    if not messages:
        raise RequestRefused("messages: got none, expected at least one")
    return tuple(_message(message, f"messages[{i}].") for i, message in enumerate(messages))


def _message(message: Json, where: str) -> ChatMessage:
    role = message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{where}role: got {role!r}, expected one of {', '.join(ROLES)}")
    content = fields.text_of(message.get("content"), where, text_types=("text",), passed_over=("refusal",))
    if role == "assistant":
        if message.get("function_call"):
            raise RequestRefused(f"{where}function_call: got the older form, expected tool_calls")
        calls = [
            _tool_call(call, f"{where}tool_calls[{i}].")
            for i, call in enumerate(fields.items(message, "tool_calls", where))
        ]
        return fields.assistant(content, calls)
    name = message.get("name")
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=content,
        name=name if isinstance(name, str) else None,
        tool_call_id=fields.string(message, "tool_call_id", where) if role == "tool" else None,
    )


def _tool_call(call: Json, where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestRefused(f"{where}function: got {fields.kind(function)}, expected an object")
    return fields.tool_call(
        fields.string(call, "id", where),
        fields.string(function, "name", f"{where}function."),
        function.get("arguments") or "{}",
    )


def _tools(body: Json) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the tools that a model is shown, and what is recorded of others."""
    found, others = [], []
    for i, tool in enumerate(fields.items(body, "tools")):
        if tool.get("type", "function") != "function":
            others.append(tool["type"])
            continue
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestRefused(f"tools[{i}].function: got {fields.kind(function)}, expected an object")
        name, description, parameters = (function.get(name) for name in ("name", "description", "parameters"))
        found.append(fields.tool(name, description, parameters, f"tools[{i}].function."))
    return found, fields.left_out(others)


def structured_outputs(body: Json) -> list[Constraint]:
    """Return what the settings of vLLM constrain an answer to, by their newer name or by one of the older ones."""
    found = []
    given = body.get("structured_outputs")
    if given is not None and not isinstance(given, dict):
        raise RequestRefused(f"structured_outputs: got {fields.kind(given)}, expected an object")
    settings = {name: value for name, value in (given or {}).items() if value not in (None, False)}
    if unknown := sorted(settings.keys() - set(CONSTRAINTS)):
        raise RequestRefused(f"structured_outputs.{unknown[0]}: unknown; expected one of {', '.join(CONSTRAINTS)}")
    found += [Constraint(kind=kind, value=value, setting="structured_outputs") for kind, value in settings.items()]
    for kind in CONSTRAINTS:
        if (value := body.get(f"guided_{kind}")) is not None:
            found.append(Constraint(kind=kind, value=value, setting=f"guided_{kind}"))
    return found
