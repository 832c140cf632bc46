"""Turns as people read them: tool calls, rewards, and where a new segment begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.rollouts import AgentCall, Posted, Rollout, Segment, Turn
from rftstream.queries.formatting import plural

MAX_CALL_CHARACTERS = 300
"""Characters of one tool call on its line, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStart:
    """Where a segment begins. `segment_starts` makes it."""

    segment: int
    """Number of the segment, from 0."""
    prompt: int
    """Tokens before the first sampled one."""
    why: str
    """Why it is not the one before; empty for the first one, and where nobody noted it."""


def segment_starts(
    turns: Sequence[Turn], segments: Sequence[Segment], calls: Sequence[AgentCall]
) -> dict[int, SegmentStart]:
    """Return the turns that are the first ones of their segment: index in `turns` -> segment."""
    masks = [segment.loss_mask.numpy().tolist() for segment in segments]
    prompts = [mask.index(1) if 1 in mask else len(mask) for mask in masks]
    found: dict[int, SegmentStart] = {}
    if calls:
        sampled = [index for index, turn in enumerate(turns) if turn.finish_reason is not None]
        for index, call in zip(sampled, calls, strict=False):
            if call.segment < len(prompts) and all(start.segment != call.segment for start in found.values()):
                found[index] = SegmentStart(segment=call.segment, prompt=prompts[call.segment], why=call.opened)
        return found
    left, segment = 0, -1
    for index, turn in enumerate(turns):
        if turn.num_tokens and left == 0 and segment + 1 < len(masks):
            segment += 1
            left = sum(masks[segment])
            found[index] = SegmentStart(segment=segment, prompt=prompts[segment], why="")
        left = max(0, left - turn.num_tokens)
    return found


def has_many_turns(rollout: Rollout) -> bool:
    """Return whether there is more to see of a rollout than one completion."""
    return len(rollout.turns) > 1 or any(turn.tool_calls or turn.reward is not None for turn in rollout.turns)


def start_text(start: SegmentStart) -> str:
    """Return a line about a segment that is not the first one."""
    why = f": {start.why}" if start.why else ""
    return f"segment {start.segment} begins, with a prompt of {plural(start.prompt, 'token')}{why}"


def call_text(call: ToolCall) -> str:
    """Return `name(argument=value)` as one line, or why the call cannot be read."""
    if call.error is not None:
        return _bounded(f"{call.name or 'unknown'}, which cannot be read: {call.error}")
    given = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in (call.arguments or {}).items()
    )
    return _bounded(f"{call.name}({given})")


def _bounded(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= MAX_CALL_CHARACTERS else f"{text[: MAX_CALL_CHARACTERS - 3]}..."


def turn_lines(turn: Turn) -> list[str]:
    """Return what a turn has beside its text: a line for each tool call, and one for its reward."""
    lines = [f"calls {call_text(call)}" for call in turn.tool_calls]
    return lines if turn.reward is None else [*lines, f"reward {turn.reward:.6g}"]


def posted_text(posted: Posted) -> str:
    """Return what environment or agent gave as reward, on one line."""
    given = "no reward" if posted.reward is None else f"reward {posted.reward:.6g}"
    parts = f": {numbers(posted.parts)}" if posted.parts else ""
    wrong = f" ({posted.error})" if posted.error else ""
    return f"{posted.source} gave {given}{parts}{wrong}"


def numbers(values: Mapping[str, Any]) -> str:
    """Return `name value` for each."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def model_call_text(call: AgentCall) -> str:
    """Return what an agent's model call was, on one line."""
    opened = f", which it begins ({call.opened})" if call.opened else ""
    return (
        f"{call.dialect}, {plural(call.count, 'token')} at {call.start} of segment {call.segment}{opened}, "
        f"ended by {call.finish_reason}"
    )
