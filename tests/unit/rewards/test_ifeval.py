"""The checks of IFEval in the package that has them, in an environment of its own that this interpreter looks into."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rftstream.errors import MissingChecker, RewardError
from rftstream.rewards.ifeval import IfevalReward
from tests.unit.environments.hosts.venvs import interpreter
from tests.unit.reward_inputs import reward_input

pytestmark = pytest.mark.slow

PACKAGES = (
    "if-verifiable==0.1.2", "langdetect==1.0.9", "nltk==3.10.4", "emoji==2.16.0", "immutabledict==4.3.1",
    "syllapy==0.8.0", "six", "regex", "click", "joblib", "tqdm", "--no-deps",
)  # fmt: skip
NO_COMMA: tuple[str, dict[str, Any]] = ("punctuation:no_comma", {"num_words": None})
WORDS: tuple[str, dict[str, Any]] = ("length_constraints:number_words", {"num_words": 4, "relation": "at least"})
QUOTED: tuple[str, dict[str, Any]] = ("startend:quotation", {})
GERMAN: tuple[str, dict[str, Any]] = ("language:response_language", {"language": "de"})
LETTERS = ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "less than"})


def packages_of_ifeval() -> str:
    """Return the folder in which the package and what it needs lie."""
    [site] = Path(interpreter(*PACKAGES)).parent.parent.glob("lib/python*/site-packages")
    return str(site)


@pytest.fixture(autouse=True)
def checks_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, packages_of_ifeval()])


def info_of(*instructions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    names, arguments = zip(*instructions, strict=True)
    return {"instruction_id_list": list(names), "kwargs": list(arguments)}


@pytest.mark.parametrize(
    ("said", "asked", "measures"),
    [
        ("one two three four", (NO_COMMA, WORDS), (1, 1, 1, 1)),
        ("one, two three four", (NO_COMMA, WORDS), (0, 0.5, 0, 0.5)),
        ("Sure, here it is:\none two three four", (NO_COMMA, WORDS), (0, 0.5, 1, 1)),
        ('"one two"', (QUOTED, NO_COMMA, WORDS), (0, 2 / 3, 0, 2 / 3)),
        ('*"one"*', (QUOTED,), (0, 0, 1, 1)),
        ("Das ist ein deutscher Satz über das Wetter von heute.", (GERMAN,), (1, 1, 1, 1)),
        ("That is an English sentence about the weather of today.", (GERMAN,), (0, 0, 0, 0)),
        ("a zoo", (LETTERS,), (1, 1, 1, 1)),
        ("pizza", (LETTERS,), (0, 0, 0, 0)),
        ("<think>a, b</think>one two three four", (NO_COMMA, WORDS), (1, 1, 1, 1)),
        ("", (NO_COMMA,), (0, 0, 0, 0)),
    ],
)
def test_the_published_measures(said: str, asked: Any, measures: tuple[float, ...]) -> None:
    names = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
    for name, expected in zip(names, measures, strict=True):
        reward = IfevalReward(IfevalReward.Config(measure=name))  # type: ignore[arg-type]
        given = reward_input(said, info=info_of(*asked))
        reward.check(given)
        score = reward(given)
        assert score.reward == pytest.approx(expected)
        assert [score.metrics[name] for name in names] == pytest.approx(list(measures))
        assert score.metrics["num_instructions"] == len(asked)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, "expected the columns instruction_id_list and kwargs"),
        (info_of(("no:such", {})), "unknown instruction 'no:such'; known: keywords:existence"),
        (info_of((WORDS[0], {"num_words": 4})), "number_words has no 'relation' in kwargs"),
        (info_of((WORDS[0], {"num_words": 4, "relation": "around"})), "number_words with .*around"),
        (info_of((*NO_COMMA[:1], {"words": 1})), "no_comma with .*unexpected keyword argument 'words'"),
    ],
)
def test_rows_that_ask_for_nothing_known(info: dict[str, Any], expected: str) -> None:
    with pytest.raises(RewardError, match=expected):
        IfevalReward(IfevalReward.Config()).check(reward_input("a", info=info))


def test_sentences_need_data_of_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = IfevalReward(IfevalReward.Config())
    monkeypatch.setattr("nltk.data.path", [])
    asked = info_of(("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}))
    for call in (reward, reward.check):
        with pytest.raises(MissingChecker, match="get them with python"):
            call(reward_input("One. Two.", info=asked))
