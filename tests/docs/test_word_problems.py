"""The stories of examples/word_problems.py say what their answers are, and none that is held out is trained on."""

from __future__ import annotations

import re

import pytest
from word_problems import STORIES, WordProblems, last_number

from rftstream.config.parts import registry
from rftstream.contracts.tasks import Problem
from rftstream.errors import ConfigError


def stories(**options: object) -> list[Problem]:
    config = registry.build_config(WordProblems, options, where="options")
    made = WordProblems(config, location="", columns={}, system=None)
    return [made.problem(index) for index in range(len(made))]


def case(problem: Problem) -> tuple[int, int, int]:
    """Return the kind of a story, and its numbers."""
    text = problem.messages[-1].content
    words = ["A friend gives", "on the table", "of them away", "in a box"]
    [kind] = [number for number, one in enumerate(words) if one in text]
    a, b = map(int, re.findall(r"\d+", text))
    assert problem.answer == str(a + STORIES[kind][0] * b)
    return kind, a, b


def test_held_out_stories_have_numbers_that_no_other_story_of_their_kind_has() -> None:
    trained, held_out = stories(), stories(held_out=True, size=500)
    cases, others = set(map(case, trained)), set(map(case, held_out))
    assert {kind for kind, _, _ in cases} == {kind for kind, _, _ in others} == set(range(len(STORIES)))
    assert not cases & others
    assert len(others) == pytest.approx(0.2 * len(cases | others), rel=0.25)
    assert stories() == trained
    with pytest.raises(ConfigError, match="expected none"):
        WordProblems(WordProblems.Config(), location="", columns={"prompt": "question"}, system=None)


def test_the_last_number_counts() -> None:
    said = {" 8": 1.0, " 5 + 3 = 8\n": 1.0, "8 apples": 1.0, "5 + 3 = 18": 0.0, "8 - 3": 0.0, "eight": 0.0, "": 0.0}
    assert {text: last_number(text, "8") for text in said} == said
