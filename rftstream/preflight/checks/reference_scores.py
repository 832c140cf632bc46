"""Scores the answers of a taskset's problems, and empty ones: people see whether the reward tells them apart."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import RewardSpec
from rftstream.config.parts.reward_uses import RewardNamed, reward_uses
from rftstream.contracts.tasks import Problem
from rftstream.queries.formatting import number, plural
from rftstream.queries.plain import Report
from rftstream.rewards.base import RewardInput, message_seen, problem_input
from rftstream.rewards.composite import CompositeReward

MAX_SCORED = 20
"""Most problems whose answers are scored."""
LIMIT_S = 10.0
"""Seconds after which scoring is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores(Report):
    """The mean rewards of right and of empty answers. `score_references` makes it; `check` reports it."""

    JSON = "num_problems reference empty error"

    num_problems: int
    """Problems with an answer that were scored."""
    reference: float | None = None
    """Mean reward of the problems' own answers. None if none could be scored."""
    empty: float | None = None
    """Mean reward of empty answers."""
    error: str = ""
    """Why there are no rewards."""

    def to_text(self) -> str:
        """Return the rewards as words, with what is expected where they differ from it."""
        if self.error:
            return f"could not be computed: {self.error}"
        right, empty = (
            f"{number(found)}{'' if found == expected else f' ({expected} expected)'}"
            for found, expected in ((self.reference, 1), (self.empty, 0))
        )
        return f"{right} for the problem's answer, {empty} for an empty one, in {plural(self.num_problems, 'problem')}"


def score_references(
    reward: CompositeReward, named: RewardNamed, problems: Sequence[Problem]
) -> ReferenceScores | None:
    """Return the rewards of the problems' answers and of empty ones.

    Return None if no problem has an answer, or if a reward loads a model, runs programs, asks a server, or takes what
    the environment gives.
    """
    specs = [registry.find_spec(RewardSpec, use.name) for use in reward_uses(named, "reward")]
    is_costly = any(spec.asks_server or spec.takes_given or spec.runs_programs for spec in specs)
    if is_costly or any(hasattr(one, "open") for one in reward.rewards):
        return None
    asked = [problem for problem in problems if problem.answer][:MAX_SCORED]
    if not asked:
        return None
    items = [_answered(problem, said) for problem in asked for said in (problem.answer or "", "")]
    found: list[object] = []

    def score() -> None:
        try:
            found.extend(reward.score_all(items))
        except Exception as error:  # a user's reward may raise anything
            found.extend([error] * len(items))

    thread = threading.Thread(target=score, name="score references", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if len(found) < len(items):
        return ReferenceScores(num_problems=len(asked), error=f"no answer within {LIMIT_S:g} s")
    right, empty = ([getattr(one, "reward", None) for one in found[side::2]] for side in (0, 1))
    errors = [one for one in found[::2] if isinstance(one, BaseException)]
    if len(errors) == len(asked):
        return ReferenceScores(num_problems=len(asked), error=f"{type(errors[0]).__name__}: {errors[0]}")
    return ReferenceScores(num_problems=len(asked), reference=_mean(right), empty=_mean(empty))


def _answered(problem: Problem, said: str) -> RewardInput:
    item = problem_input(problem)
    messages = (*item.messages, message_seen("assistant", said))
    return replace(item, completion=said, messages=messages, num_tokens=len(said.split()))


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
