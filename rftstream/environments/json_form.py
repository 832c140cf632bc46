"""The plain form of an environment's arguments and results, for code without rftstream's classes.

    problem  {"messages": [message, ...], "answer": text or null, "tools": [...], "info": {...}, "data_source": text}
    message  {"role", "content"}, and where there is any: "media", "name", "tool_calls", "tool_call_id"
    said     {"content", "reasoning", "tool_calls": [call, ...], "finish_reason", "text"}
    call     {"id", "name", "arguments", "text", "error"}; "error" is null for a call that can be read
    reply    {"done", "messages", "reward", "parts", "metrics", "rewrite", "reached"}; "done" is needed, all others may
             be left out

A returned message may be just a text: then it is a user message. Several messages are a list. Numbers that are not
finite are allowed, so that a reward of NaN becomes visible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.errors import HostedCodeError

REPLY_FIELDS = tuple(field.name for field in dataclasses.fields(Reply))
MESSAGE_FIELDS = tuple(field.name for field in dataclasses.fields(ChatMessage))


def problem_to_plain(problem: Problem) -> dict[str, Any]:
    """Return the plain form of a problem."""
    plain: dict[str, Any] = msgspec.to_builtins(problem)
    return {**plain, "messages": [_without_empty(message) for message in plain["messages"]]}


def said_to_plain(said: AssistantMessage) -> dict[str, Any]:
    """Return the plain form of an assistant turn."""
    plain: dict[str, Any] = msgspec.to_builtins(said)
    return plain


def messages_from_plain(value: Any, *, what: str = "messages") -> tuple[ChatMessage, ...]:
    """Return the messages. HostedCodeError if the value holds no messages; `what` names the place of the value."""
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, list):
        raise HostedCodeError(f"{what}: got {_shown(value)}, expected a list of messages")
    return tuple(_message(one, f"{what}[{number}]") for number, one in enumerate(value))


def tools_from_plain(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools. HostedCodeError if the value holds no tools."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise HostedCodeError(f"tools: got {_shown(value)}, expected a list of function definitions")
    return tuple(_clean(one) for one in value)


def reply_from_plain(value: Any) -> Reply:
    """Return the reply. HostedCodeError if the value is no reply."""
    if not isinstance(value, dict):
        raise HostedCodeError(f"reply: got {_shown(value)}, expected a dict with done, messages, reward, ...")
    if unknown := sorted(set(value) - set(REPLY_FIELDS)):
        raise HostedCodeError(f"reply: unknown key {unknown[0]!r}; known: {', '.join(REPLY_FIELDS)}")
    if not isinstance(value.get("done"), bool):
        raise HostedCodeError(f"reply: got {_shown(value.get('done'))} as 'done', expected true or false")
    rewrite = value.get("rewrite")
    return Reply(
        done=value["done"],
        messages=messages_from_plain(value.get("messages") or [], what="reply.messages"),
        reward=None if value.get("reward") is None else _number(value["reward"], "reply.reward"),
        parts=numbers_from_plain(value.get("parts"), what="reply.parts"),
        metrics=numbers_from_plain(value.get("metrics"), what="reply.metrics"),
        rewrite=None if rewrite is None else messages_from_plain(rewrite, what="reply.rewrite"),
        reached=messages_from_plain(value.get("reached") or [], what="reply.reached"),
    )


def numbers_from_plain(value: Any, *, what: str) -> dict[str, float]:
    """Return named numbers. HostedCodeError if the value holds none."""
    return {_clean(str(name)): _number(number, f"{what}.{name}") for name, number in _named(value, what).items()}


def roles_from_plain(value: Any, *, what: str) -> dict[str, float | None]:
    """Return the rewards of roles; None of a role is None. HostedCodeError if the value holds something else."""
    return {
        _clean(str(name)): None if number is None else _number(number, f"{what}.{name}")
        for name, number in _named(value, what).items()
    }


def _named(value: Any, what: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HostedCodeError(f"{what}: got {_shown(value)}, expected a dict of numbers")
    return value


def _message(value: Any, what: str) -> ChatMessage:
    if isinstance(value, str):
        return ChatMessage(role="user", content=_clean(value))
    if not isinstance(value, dict):
        raise HostedCodeError(f"{what}: got {_shown(value)}, expected a dict with role and content")
    if unknown := sorted(set(value) - set(MESSAGE_FIELDS)):
        raise HostedCodeError(f"{what}: unknown key {unknown[0]!r}; known: {', '.join(MESSAGE_FIELDS)}")
    known = {name: one for name, one in value.items() if one is not None}
    try:
        return msgspec.convert(_clean({"content": "", **known}), ChatMessage)
    except msgspec.ValidationError as error:
        raise HostedCodeError(f"{what}: {error}") from None


def _number(value: Any, what: str) -> float:
    if not isinstance(value, (int, float)):
        raise HostedCodeError(f"{what}: got {_shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _clean(value: Any) -> Any:
    """Return the value with texts that UTF-8 can encode: an unpaired surrogate becomes a replacement character."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return value


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value or name in ("role", "content")}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
