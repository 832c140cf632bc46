"""OpenAI's responses: `POST /v1/responses`. Each request carries its whole input; nothing is kept between two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.chat import openai_error
from rftstream.gateway.dialects.events import Event, event
from rftstream.gateway.dialects.fields import Json, RequestRefused
from rftstream.gateway.dialects.said import said_of
from rftstream.roles.explorer.model_calls import ModelCall, SampledCall

REFUSED = {
    "previous_response_id": "answers are not kept for later requests; send the whole input",
    "conversation": "conversations are not kept; send the whole input",
    "prompt": "the endpoint has no stored prompts; send the input itself",
    "background": "a call is answered on its own connection; remove it",
    "top_logprobs": "only the sampled token has a logprob, expected no top_logprobs",
    "logit_bias": "tokens are sampled as the task says, and the recorded logprobs are of that; remove it",
    "context_management": "the endpoint does not rewrite the context; do that in the agent",
}
"""Setting -> why it is refused."""

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")
_READ = ("model", "input", "instructions", "tools", "stream", "stream_options")


class Responses:
    """The dialect of responses, as `Dialect` describes it; `read` and `events` are the server's."""

    name = "responses"

    def read(self, body: Json, *, digest: str, idempotency_key: str | None, is_retry: bool) -> ModelCall:
        """Return the call that a request asks for. RequestRefused for what cannot be done exactly."""
        fields.refuse(body, REFUSED)
        text = body.get("text")
        form = text.get("format") if isinstance(text, dict) else None
        if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
            raise RequestRefused("text.format: tokens are not constrained; expected none, or the type text")
        include = body.get("include") or []
        if isinstance(include, list) and "message.output_text.logprobs" in include:
            raise RequestRefused("include: logprobs are not told; the rollout on the log has those of all tokens")
        shows_tools = body.get("tool_choice") != "none"
        return ModelCall(
            dialect=self,
            digest=digest,
            idempotency_key=idempotency_key,
            is_retry=is_retry,
            messages=_messages(body),
            tools=tuple(_tools(body)) if shows_tools else (),
            model=fields.string(body, "model", default=""),
            max_tokens=fields.limit(body.get("max_output_tokens"), "max_output_tokens"),
            asked=fields.asked_for(body, _READ),
            stream=body.get("stream") is True,
        )

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
                    "name": call.name,
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
        """Return the answer as the events of a stream. Usage is in the last one in any case."""
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
    """Return the messages of a list of items. Text and tool calls of the assistant that follow each other are one
    message, as the model said them."""
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
            case "reasoning":  # what the template shows of it is the template's affair
                continue
            case "function_call":
                calls = calls or []
                calls.append(
                    fields.tool_call(
                        fields.string(item, "call_id", where),
                        fields.string(item, "name", where),
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


def _tools(body: Json) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(fields.items(body, "tools")):
        if tool.get("type") != "function":
            raise RequestRefused(
                f"tools[{i}]: got the type {tool.get('type')!r}, expected function: the endpoint has no own tools"
            )
        found.append(fields.tool(tool.get("name"), tool.get("description"), tool.get("parameters"), f"tools[{i}]."))
    return found
