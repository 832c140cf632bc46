"""The reading of requests that all dialects have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from rftstream.contracts.tasks import ChatMessage
from rftstream.gateway.dialects import fields
from rftstream.gateway.dialects.fields import Json
from rftstream.gateway.dialects.settings import Table, asked_for, check, value_of
from rftstream.policies.base import Constraint
from rftstream.roles.explorer.model_calls import AnswerOf, ModelCall, Refusal

Unresolved = Callable[[AnswerOf], tuple[ChatMessage, ...] | Refusal]


class ReadDialect:
    """A base of dialects. `read` is the server's; a subclass says where a request has its messages, its tools, its
    limit and the form of its answer."""

    name: ClassVar[str]
    settings: ClassVar[Table]
    limits: ClassVar[tuple[str, ...]]
    """Settings of the limit of tokens, the first that is there."""
    stop: ClassVar[str] = ""
    """Setting of stop strings."""
    formats: ClassVar[tuple[str, ...]]
    """Settings of the form of an answer."""

    def read(self, body: Json, *, digest: str, idempotency_key: str | None, is_retry: bool) -> ModelCall:
        """Return the call that a request asks for. RequestRefused for what cannot be done exactly."""
        check(body, self.settings)
        listed = list(self._tools(body))
        choice, options = body.get("tool_choice"), body.get("stream_options")
        is_hidden = (choice.get("type") if isinstance(choice, dict) else choice) == "none"
        shown = () if is_hidden else tuple(tool for tool in listed if isinstance(tool, dict))
        formats = (fields.schema_format(value_of(body, name), name) for name in self.formats)
        messages = self._messages(body)
        return ModelCall(
            dialect=self,  # type: ignore[arg-type]  # a subclass is one
            digest=digest,
            idempotency_key=idempotency_key,
            is_retry=is_retry,
            messages=() if callable(messages) else messages,
            unresolved=messages if callable(messages) else None,
            tools=shown,
            model=fields.string(body, "model", default=""),
            max_tokens=fields.limit(body, *self.limits),
            stop=fields.stops(body, self.stop),
            constraint=fields.constraint(bool(shown), *formats, *self._constraints(body)),
            asked=asked_for(body, self.settings) | fields.left_out([one for one in listed if isinstance(one, str)]),
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def _messages(self, body: Json) -> tuple[ChatMessage, ...] | Unresolved:
        """Return the conversation, or what makes it once earlier answers are known."""
        raise NotImplementedError

    def _tools(self, body: Json) -> Iterator[dict[str, Any] | str]:
        """Yield the tools that a model is shown, and the types of others: it could not call them."""
        raise NotImplementedError

    def _constraints(self, body: Json) -> Iterable[Constraint]:
        """Return what else says something about the form of the answer."""
        return ()
