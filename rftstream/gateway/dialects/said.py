"""The model's turn in the form that all dialects use: text, reasoning, and the tool calls that could be read."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rftstream.roles.explorer.model_calls import SampledCall


@dataclass(frozen=True, slots=True)
class SaidCall:
    """A tool call with its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """An assistant's turn. `said_of` makes it; the dialects write it into their answers."""

    content: str
    """The text. It includes an unreadable call as the model wrote it, so that the agent sees it."""
    reasoning: str
    tool_calls: tuple[SaidCall, ...]
    is_cut_short: bool
    """Whether a limit ended the turn."""
    stop: str | None
    """The agent's stop string that ended the turn; the text does not include it."""


def said_of(result: SampledCall) -> Said:
    """Return the model's turn in a call."""
    said = result.said
    content, calls = said.content, []
    for call in said.tool_calls:
        if call.name and call.arguments is not None:
            calls.append(SaidCall(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)))
        else:
            content += call.text
    stops = [(content.index(stop), stop) for stop in result.stop if stop in content]
    at, stop = min(stops, default=(len(content), None))
    return Said(content[:at], said.reasoning, tuple(calls), said.finish_reason != "stop" and stop is None, stop)
