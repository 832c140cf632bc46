"""Completions as people read them: with the special tokens that were sampled, dimmed where a terminal can."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rftstream.contracts.rollouts import AgentCall, Segment, Turn
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import model_here
from rftstream.models.rendering import Pieces, Renderer, open_renderer, pieces_of_turns
from rftstream.queries.formatting import plural
from rftstream.runs.folder import OpenRun

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"
LINE_END = "↵"
"""Where a completion goes on in the next line, in a view that has one line for it."""


@dataclass(frozen=True, slots=True)
class CompletionReader:
    """Reads what was sampled in a run. Commands make one, and views ask it."""

    renderer: Renderer | None = None
    """None: the tokenizer is not here; turns are shown by their text, without special tokens."""
    dims: bool = False

    def turns(
        self, turns: Sequence[Turn], segments: Sequence[Segment], calls: Sequence[AgentCall] = ()
    ) -> list[Pieces]:
        """Return the pieces of each turn; `calls` are those of an agent."""
        return pieces_of_turns(self.renderer, turns, segments, calls)

    def text(self, pieces: Pieces) -> str:
        return "".join(f"{DIM}{text}{NOT_DIM}" if special and self.dims else text for text, special in pieces)

    def said(
        self, turns: Sequence[Turn], segments: Sequence[Segment], length: int, calls: Sequence[AgentCall] = ()
    ) -> str | None:
        """The last completion on one line, cut to its length; None if there is none."""
        shown = zip(turns, self.turns(turns, segments, calls), strict=True)
        found = [pieces for turn, pieces in shown if turn.role == "assistant"]
        return self.one_line(found[-1], length) if found else None

    def one_line(self, pieces: Pieces, length: int) -> str:
        """On one line, cut to its length. Ends of lines are shown as LINE_END, which no model confuses with text."""
        line = [
            (LINE_END if part == "\n" else part, special or part == "\n")
            for text, special in pieces
            for part in re.split("(\n)", text)
            if part
        ]
        return self.text(cut(line, length, "..."))


PLAIN = CompletionReader()
"""Shows the text of turns alone."""


def open_reader(run: OpenRun, *, dims: bool) -> CompletionReader:
    """Open the reader for the model that the run samples from, if it is here; nothing is fetched."""
    renderer = None
    with suppress(ConfigError):  # a damaged folder, which is not what was asked about
        spec = model_here(run.config.model, run.folder.model)
        renderer = None if spec is None else open_renderer(spec)
    return CompletionReader(renderer, dims)


def cut(pieces: Pieces, length: int, end: str | None = None) -> Pieces:
    """The first `length` characters; what is left out is said, by `end` or by its number."""
    rest = sum(len(text) for text, _ in pieces) - length
    if rest <= 0:
        return pieces
    kept: Pieces = []
    for text, special in pieces:
        if length > 0:
            kept.append((text[:length], special))
        length -= len(text)
    return [*kept, (f" ... and {plural(rest, 'character')} more" if end is None else end, False)]
