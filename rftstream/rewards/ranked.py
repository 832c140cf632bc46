"""Judges that compare siblings: all of them in one question, or two at a time in a tournament.

The order in which a judge sees the answers follows from their texts alone. So a restart asks the same questions again,
and finds the answers in the cache (judge_cache.py). Siblings that say the same are one answer, with one score.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.core.samples import plain_sum
from rftstream.errors import ConfigError, RewardError
from rftstream.rewards.base import RewardGroup, RewardInput, Score
from rftstream.rewards.event_loop import caught
from rftstream.rewards.judge import Judge, JudgeConfig, Spent
from rftstream.rewards.judge_forms import JudgeCriterion, PairForm, RubricForm
from rftstream.rewards.judge_prompts import RULER, RULER_RUBRIC, fill, fill_prompt


class RulerReward:
    """A judge scores all siblings in one question, relative to each other, from 0 to 1 (RULER).

    Scores of different groups are not comparable, which algorithms with group advantages do not need. Metrics: those of
    the cost that `judge` has.

    Source: OpenPipe ART, RULER (relative universal LLM-elicited rewards)."""

    takes_base = True

    @dataclass(frozen=True, kw_only=True)
    class Config(JudgeConfig):
        """The settings in `[rewards.ruler]`."""

        rubric: str = RULER_RUBRIC
        """The rules by which one answer is better than another."""
        prompt: str | None = None
        """Prompt for the judge. {prompt}, {answers}, {rubric} and {answer}, the problem's own answer, are filled in."""

    def __init__(self, config: Config, *, base: str = ".") -> None:
        if config.prompt is not None and "{answers}" not in config.prompt:
            raise ConfigError("rewards.ruler.prompt: expected {answers}, the answers that are compared")
        self._config = config
        self._judge = Judge("ruler", config, base=base)
        self.version = Judge.version("1", config)

    def score_group(self, group: RewardGroup) -> list[Score]:
        """Return the score of each sibling."""
        answers, spent = Answers(group), Spent()
        numbers = dict.fromkeys(answers.texts, 0.5)
        if len(numbers) > 1:
            names = {f"answer_{place + 1}": text for place, text in enumerate(answers.texts)}
            form = RubricForm(None, [JudgeCriterion(name=name, low=0.0, high=1.0) for name in names], fenced=True)
            found = self._judge.judgement(self._question(group.siblings[0], names, form.wanted), form, spent)
            numbers = {text: found[name] for name, text in names.items()}
        return answers.scores(numbers, self._judge.cost(spent) if len(numbers) > 1 else {})

    def _question(self, item: RewardInput, names: Mapping[str, str], wanted: str) -> str:
        template = self._config.prompt or RULER
        if "{rubric}" not in template:
            template += "\n\n{rubric}"
        template = fill(template, {"answers": "\n\n".join(f"{{{name}}}" for name in names)})
        rubric = f"{self._config.rubric}\n\nThink it over briefly. {wanted}"
        texts = {"prompt": item.prompt, "answer": item.answer or "", **names}
        return fill_prompt(template, texts, {"rubric": rubric}, fenced=self._config.fenced or not self._config.prompt)


class TournamentReward:
    """A judge compares two siblings at a time, each pair in both orders.

    `bracket`: the loser of a pair is out, and the reward is the share of the rounds that an answer survived: 1 for the
    winner, 0 for those that lose at once. `round_robin`: all pairs are compared, and the reward is the mean result (1
    won, 0.5 neither, 0 lost). If a judge prefers neither, or contradicts itself, the better seed goes on in a bracket.
    Seeds are drawn from the texts. Metrics: `undecided` (share of the pairs without a winner), and those of the cost
    that `judge` has."""

    takes_base = True

    @dataclass(frozen=True, kw_only=True)
    class Config(JudgeConfig):
        """The settings in `[rewards.tournament]`."""

        pairing: Literal["bracket", "round_robin"] = "bracket"
        """Pairs that are compared: of n answers n - 1, or n (n - 1) / 2."""
        prompt: str | None = None
        """Prompt for the judge. {prompt}, {first} and {second} are filled in. Default: which answer solves the problem
        better."""
        seed: Annotated[int, Meta(ge=0)] = 0
        """Another seed draws another bracket."""

    def __init__(self, config: Config, *, base: str = ".") -> None:
        self._config = config
        self._form = PairForm(config.prompt, "", fenced=config.fenced, name="tournament")
        self._judge = Judge("tournament", config, base=base)
        self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix="tournament")
        self.version = Judge.version("1", config)

    def score_group(self, group: RewardGroup) -> list[Score]:
        """Return the score of each sibling."""
        answers, spent = Answers(group, seed=self._config.seed), Spent()
        play = self._bracket if self._config.pairing == "bracket" else self._round_robin
        numbers, results = play(group.siblings[0].prompt, answers.texts, spent)
        undecided = {"undecided": sum(one == 0.5 for one in results) / len(results)} if results else {}
        return answers.scores(numbers, {**undecided, **self._judge.cost(spent)} if results else {})

    def _bracket(self, prompt: str, texts: Sequence[str], spent: Spent) -> tuple[dict[str, float], list[float]]:
        """Return the share of the rounds that each answer survived, and the results of all pairs."""
        num_rounds = max(1, math.ceil(math.log2(len(texts))))
        survived, left, results = dict.fromkeys(texts, 1.0 if len(texts) > 1 else 0.5), list(texts), list[float]()
        for number in range(num_rounds):
            pairs = list(zip(left[::2], left[1::2], strict=False))  # the last of an odd number rests
            found = self._compare(prompt, pairs, spent)
            results += found
            lost = [second if result >= 0.5 else first for (first, second), result in zip(pairs, found, strict=True)]
            survived.update(dict.fromkeys(lost, number / num_rounds))
            left = [text for text in left if text not in lost]
        return survived, results

    def _round_robin(self, prompt: str, texts: Sequence[str], spent: Spent) -> tuple[dict[str, float], list[float]]:
        """Return the mean result of each answer, and the results of all pairs."""
        pairs = [(first, second) for place, first in enumerate(texts) for second in texts[place + 1 :]]
        results = self._compare(prompt, pairs, spent)
        won: dict[str, list[float]] = {text: [] for text in texts}
        for (first, second), result in zip(pairs, results, strict=True):
            won[first].append(result)
            won[second].append(1.0 - result)
        return {text: plain_sum(some) / len(some) if some else 0.5 for text, some in won.items()}, results

    def _compare(self, prompt: str, pairs: Sequence[tuple[str, str]], spent: Spent) -> list[float]:
        """Return for each pair 1 if the first answer is better, 0 if the second is, else 0.5. All pairs are judged at
        the same time."""
        found = list(self._threads.map(lambda pair: caught(self._compare_two, prompt, *pair), pairs))
        for one in found:
            if isinstance(one, BaseException):
                raise one
            spent.add(one[1])
        return [result for result, _ in found]

    def _compare_two(self, prompt: str, first: str, second: str) -> tuple[float, Spent]:
        spent = Spent()
        said = [self._judge.judgement(one, self._form, spent) for one in self._form.pair(prompt, first, second)]
        return self._form.score(said).reward, spent


class Answers:
    """The texts of the siblings of a group, each once. A reward makes it for a call, asks for `texts`, and gives back
    a number for each."""

    def __init__(self, group: RewardGroup, *, seed: int = 0) -> None:
        if not group.siblings:
            raise RewardError("found no sibling to compare")
        self._said = [said_by(item) for item in group.siblings]
        mixed = f"{seed}\0{group.siblings[0].prompt}\0"
        self.texts = sorted(set(self._said), key=lambda text: (_digest(mixed + text), text))
        """The texts, in an order that follows from them."""

    def scores(self, numbers: Mapping[str, float], metrics: Mapping[str, float]) -> list[Score]:
        """Return the score of each sibling. Amounts among the metrics are shared by all of them."""
        count = len(self._said)
        shared = {name: value / count if name.startswith("spent_") else value for name, value in metrics.items()}
        return [Score(reward=numbers[text], metrics=shared) for text in self._said]


def said_by(item: RewardInput) -> str:
    """Return what a judge reads of a rollout: the completion, or all turns after the problem if there are several."""
    turns = item.messages[item.num_prompt_messages :]
    if len(turns) <= 1:
        return item.completion
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
