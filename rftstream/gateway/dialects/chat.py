"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rftstream.contracts.tasks import FORMS, ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.base import ReadDialect
from rftstream.gateway.dialects.events import Event, event
from rftstream.gateway.dialects.fields import Json, RequestRefused
from rftstream.gateway.dialects.said import Said, said_of
from rftstream.gateway.dialects.settings import CHAT_SETTINGS
from rftstream.models.calls.call_reading import kind
from rftstream.policies.base import Constraint
from rftstream.roles.explorer.model_calls import SampledCall

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatCompletions(ReadDialect):
    """The dialect of chat completions, as `Dialect` describes it; the server uses `read` and `events`."""

    name = "chat"
    settings = CHAT_SETTINGS
    limits = ("max_completion_tokens", "max_tokens")
    stop = "stop"
    formats = ("response_format",)

    def _messages(self, body: Json) -> tuple[ChatMessage, ...]:
        messages = fields.items(body, "messages")
        if not messages:
            raise RequestRefused("messages: got none, expected at least one")
        return tuple(_message(message, f"messages[{i}].") for i, message in enumerate(messages))

    def _tools(self, body: Json) -> Iterator[dict[str, Any] | str]:
        for i, tool in enumerate(fields.items(body, "tools")):
            if tool.get("type", "function") != "function":
                yield str(tool["type"])
                continue
            function = tool.get("function")
            if not isinstance(function, dict):
                raise RequestRefused(f"tools[{i}].function: got {kind(function)}, expected an object")
            name, description, parameters = (function.get(name) for name in ("name", "description", "parameters"))
            yield fields.tool(name, description, parameters, f"tools[{i}].function.")

    def _constraints(self, body: Json) -> Iterator[Constraint]:
        """Yield the constraints in vLLM's settings, by their newer name or by one of the older ones."""
        given = body.get("structured_outputs")
        if given is not None and not isinstance(given, dict):
            raise RequestRefused(f"structured_outputs: got {kind(given)}, expected an object")
        settings = {name: value for name, value in (given or {}).items() if value not in (None, False)}
        if unknown := sorted(settings.keys() - set(FORMS)):
            raise RequestRefused(f"structured_outputs.{unknown[0]}: unknown; expected one of {', '.join(FORMS)}")
        for name, value in settings.items():
            yield Constraint(kind=name, value=value, setting="structured_outputs")
        for name in FORMS:
            if (value := body.get(f"guided_{name}")) is not None:
                yield Constraint(kind=name, value=value, setting=f"guided_{name}")

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
        """Return the message of a chat completion in the form of a history."""
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
    """Return a refusal in the form of OpenAI's APIs."""
    kinds = {401: "authentication_error", 409: "conflict_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sentence, "type": kind, "param": None, "code": None}}


def _finish_reason(said: Said) -> str:
    if said.is_cut_short:
        return "length"
    return "tool_calls" if said.tool_calls else "stop"


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
        raise RequestRefused(f"{where}function: got {kind(function)}, expected an object")
    return fields.tool_call(
        fields.string(call, "id", where),
        fields.string(function, "name", f"{where}function."),
        function.get("arguments") or "{}",
    )
