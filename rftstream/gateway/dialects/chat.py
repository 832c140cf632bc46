"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.events import Event, event
from rftstream.gateway.dialects.fields import Json, RequestRefused
from rftstream.gateway.dialects.said import Said, said_of
from rftstream.roles.explorer.model_calls import ModelCall, SampledCall

ROLES = ("system", "developer", "user", "assistant", "tool")

REFUSED = {
    "logprobs": "logprobs are not told; the rollout on the log has those of all sampled tokens",
    "top_logprobs": "only the sampled token has a logprob, expected no top_logprobs",
    "logit_bias": "tokens are sampled as the task says, and the recorded logprobs are of that; remove it",
    "functions": "got the older form, expected tools",
    "function_call": "got the older form, expected tool_choice",
    "audio": "the model writes text alone",
    "prediction": "tokens are sampled one by one; remove it",
    "web_search_options": "the endpoint has no tools of its own; offer the model a tool for it",
    "chat_template_kwargs": "the chat template is the run's (model.chat_template_kwargs); remove it",
    "guided_json": "tokens are not constrained, since that would change their recorded logprobs; remove it",
    "guided_regex": "tokens are not constrained, since that would change their recorded logprobs; remove it",
    "guided_grammar": "tokens are not constrained, since that would change their recorded logprobs; remove it",
    "guided_choice": "tokens are not constrained, since that would change their recorded logprobs; remove it",
    "previous_response_id": "got a setting of the responses API, expected chat completions",
}
"""Setting -> why it is refused."""

_READ = ("model", "messages", "tools", "stream", "stream_options", "n")


class ChatCompletions:
    """The dialect of chat completions, as `Dialect` describes it; `read` and `events` are the server's."""

    name = "chat"

    def read(self, body: Json, *, digest: str, idempotency_key: str | None, is_retry: bool) -> ModelCall:
        """Return the call that a request asks for. RequestRefused for what cannot be done exactly."""
        if body.get("n") not in (None, 1):
            raise RequestRefused(f"n: got {body['n']!r}, expected 1: each call is one sample of its rollout")
        fields.refuse(body, REFUSED)
        form = body.get("response_format")
        if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
            raise RequestRefused("response_format: tokens are not constrained; expected none, or the type text")
        if body.get("modalities") not in (None, ["text"]):
            raise RequestRefused("modalities: the model writes text alone")
        options = body.get("stream_options")
        shows_tools = body.get("tool_choice") != "none"
        return ModelCall(
            dialect=self,
            digest=digest,
            idempotency_key=idempotency_key,
            is_retry=is_retry,
            messages=_messages(body),
            tools=tuple(_tools(body)) if shows_tools else (),
            model=fields.string(body, "model", default=""),
            max_tokens=fields.limit(
                body.get("max_completion_tokens") or body.get("max_tokens"), "max_completion_tokens"
            ),
            asked=fields.asked_for(body, _READ),
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


def _tools(body: Json) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(fields.items(body, "tools")):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise RequestRefused(f"tools[{i}]: got the type {tool.get('type')!r}, expected function")
        found.append(
            fields.tool(
                function.get("name"),
                function.get("description"),
                function.get("parameters"),
                f"tools[{i}].function.",
            )
        )
    return found
