"""The dialects of the gateway. Each reads the requests of one HTTP API and writes its answers, with pure functions of
JSON.

To add one, write a module here with a class as `ServedDialect` describes it, and add a line to `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.anthropic import AnthropicMessages
from rftstream.gateway.dialects.chat import ChatCompletions
from rftstream.gateway.dialects.events import Event
from rftstream.gateway.dialects.responses import Responses
from rftstream.gateway.dialects.settings import Table
from rftstream.roles.explorer.model_calls import Dialect, ModelCall, Refusal, digest

MAX_KEY_CHARACTERS = 256
"""Longest idempotency key."""


class ServedDialect(Dialect, Protocol):
    """A dialect as the server uses it. For each request it calls `read`. When the answer is on the log, it calls
    `events` if the request wanted a stream. It calls `error` for every refusal."""

    @property
    def settings(self) -> Table:
        """Return the table of a request's settings."""

    def read(self, body: Mapping[str, Any], *, digest: str, idempotency_key: str | None, is_retry: bool) -> ModelCall:
        """Return the call that a request describes; the arguments besides its body are fields of the call.
        RequestRefused for anything that cannot be done exactly."""

    def events(self, answer: Mapping[str, Any], *, include_usage: bool) -> list[Event]:
        """Return a recorded answer as a stream. The same answer gives the same bytes."""

    def error(self, status: int, sentence: str) -> dict[str, Any]:
        """Return the body of a refusal."""


CHAT, MESSAGES = ChatCompletions(), AnthropicMessages()
DIALECTS: dict[str, ServedDialect] = {
    "chat/completions": CHAT,
    "responses": Responses(),
    "messages": MESSAGES,
}
"""Path below `/v1` -> dialect."""


def read_call(dialect: ServedDialect, body: bytes, headers: Mapping[str, str]) -> ModelCall | Refusal:
    """Return the call that a request describes, or its refusal. `headers` have names in lower case."""
    key = headers.get("idempotency-key")
    tries = headers.get("x-stainless-retry-count", "0")
    try:
        given = fields.parse_body(body)
        whole = {name: value for name, value in given.items() if name not in ("stream", "stream_options")}
        call = dialect.read(
            given,
            digest=digest([dialect.name, whole]),
            idempotency_key=key or None,
            is_retry=tries.isdecimal() and int(tries) > 0,
        )
    except fields.RequestRefused as refused:
        return refused.refusal
    if key is not None and len(key) > MAX_KEY_CHARACTERS:
        return Refusal(
            status=400,
            sentence=f"idempotency-key: got {len(key)} characters, expected at most {MAX_KEY_CHARACTERS}",
        )
    return call
