"""Anthropic's messages: `POST /v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.base import ReadDialect
from rftstream.gateway.dialects.events import Event, event
from rftstream.gateway.dialects.fields import Json, RequestRefused
from rftstream.gateway.dialects.said import Said, said_of
from rftstream.gateway.dialects.settings import MESSAGES_SETTINGS
from rftstream.models.calls.call_reading import kind
from rftstream.roles.explorer.model_calls import SampledCall

ROLES = ("user", "assistant", "system")
THINKING = ("thinking", "redacted_thinking")


class AnthropicMessages(ReadDialect):
    """The dialect of messages, as `Dialect` describes it; the server uses `read` and `events`."""

    name = "anthropic"
    settings = MESSAGES_SETTINGS
    limits = ("max_tokens",)
    stop = "stop_sequences"
    formats = ("output_config.format", "output_format")

    def _messages(self, body: Json) -> tuple[ChatMessage, ...]:
        messages: list[ChatMessage] = []
        if body.get("system"):
            messages.append(
                ChatMessage(role="system", content=fields.text_of(body["system"], "system.", text_types=TEXT))
            )
        given = fields.items(body, "messages")
        if not given:
            raise RequestRefused("messages: got none, expected at least one")
        for i, message in enumerate(given):
            where, role = f"messages[{i}].", message.get("role")
            if role not in ROLES:
                raise RequestRefused(f"{where}role: got {role!r}, expected user or assistant")
            if role == "assistant":
                messages.append(_assistant(message, where))
            else:
                messages.extend(_user(message, where))
        return tuple(messages)

    def _tools(self, body: Json) -> Iterator[dict[str, Any] | str]:
        """Yield tools as the base does. The other tools run on Anthropic's servers, or have schemas that only its
        models know."""
        for i, tool in enumerate(fields.items(body, "tools")):
            if tool.get("type", "custom") in ("custom", None):
                name, description, schema = (tool.get(name) for name in ("name", "description", "input_schema"))
                yield fields.tool(name, description, schema, f"tools[{i}].")
            else:
                yield str(tool["type"])

    def answer(self, result: SampledCall) -> dict[str, Any]:
        """Return the message."""
        said = said_of(result)
        content: list[dict[str, Any]] = []
        if said.reasoning:
            # Clients send a thinking block back as such only if it is signed.
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": result.call_id})
        if said.content or not said.tool_calls:
            content.append({"type": "text", "text": said.content})
        for call in said.tool_calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
        return {
            "id": f"msg-{result.call_id}",
            "type": "message",
            "role": "assistant",
            "model": result.model,
            "content": content,
            "stop_reason": _stop_reason(said),
            "stop_sequence": said.stop,
            "usage": {"input_tokens": result.num_prompt_tokens, "output_tokens": result.num_sampled_tokens},
        }

    def served(self, answer: Mapping[str, Any]) -> ChatMessage:
        """Return the blocks of a message as one message of a history."""
        return _assistant(answer, "")

    def events(self, answer: Json, *, include_usage: bool) -> list[Event]:
        """Return the answer as the events of a stream. Usage is always among them."""
        events: list[Event] = []

        def add(kind: str, /, **data: Any) -> None:
            events.append(event({"type": kind, **data}, name=kind))

        usage = answer["usage"]
        begun = {
            **answer,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0},
        }
        add("message_start", message=begun)
        empty: dict[str, Any]
        for i, block in enumerate(answer["content"]):
            match block["type"]:
                case "tool_use":
                    empty, delta = {"input": {}}, _delta("input_json", "partial_json", json.dumps(block["input"]))
                case "thinking":
                    empty, delta = (
                        {"thinking": "", "signature": ""},
                        _delta("thinking", "thinking", block["thinking"]),
                    )
                case _:
                    empty, delta = {"text": ""}, _delta("text", "text", block["text"])
            add("content_block_start", index=i, content_block={**block, **empty})
            add("content_block_delta", index=i, delta=delta)
            if block["type"] == "thinking":
                add("content_block_delta", index=i, delta=_delta("signature", "signature", block["signature"]))
            add("content_block_stop", index=i)
        end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        add("message_delta", delta=end, usage=usage)
        add("message_stop")
        return events

    def error(self, status: int, sentence: str) -> dict[str, Any]:
        """Return the body of a refusal."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "overloaded_error")
        return {"type": "error", "error": {"type": kind, "message": sentence}}


def _delta(kind: str, name: str, text: str) -> dict[str, str]:
    return {"type": f"{kind}_delta", name: text}


def _stop_reason(said: Said) -> str:
    if said.is_cut_short or said.stop is not None:
        return "max_tokens" if said.is_cut_short else "stop_sequence"
    return "tool_use" if said.tool_calls else "end_turn"


TEXT = ("text",)


def _assistant(message: Json, where: str) -> ChatMessage:
    content = message.get("content")
    if not isinstance(content, list):
        return fields.assistant(fields.text_of(content, where, text_types=TEXT), [])
    calls, others = [], []
    for i, block in enumerate(fields.items(message, "content", where)):
        if block.get("type") == "tool_use":
            at = f"{where}content[{i}]."
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise RequestRefused(f"{at}input: got {kind(arguments)}, expected an object")
            calls.append(fields.tool_call(fields.string(block, "id", at), fields.string(block, "name", at), arguments))
        else:
            others.append(block)
    return fields.assistant(fields.text_of(others, where, text_types=TEXT, passed_over=THINKING), calls)


def _user(message: Json, where: str) -> list[ChatMessage]:
    """Return a user's message: results of tools become separate messages before the rest."""
    content, role = message.get("content"), str(message["role"])
    if not isinstance(content, list):
        return [ChatMessage(role=role, content=fields.text_of(content, where, text_types=TEXT))]
    results, others = [], []
    for i, block in enumerate(fields.items(message, "content", where)):
        if block.get("type") == "tool_result":
            at = f"{where}content[{i}]."
            results.append(
                ChatMessage(
                    role="tool",
                    content=fields.text_of(block.get("content"), at, text_types=TEXT),
                    tool_call_id=fields.string(block, "tool_use_id", at),
                )
            )
        else:
            others.append(block)
    if others or not results:
        results.append(ChatMessage(role=role, content=fields.text_of(others, where, text_types=TEXT)))
    return results
