"""The common part of all dialects: reading requests."""

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
    """A base class of dialects. The server calls `read`; a subclass says where a request has its messages, its tools,
    its token limit and the form of its answer."""

    name: ClassVar[str]
    settings: ClassVar[Table]
    limits: ClassVar[tuple[str, ...]]
    """Settings of the token limit; the first one present counts."""
    stop: ClassVar[str] = ""
    """Setting of the stop strings."""
    formats: ClassVar[tuple[str, ...]]
    """Settings of an answer's form."""

    def read(self, body: Json, *, digest: str, idempotency_key: str | None, is_retry: bool) -> ModelCall:
        """Return the call that a request describes. RequestRefused for anything that cannot be done exactly."""
        check(body, self.settings)
        listed = list(self._tools(body))
        choice, options = body.get("tool_choice"), body.get("stream_options")
        is_hidden = (choice.get("type") if isinstance(choice, dict) else choice) == "none"
        shown = () if is_hidden else tuple(tool for tool in listed if isinstance(tool, dict))
        formats = (fields.schema_format(value_of(body, name), name) for name in self.formats)
        messages, model = self._messages(body), fields.string(body, "model", default="")
        return ModelCall(
            dialect=self,  # type: ignore[arg-type]  # a subclass is one
            digest=digest,
            idempotency_key=idempotency_key,
            is_retry=is_retry,
            messages=() if callable(messages) else messages,
            unresolved=messages if callable(messages) else None,
            tools=shown,
            model=model,
            role=fields.role(model),
            max_tokens=fields.limit(body, *self.limits),
            stop=fields.stops(body, self.stop),
            constraint=fields.constraint(bool(shown), *formats, *self._constraints(body)),
            asked=asked_for(body, self.settings) | fields.left_out([one for one in listed if isinstance(one, str)]),
            stream=body.get("stream") is True,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def _messages(self, body: Json) -> tuple[ChatMessage, ...] | Unresolved:
        """Return the conversation, or a function that returns it when earlier answers are known."""
        raise NotImplementedError

    def _tools(self, body: Json) -> Iterator[dict[str, Any] | str]:
        """Yield the tools that the model is shown, and the types of other tools, which it could not call."""
        raise NotImplementedError

    def _constraints(self, body: Json) -> Iterable[Constraint]:
        """Return further constraints on the form of the answer."""
        return ()
