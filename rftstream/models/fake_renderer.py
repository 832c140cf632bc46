"""The renderer of runs without a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.calls import tool_calls
from rftstream.models.splice import Continuation, Conversation, difference
from rftstream.models.vision.image_tokens import ImageTokens, images_of


class FakeRenderer:
    """A renderer without a model, as `Renderer` describes it. Ids are the bytes of UTF-8; id 0 ends a completion."""

    images: ImageTokens | None = None
    vocabulary_size = 256
    stop_token_ids = frozenset({0})
    control_texts: frozenset[str] = frozenset()
    digest = "sha256:" + hashlib.sha256(b"rftstream FakeRenderer 1").hexdigest()
    names: frozenset[str] = frozenset()
    dated = False

    def __init__(self, context: int | None = None) -> None:
        self.context = context

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        if images_of(messages):
            raise ConfigError("model fake: got images, which it is not shown: it has no model")
        return self.encode("\n".join(message.content for message in messages))

    def render_turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.render(messages[:-1], tools), (*self.encode(messages[-1].content), 0)

    def parse(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]],
        finish_reason: str,
        turn: int,
    ) -> AssistantMessage:
        text = self.decode(completion)
        in_thought = tool_calls.ends_in_thought(self.decode(prompt[-tool_calls.PROMPT_END :]))
        return tool_calls.parse_text(
            text, text=text, tools=tools, finish_reason=finish_reason, turn=turn, in_thought=in_thought
        )

    def as_chat_message(self, said: AssistantMessage, completion: Sequence[int]) -> ChatMessage:
        return ChatMessage(role="assistant", content=said.text)

    def continue_prompt(
        self, known: Sequence[int], num_said: int, before: Conversation, now: Conversation
    ) -> Continuation:
        if (reason := difference(before, now)) is not None:
            return Continuation(break_reason=reason)
        later = now.messages[len(before.messages) + 1 :]
        return Continuation(token_ids=self.encode("".join(f"\n{message.content}" for message in later)))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return _bytes_of(token_ids).replace(b"\0", b"").decode(errors="replace")

    def pieces(self, token_ids: Sequence[int]) -> list[tuple[str, bool]]:
        runs = re.finditer(rb"\0+|[^\0]+", _bytes_of(token_ids))
        found = ((run[0], run[0][0] == 0) for run in runs)
        return [("<end>" * len(run) if left_out else run.decode(errors="replace"), left_out) for run, left_out in found]


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, bytes):
        return token_ids
    ids = np.asarray(token_ids, dtype=np.int32)
    data = ids.astype(np.uint8)
    if (data != ids).any():
        raise ValueError(f"got the token {int(ids[data != ids][0])}, expected bytes: the model fake has 256 tokens")
    return data.tobytes()
