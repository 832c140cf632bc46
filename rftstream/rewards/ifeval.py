"""The checks of IFEval: instructions that a program can verify, such as "at least 400 words" or "no commas"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rftstream.errors import MissingChecker, RewardError, importing
from rftstream.rewards.base import RewardInput, Score
from rftstream.rewards.version import config_version

WHERE, PACKAGE = "rewards.ifeval", "if-verifiable"
IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Columns of the data set google/IFEval: names of instructions, and the arguments of each."""


EXAMPLE = "This is a sentence. And this is another one."


class IfevalReward:
    """The published checks of instructions (Zhou et al. 2023, arXiv 2311.07911), in the package if-verifiable.

    Its metrics are the four published measures of the rollout; instruction-level accuracy of a data set weighs each by
    `num_instructions`."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[rewards.ifeval]`."""

        measure: Literal["prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"] = "prompt_strict"
        """The measure that is the reward: 1 if all instructions are followed, or the share that is. The loose ones also
        take the text without its first or last line, and without asterisks."""

    def __init__(self, config: Config) -> None:
        with importing(WHERE, PACKAGE, install=PACKAGE, error_type=MissingChecker):
            import langdetect
            from if_verifiable.common import evaluate_instructions
            from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
        langdetect.DetectorFactory.seed = 0
        self._evaluate, self._checkers, self._config = evaluate_instructions, INSTRUCTION_DICT, config
        self.version = config_version("1", config, PACKAGE, "langdetect", "nltk")

    def __call__(self, item: RewardInput) -> Score:
        ids, arguments = self._instructions(item.info)
        with _sentences():
            _, found = self._evaluate(item.conclusion, ids, arguments, item.prompt, self._checkers)
        measures = {
            "prompt_strict": found.binary_strict,
            "instruction_strict": found.partial_strict,
            "prompt_loose": found.binary_loose,
            "instruction_loose": found.partial_loose,
        }
        reward = measures[self._config.measure]
        return Score(reward=reward, metrics={**measures, "num_instructions": float(len(ids))})

    def check(self, item: RewardInput) -> None:
        """Raise RewardError if the problem has no instructions that the package knows, with all their arguments."""
        for name, given in zip(*self._instructions(item.info), strict=True):
            checker = self._checkers[name](name)
            if missing := sorted(set(checker.get_instruction_args_keys()) - set(given)):
                raise RewardError(f"{WHERE}: {name} has no {missing[0]!r} in {ARGUMENTS}, expected one")
            try:
                checker.build_description(**given)
                with _sentences():
                    checker.check_following(EXAMPLE)
            except (TypeError, ValueError) as error:
                raise RewardError(f"{WHERE}: {name} with {given}: {error}") from None

    def _instructions(self, info: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
        ids, arguments = info.get(IDS), info.get(ARGUMENTS)
        if not ids or not isinstance(arguments, list) or len(ids) != len(arguments):
            raise RewardError(f"{WHERE}: expected the columns {IDS} and {ARGUMENTS}, with as many entries")
        if unknown := sorted(set(ids) - set(self._checkers)):
            raise RewardError(f"{WHERE}: unknown instruction {unknown[0]!r}; known: {', '.join(self._checkers)}")
        return list(ids), [{key: value for key, value in one.items() if value is not None} for one in arguments]


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Turn nltk's error for missing data into ours."""
    try:
        yield
    except LookupError:
        raise MissingChecker(
            f"{WHERE}: nltk lacks its sentences of English; get them with python -m nltk.downloader punkt_tab"
        ) from None
