"""Converts a demonstration to segments, as an explorer would make them if the policy had sampled the expert's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import LossKind
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.rollouts import Segment
from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.calls.tool_calls import PROMPT_END
from rftstream.models.calls.written_turns import why_not_learned
from rftstream.models.rendering import Renderer, joined

CHOSEN, REJECTED = "chosen", "rejected"
Sides = dict[str | None, tuple[Segment, ...]]
"""Side -> its segments. A chat has one side, None; a pair has `chosen` and `rejected`."""


def kind_of(demonstration: Demonstration) -> LossKind:
    """Return the loss of a demonstration: `dpo` for a pair, else `sft`."""
    return LossKind.sft if demonstration.preference is None else LossKind.dpo


def tokenise(demonstration: Demonstration, renderer: Renderer) -> Sides:
    """Return the segments of each side. ConfigError if the template refuses the demonstration, or if there is nothing
    to learn from."""
    pair, given = demonstration.preference, demonstration.info
    if pair is None:
        sides: Sides = {None: _segments(demonstration.messages, 0, renderer, given)}
    else:
        sides = {
            CHOSEN: _segments((*pair.prompt, *pair.chosen), len(pair.prompt), renderer, given),
            REJECTED: _segments((*pair.prompt, *pair.rejected), len(pair.prompt), renderer, given),
        }
    for segments in sides.values():
        if not any(1 in bytes(segment.loss_mask.data[1:]) for segment in segments):
            raise ConfigError("no token of the assistant's, expected some to learn from")
    return sides


def length_of(sides: Sides) -> int:
    """Return the number of tokens in the longest segment."""
    return max((segment.token_ids.shape[0] for segments in sides.values() for segment in segments), default=0)


def _segments(
    messages: Sequence[ChatMessage], trained_from: int, renderer: Renderer, given: Mapping[str, Any]
) -> tuple[Segment, ...]:
    """Return the segments. Only the assistant's text from message `trained_from` on is trained on. If a prompt does not
    begin with the conversation so far, as its template writes it, a new segment begins. `given`: what the template is
    given beside the messages, `tools` and `chat_template_kwargs`."""
    tools, kwargs = given.get("tools", ()), given.get("chat_template_kwargs")
    segments: list[tuple[list[int], list[int]]] = []
    ends = [joined(renderer.pieces([token])) for token in renderer.stop_token_ids]
    for place, message in enumerate(messages):
        if message.role != "assistant" or place < trained_from:
            continue
        prompt, said = renderer.render_turn(messages[: place + 1], tools, kwargs)
        if (why := why_not_learned(joined(renderer.pieces(prompt[-PROMPT_END:])), message.content, ends)) is not None:
            raise ConfigError(f"message {place}, the assistant's: {why}")
        if not segments or list(prompt[: len(segments[-1][0])]) != segments[-1][0]:
            segments.append(([], []))
        token_ids, mask = segments[-1]
        mask += [0] * (len(prompt) - len(token_ids)) + [1] * len(said)
        token_ids += [*prompt[len(token_ids) :], *said]
    return tuple(
        Segment(
            token_ids=Array.of(token_ids, "int32"),
            behavior_logprobs=Array.of([0.0] * len(token_ids), "float32"),
            loss_mask=Array.of(mask, "uint8"),
            versions=(),
        )
        for token_ids, mask in segments
    )
