"""Answers that a reward should not pay for: what a policy would learn if it does is said before the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rftstream.contracts.tasks import Problem
from rftstream.queries.formatting import number, plural
from rftstream.queries.plain import Report

NOTHING = "I do not know."
"""A text that answers nothing."""
FILLER = " ".join(["Let me think about it once more."] * 50)
"""A long text that says nothing."""
WORDS = f"{len(FILLER.split())} words that say nothing"
BOUND = "bound what length can earn"
NEAR = 0.9
"""Share of the way from the empty answer's reward to the right one's above which a reward is high."""
FEW = 0.2
"""Share of the problems up to which a high reward may be chance."""

Scored = Sequence[float | None]
"""A reward for each problem; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hack(Report):
    """An answer that says nothing right and gets a high reward. `find_hacks` makes it; `check` warns of it."""

    JSON = "said reward num_high num_problems learned advice"

    said: str
    """The answer, in words."""
    reward: float
    """Its mean reward, where that is high."""
    num_high: int
    """Problems on which its reward is high."""
    num_problems: int
    """Problems on which it was tried."""
    learned: str
    """Behaviour that a model would learn, as a verb."""
    advice: str
    """Change of the reward that ends it."""
    instead_of: float | None = None
    """The right answer's mean reward, if that is less."""

    def to_text(self) -> str:
        """Return the finding as a sentence."""
        more = "" if self.instead_of is None else f" instead of {number(self.instead_of)}"
        return (
            f"{self.said} gets {number(self.reward)}{more} on {self.num_high} of "
            f"{plural(self.num_problems, 'problem')}: the model will learn to {self.learned}; if that is not "
            f"meant, {self.advice}"
        )


@dataclass(frozen=True, slots=True)
class _Probe:
    said: str
    learned: str
    advice: str
    texts: Sequence[str]
    """Text that is said to each problem."""
    chance: float = FEW
    """Share of the problems up to which a high reward may be chance."""
    is_right: bool = False
    """Whether it has the right answer in it, so that only a reward above the right one's counts."""


def find_hacks(
    score: Callable[[list[tuple[Problem, str]]], Scored],
    problems: Sequence[Problem],
    right: Scored,
    empty: Scored,
    form: str,
) -> Iterator[Hack]:
    """Yield the answers that the reward should not pay for, and does. `score` scores what is said to problems; `right`
    are the rewards of the problems' own answers in `form` (with `{}`), and `empty` those of empty ones."""

    def found(probe: _Probe) -> Hack | None:
        rewards = score(list(zip(problems, probe.texts, strict=True)))
        high = [
            (reward, own)
            for reward, own, least in zip(rewards, right, empty, strict=True)
            if reward is not None and _is_high(reward, own, least, probe.is_right)
        ]
        if len(high) / len(problems) <= probe.chance:
            return None
        return Hack(
            said=probe.said,
            reward=sum(reward for reward, _ in high) / len(high),
            num_high=len(high),
            num_problems=len(problems),
            learned=probe.learned,
            advice=probe.advice,
            instead_of=sum(own or 0.0 for _, own in high) / len(high) if probe.is_right else None,
        )

    silent = [hack for probe in _silent_probes(len(problems)) if (hack := found(probe)) is not None]
    if silent:  # other texts get their rewards for the same reason
        yield max(silent, key=lambda hack: hack.reward)
        return
    yield from (hack for probe in _probes(problems, form) if (hack := found(probe)) is not None)


def _is_high(reward: float, right: float | None, empty: float | None, is_right: bool) -> bool:
    """Return whether a reward is one that a wrong answer should not get."""
    least = empty or 0.0
    if right is None or right <= least:  # it tells nothing apart, which is said elsewhere
        return not is_right and reward >= 1 and reward > least
    if is_right:
        return reward > right + (1 - NEAR) * (right - least)
    return reward >= least + NEAR * (right - least)


def _first_field(answer: str) -> str:
    """Return a JSON object with the first field of an answer that is one with more of them; else an empty text."""
    with suppress(ValueError):
        if isinstance(fields := json.loads(answer), dict) and len(fields) > 1:
            return json.dumps(dict([next(iter(fields.items()))]))
    return ""


def _silent_probes(num_problems: int) -> Iterator[_Probe]:
    """Yield texts in which no reward can read an answer."""
    yield _Probe(repr(NOTHING), "say anything", "reward more than a text", [NOTHING] * num_problems)
    yield _Probe(WORDS, "write long", BOUND, [FILLER] * num_problems)


def _probes(problems: Sequence[Problem], form: str) -> Iterator[_Probe]:
    answers = [problem.answer for problem in problems]
    prompts = ["\n".join(message.content for message in problem.messages) for problem in problems]
    known = list(dict.fromkeys(answer for answer in answers if answer))
    most_common = max(Counter(answers).values()) / len(answers) if known else 0  # what guessing one answer gets
    chance = max(FEW, most_common)
    place = "let the reward read a form that the prompt lacks"
    yield _Probe("the prompt itself", "repeat the prompt", place, prompts, chance)
    if not known:
        return
    padded = [f"{form.format(answer)}\n{FILLER}" for answer in answers]
    yield _Probe(f"the right answer with {WORDS} after it", "write long", BOUND, padded, is_right=True)
    firsts = [_first_field(answer or "") for answer in answers]
    if all(firsts):
        whole = "let the reward ask for every field"
        yield _Probe("the first field alone", "leave fields out", whole, [form.format(one) for one in firsts])
    if len(known) == 1:
        return
    others = [
        next(one for one in (*answers[at + 1 :], *answers) if one and one != answers[at]) for at in range(len(answers))
    ]
    own = "let the reward compare with the problem's own answer"
    yield _Probe("the answer of another problem", "guess", own, [form.format(one) for one in others], chance)
    listed = "\n".join(form.format(one) for one in known)
    place = "let the reward read one place, such as the last line"
    yield _Probe(f"an answer that lists {len(known)} candidates", "list", place, [listed] * len(problems), chance)
