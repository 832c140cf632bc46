"""Completions for people: special tokens are there, and dim where that can be seen."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rftstream.commands.options import can_dim
from rftstream.contracts.arrays import Array
from rftstream.contracts.rollouts import Segment, Turn
from rftstream.models.rendering import open_renderer
from rftstream.queries.records.shown import CompletionReader, cut
from tests.unit import tiny

TURNS = (Turn(role="user", content="1+1="), Turn(role="assistant", content="2", num_tokens=2))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def segments() -> tuple[Segment, ...]:
    ids, mask = [2, 11, 2, 15, 3, 0], [0, 0, 0, 0, 1, 1]
    return (
        Segment(
            token_ids=Array.of(ids, "int32"), behavior_logprobs=Array.of([0.0] * 6, "float32"),
            loss_mask=Array.of(mask, "uint8"), versions=(),
        ),
    )  # fmt: skip


def test_a_completion_has_its_special_tokens(tmp_path: Path, segments: tuple[Segment, ...]) -> None:
    renderer = open_renderer(tiny.make(tmp_path))
    assert CompletionReader(renderer).said(TURNS, segments, 60) == "2<eos>"
    assert CompletionReader(renderer, dims=True).said(TURNS, segments, 60) == "2\x1b[2m<eos>\x1b[22m"
    assert CompletionReader().said(TURNS, segments, 60) == "2", "without a tokenizer the text alone"
    assert CompletionReader(renderer).said(TURNS[:1], segments, 60) is None


def test_what_is_cut_is_counted_and_no_style_is_left_open() -> None:
    pieces = [("abc", False), ("<eos>", True), ("def", False)]
    assert cut(pieces, 11) == pieces
    text = CompletionReader(dims=True).text(cut(pieces, 5))
    assert text == "abc\x1b[2m<e\x1b[22m ... and 6 characters more"


def test_only_a_terminal_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdout", Terminal())
    assert can_dim()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not can_dim()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not can_dim()
