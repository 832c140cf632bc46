"""OpenAI's responses: `POST /v1/responses`. Each request carries its whole input; nothing is kept between two."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.base import ReadDialect, Unresolved
from rftstream.gateway.dialects.chat import openai_error
from rftstream.gateway.dialects.events import Event, event
from rftstream.gateway.dialects.fields import Json, RequestRefused
from rftstream.gateway.dialects.said import said_of
from rftstream.gateway.dialects.settings import RESPONSES_SETTINGS
from rftstream.roles.explorer.model_calls import AnswerOf, Refusal, SampledCall

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")
_ITEM_ID = re.compile(r"(?:msg|rs|fc)-(.+/call/\d+)(?:/\d+)?")
"""The id of an item in an answer; it contains the id of the call."""


class Responses(ReadDialect):
    """The dialect of responses, as `Dialect` describes it; the server uses `read` and `events`."""

    name = "responses"
    settings = RESPONSES_SETTINGS
    limits = ("max_output_tokens",)
    formats = ("text.format",)

    def _messages(self, body: Json) -> tuple[ChatMessage, ...] | Unresolved:
        include = body.get("include") or []
        if isinstance(include, list) and "message.output_text.logprobs" in include:
            raise RequestRefused("include: logprobs are not told; the rollout on the log has those of all tokens")
        if isinstance(body.get("input"), list) and any(map(_refers, fields.items(body, "input"))):
            return lambda answer_of: _resolved(body, answer_of)
        return _messages(body)

    def _tools(self, body: Json) -> Iterator[dict[str, Any] | str]:
        for i, tool in enumerate(fields.items(body, "tools")):
            is_space = tool.get("type") == "namespace"
            space = fields.string(tool, "name", f"tools[{i}].") if is_space else None
            for k, one in enumerate(fields.items(tool, "tools", f"tools[{i}].") if is_space else [tool]):
                where = f"tools[{i}].tools[{k}]." if is_space else f"tools[{i}]."
                if one.get("type") == "function":
                    name = _full_name(space, fields.string(one, "name", where))
                    yield fields.tool(name, one.get("description"), one.get("parameters"), where)
                else:
                    yield _full_name(space, str(one.get("type")))

    def answer(self, result: SampledCall) -> dict[str, Any]:
        """Return the response."""
        said, output = said_of(result), []
        status = "incomplete" if said.is_cut_short else "completed"
        if said.reasoning:
            output.append(
                {
                    "id": f"rs-{result.call_id}",
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": said.reasoning}],
                    "status": "completed",
                }
            )
        if said.content or not said.tool_calls:
            output.append(
                {
                    "id": f"msg-{result.call_id}",
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [{"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}],
                }
            )
        for i, call in enumerate(said.tool_calls):
            output.append(
                {
                    "id": f"fc-{result.call_id}/{i}",
                    "type": "function_call",
                    "call_id": call.id,
                    **_names(call.name),
                    "arguments": call.arguments,
                    "status": "completed",
                }
            )
        return {
            "id": f"resp-{result.call_id}",
            "object": "response",
            "created_at": result.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if said.is_cut_short else None,
            "instructions": None,
            "metadata": {},
            "model": result.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": result.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": result.num_sampled_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": result.num_prompt_tokens + result.num_sampled_tokens,
            },
        }

    def served(self, answer: Mapping[str, Any]) -> ChatMessage:
        """Return the items of a response as one message of a history."""
        (message,) = _joined(answer["output"], "output")
        return message

    def events(self, answer: Json, *, include_usage: bool) -> list[Event]:
        """Return the answer as the events of a stream. Usage is always in the last one."""
        events: list[Event] = []

        def add(kind: str, /, **data: Any) -> None:
            events.append(event({"type": kind, "sequence_number": len(events), **data}, name=kind))

        begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        add("response.created", response=begun)
        add("response.in_progress", response=begun)
        for i, item in enumerate(answer["output"]):
            where = {"item_id": item["id"], "output_index": i}
            match item["type"]:
                case "function_call":
                    add("response.output_item.added", output_index=i, item=_begun(item, arguments=""))
                    add("response.function_call_arguments.delta", **where, delta=item["arguments"])
                    add(
                        "response.function_call_arguments.done",
                        **where,
                        name=item["name"],
                        arguments=item["arguments"],
                    )
                case item_type:
                    is_message = item_type == "message"
                    text = "response.output_text" if is_message else "response.reasoning_text"
                    logprobs: dict[str, Any] = {"logprobs": []} if is_message else {}
                    add("response.output_item.added", output_index=i, item=_begun(item, content=[]))
                    for k, part in enumerate(item["content"]):
                        at = {**where, "content_index": k}
                        add("response.content_part.added", **at, part={**part, "text": ""})
                        add(f"{text}.delta", **at, delta=part["text"], **logprobs)
                        add(f"{text}.done", **at, text=part["text"], **logprobs)
                        add("response.content_part.done", **at, part=part)
            add("response.output_item.done", output_index=i, item=item)
        add(f"response.{answer['status']}", response=answer)
        return events

    def error(self, status: int, sentence: str) -> dict[str, Any]:
        """Return the body of a refusal."""
        return openai_error(status, sentence)


def _begun(item: Json, **empty: Any) -> dict[str, Any]:
    return {**item, "status": "in_progress", **empty}


def _messages(body: Json) -> tuple[ChatMessage, ...]:
    given = body.get("input")
    if isinstance(given, str):
        messages = [ChatMessage(role="user", content=given)]
    else:
        messages = _joined(fields.items(body, "input"), "input")
    if not messages:
        raise RequestRefused("input: got nothing, expected a text or a list of items")
    if instructions := fields.string(body, "instructions", default=""):
        messages.insert(0, ChatMessage(role="system", content=instructions))
    return tuple(messages)


def _joined(given: list[Json], name: str) -> list[ChatMessage]:
    """Return the messages in a list of items. Consecutive text and tool calls of the assistant become one message, as
    the model wrote them."""
    messages: list[ChatMessage] = []
    calls: list[dict[str, Any]] | None = None
    content = ""

    def close() -> None:
        nonlocal calls, content
        if calls is not None:
            messages.append(fields.assistant(content, calls))
        calls, content = None, ""

    for i, item in enumerate(given):
        where = f"{name}[{i}]."
        match item.get("type", "message"):
            case "reasoning":  # the template decides what to show of it
                continue
            case "function_call":
                calls = calls or []
                calls.append(
                    fields.tool_call(
                        fields.string(item, "call_id", where),
                        _full_name(item.get("namespace"), fields.string(item, "name", where)),
                        fields.string(item, "arguments", where),
                    )
                )
            case "message" if item.get("role") == "assistant":
                if calls is not None:
                    close()
                calls, content = [], fields.text_of(item.get("content"), where, text_types=TEXT_PARTS)
            case "message":
                close()
                role = item.get("role")
                if role not in ROLES:
                    raise RequestRefused(f"{where}role: got {role!r}, expected one of {', '.join(ROLES)}")
                text = fields.text_of(item.get("content"), where, text_types=TEXT_PARTS)
                messages.append(ChatMessage(role="system" if role == "developer" else str(role), content=text))
            case "function_call_output":
                close()
                messages.append(
                    ChatMessage(
                        role="tool",
                        content=fields.text_of(item.get("output"), where, text_types=TEXT_PARTS),
                        tool_call_id=fields.string(item, "call_id", where),
                    )
                )
            case other:
                raise RequestRefused(
                    f"{where}type: got {other!r}, expected message, function_call, function_call_output or reasoning"
                )
    close()
    return messages


def _refers(item: Json) -> bool:
    return item.get("type") == "item_reference"


def _resolved(body: Json, answer_of: AnswerOf) -> tuple[ChatMessage, ...] | Refusal:
    """Return the messages of a body whose input refers to items of earlier answers."""
    try:
        given = fields.items(body, "input")
        items = [_referred(item, f"input[{i}]", answer_of) if _refers(item) else item for i, item in enumerate(given)]
        return _messages({**body, "input": items})
    except RequestRefused as refused:
        return refused.refusal


def _referred(item: Json, where: str, answer_of: AnswerOf) -> Json:
    """Return the item to which a reference refers."""
    item_id = fields.string(item, "id", f"{where}.")
    match = _ITEM_ID.fullmatch(item_id)
    answer = None if match is None else answer_of(match[1])
    output = {} if answer is None else msgspec.json.decode(answer)
    found: Json | None = next((one for one in output.get("output", ()) if one.get("id") == item_id), None)
    if found is None:
        raise RequestRefused(
            f"{where}.id: got {item_id[:256]!r}, expected an item of an earlier answer of this rollout"
        )
    return found


def _full_name(namespace: Any, name: str) -> str:
    """Return the name under which a model is shown a tool. Function names contain no dots."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _names(full_name: str) -> dict[str, str]:
    """Return the fields of a call that name its tool."""
    namespace, _, name = full_name.rpartition(".")
    return {"name": name, "namespace": namespace} if namespace and name else {"name": full_name}
