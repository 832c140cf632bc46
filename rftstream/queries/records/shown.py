"""Completions in readable form, with their sampled special tokens, which are dimmed on terminals that can do so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.rollouts import AgentCall, Posted, Rollout, Segment, Turn
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import model_here
from rftstream.models.rendering import Pieces, Renderer, open_renderer, pieces_of_turns
from rftstream.queries.formatting import plural
from rftstream.runs.folder import OpenRun

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"
LINE_END = "↵"
"""Sign for a line break in a view with only one line for a completion."""


@dataclass(frozen=True, slots=True)
class CompletionReader:
    """Decodes the sampled text of a run. Commands make one and pass it to views."""

    renderer: Renderer | None = None
    """The run's renderer. None: the tokenizer is not here, and turns are shown by their text, without special
    tokens."""
    dims: bool = False

    def turns(
        self, turns: Sequence[Turn], segments: Sequence[Segment], calls: Sequence[AgentCall] = ()
    ) -> list[Pieces]:
        """Return the pieces of each turn. `calls` are an agent's model calls."""
        return pieces_of_turns(self.renderer, turns, segments, calls)

    def text(self, pieces: Pieces) -> str:
        return "".join(f"{DIM}{text}{NOT_DIM}" if special and self.dims else text for text, special in pieces)

    def said(
        self, turns: Sequence[Turn], segments: Sequence[Segment], length: int, calls: Sequence[AgentCall] = ()
    ) -> str | None:
        """Return the last completion on one line, cut to `length`; None if there is none."""
        shown = zip(turns, self.turns(turns, segments, calls), strict=True)
        found = [pieces for turn, pieces in shown if turn.role == "assistant"]
        return self.one_line(found[-1], length) if found else None

    def one_line(self, pieces: Pieces, length: int) -> str:
        """Return the pieces on one line, cut to `length`. Line breaks are shown as LINE_END, which cannot be confused
        with text."""
        line = [
            (LINE_END if part == "\n" else part, special or part == "\n")
            for text, special in pieces
            for part in re.split("(\n)", text)
            if part
        ]
        return self.text(cut(line, length, "..."))


PLAIN = CompletionReader()
"""Reader that shows only the text of turns."""


def open_reader(run: OpenRun, *, dims: bool) -> CompletionReader:
    """Open the reader for the run's model, if the model is here. Nothing is downloaded."""
    renderer = None
    with suppress(ConfigError):  # a damaged folder, which the user did not ask about
        spec = model_here(run.config.model, run.folder.model)
        renderer = None if spec is None else open_renderer(spec)
    return CompletionReader(renderer, dims)


def cut(pieces: Pieces, length: int, end: str | None = None) -> Pieces:
    """Return the first `length` characters. The cut is marked by `end`, or by the number of missing characters."""
    rest = sum(len(text) for text, _ in pieces) - length
    if rest <= 0:
        return pieces
    kept: Pieces = []
    for text, special in pieces:
        if length > 0:
            kept.append((text[:length], special))
        length -= len(text)
    return [*kept, (f" ... and {plural(rest, 'character')} more" if end is None else end, False)]


# -------------------------------------- turns in readable form: tool calls, rewards, and where a new segment begins


MAX_CALL_CHARACTERS = 300
"""Most characters of one tool call on its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStart:
    """The start of a segment. `segment_starts` makes it."""

    segment: int
    """Number of the segment, from 0."""
    prompt: int
    """Number of tokens before the first sampled one."""
    why: str
    """Why it does not continue the segment before; empty for the first one, and if the reason was not recorded."""


def segment_starts(
    turns: Sequence[Turn], segments: Sequence[Segment], calls: Sequence[AgentCall]
) -> dict[int, SegmentStart]:
    """Return the turns that start a segment: index in `turns` -> segment."""
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


def roles_of_turns(turns: Sequence[Turn], segments: Sequence[Segment], calls: Sequence[AgentCall]) -> dict[int, str]:
    """Return who spoke in an episode of several agents: index of a sampled turn -> role."""
    sampled = [index for index, turn in enumerate(turns) if turn.finish_reason is not None]
    spoke = ((index, segments[call.segment].role) for index, call in zip(sampled, calls, strict=False) if segments)
    return {index: role for index, role in spoke if role}


def has_many_turns(rollout: Rollout) -> bool:
    """Return whether a rollout has several turns, tool calls, or rewards of turns."""
    return len(rollout.turns) > 1 or any(turn.tool_calls or turn.reward is not None for turn in rollout.turns)


def start_text(start: SegmentStart) -> str:
    """Return a line about the start of a segment that is not the first one."""
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
    """Return the parts of a turn beside its text: a line for each tool call, and one for its reward."""
    lines = [f"calls {call_text(call)}" for call in turn.tool_calls]
    return lines if turn.reward is None else [*lines, f"reward {turn.reward:.6g}"]


def posted_text(posted: Posted) -> str:
    """Return the reward that the environment or agent gave, on one line."""
    given = "no reward" if posted.reward is None else f"reward {posted.reward:.6g}"
    parts = f": {numbers(posted.parts)}" if posted.parts else ""
    roles = f"; to the roles {role_numbers(posted.roles)}" if posted.roles else ""
    wrong = f" ({posted.error})" if posted.error else ""
    return f"{posted.source} gave {given}{parts}{roles}{wrong}"


def role_numbers(roles: Mapping[str, float | None]) -> str:
    """Return `role reward` for each role."""
    return ", ".join(f"{role} {'none' if reward is None else f'{reward:.6g}'}" for role, reward in roles.items())


def numbers(values: Mapping[str, Any]) -> str:
    """Return `name value` for each value."""
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def model_call_text(call: AgentCall) -> str:
    """Return an agent's model call on one line."""
    opened = f", which it begins ({call.opened})" if call.opened else ""
    return (
        f"{call.dialect}, {plural(call.count, 'token')} at {call.start} of segment {call.segment}{opened}, "
        f"ended by {call.finish_reason}"
    )
