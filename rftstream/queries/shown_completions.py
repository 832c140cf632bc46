"""Completions as people read them: with the special tokens that were sampled, dimmed where a terminal can."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rftstream.contracts.rollouts import Segment, Turn
from rftstream.errors import ConfigError
from rftstream.models.folder import model_here
from rftstream.models.rendering import Pieces, Renderer, open_renderer, pieces_of_turns
from rftstream.queries.formatting import plural
from rftstream.runs.folder import OpenRun

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


@dataclass(frozen=True, slots=True)
class CompletionReader:
    """Reads what was sampled in a run. Commands make one, and views ask it."""

    renderer: Renderer | None = None
    """None: the tokenizer is not here; turns are shown by their text, without special tokens."""
    dims: bool = False

    def turns(self, turns: Sequence[Turn], segments: Sequence[Segment]) -> list[Pieces]:
        return pieces_of_turns(self.renderer, turns, segments)

    def text(self, pieces: Pieces) -> str:
        return "".join(f"{DIM}{text}{NOT_DIM}" if special and self.dims else text for text, special in pieces)

    def said(self, turns: Sequence[Turn], segments: Sequence[Segment], length: int) -> str | None:
        """The last completion on one line, cut to its length; None if there is none."""
        found = [
            pieces for turn, pieces in zip(turns, self.turns(turns, segments), strict=True) if turn.role == "assistant"
        ]
        if not found:
            return None
        one_line = [(text.replace("\n", "\\n"), special) for text, special in found[-1]]
        return self.text(cut(one_line, length, "..."))


PLAIN = CompletionReader()
"""Shows the text of turns alone."""


def open_reader(run: OpenRun, *, dims: bool) -> CompletionReader:
    """Of the model that the run samples from, if it is here; nothing is fetched."""
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
