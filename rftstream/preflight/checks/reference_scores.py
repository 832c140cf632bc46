"""Scores the answers of a taskset's problems, and empty ones: people see whether the reward tells them apart."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from textwrap import shorten

import numpy as np

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import RewardSpec
from rftstream.config.parts.reward_uses import RewardNamed, reward_uses
from rftstream.contracts.tasks import Problem
from rftstream.error_kinds import raised_at, rough_kind_of
from rftstream.preflight.checks.reward_probes import Hack, find_hacks
from rftstream.queries.formatting import number, plural
from rftstream.queries.plain import Report
from rftstream.rewards.base import RewardGroup, RewardInput, Score, TokenSegment, message_seen, problem_input
from rftstream.rewards.composite import CompositeReward
from rftstream.rewards.functions import BatchFailed

MAX_SCORED = 20
"""Most problems whose answers are scored."""
LIMIT_S = 10.0
"""Seconds after which scoring is given up."""
NUM_NAMED = 3
"""Problems that are named whose answers got less than 1."""
NEAR = 0.9
"""An answer that gets as much as this is taken for right: the rest may be what its length costs."""
FORMS = (
    "Answer: {}",
    "The answer is {}.",
    "#### {}",
    "\\boxed{{{}}}",
    "= {}",
    "<think>...</think>\n<answer>{}</answer>",
)
"""How completions often say an answer. They are scored if the bare answers get less than 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores(Report):
    """The mean rewards of right and of empty answers. `score_references` makes it; `check` reports it."""

    JSON = "num_problems reference empty raised error hacks"

    num_problems: int
    """Problems that were scored."""
    have_answers: bool = True
    """Whether the problems have answers. Otherwise only empty completions are scored."""
    reference: float | None = None
    """Mean reward of the problems' own answers. None if there are none, or none could be scored."""
    empty: float | None = None
    """Mean reward of empty answers. None if none could be scored."""
    is_late: bool = False
    """Whether the reward took too long to know anything of it."""
    raised: int = 0
    """Problems for which the reward raised, for their own answer or for an empty one."""
    raised_right: int = 0
    """Problems for whose own answer it raised."""
    parts: tuple[tuple[str, float], ...] = ()
    """Mean of each part for the problems' own answers, without its weight. Empty if the reward has one part."""
    least: tuple[str, float] | None = None
    """The answer that got least where the reward has parts, with what it got. None if all got the same."""
    less: tuple[tuple[str, float], ...] = ()
    """The first problems' answers that got less than 1, with what they got. Penalties of long answers do not count."""
    form: tuple[str, float] | None = None
    """The first problem's answer in the form that got most, with its mean reward. None if the bare answers got 1."""
    error: str = ""
    """The errors that the reward raised, of each kind one with its number of problems, or why there are no rewards."""
    hacks: tuple[Hack, ...] = ()
    """Answers that say nothing right, and get a high reward."""
    elsewhere: tuple[int, str] | None = None
    """How often the reward raised for answers that are wrong or long, and the first error. None if it did not."""
    unsteady: tuple[float, float] | None = None
    """Two rewards of one answer to one problem. None if none differed."""
    drawing: tuple[str, ...] = ()
    """Parts of the reward that differed then."""

    @property
    def is_unknown(self) -> bool:
        """Return whether nothing that tells of the reward could be scored."""
        return (self.reference if self.have_answers else self.empty) is None

    @property
    def always_fails(self) -> bool:
        """Return whether the reward raised for the own answer of every problem, and for an empty one."""
        return self.have_answers and self.is_unknown and self.empty is None and self.raised == self.num_problems

    def to_text(self) -> str:
        """Return the rewards as words, with what is expected where they differ from it."""
        if self.is_unknown:
            return f"could not be computed: {self.error}"
        scored = plural(self.num_problems, "problem")
        if not self.have_answers:
            return f"{number(self.empty or 0.0)} for an empty completion, in {scored} without an answer"
        right, empty = (
            "an error" if found is None else f"{number(found)}{f' ({expected} expected)' if is_odd else ''}"
            for found, expected, is_odd in (
                (self.reference, 1, bool(self.less)),
                (self.empty, 0, self.empty != 0),
            )
        )
        raised = f"; raised for {self.raised} of {self.num_problems}: {self.error}" if self.raised else ""
        form = f", {number(self.form[1])} for {self.form[0]!r}" if self.form and self.form[1] > 0 else ""
        return (
            f"{right} for the problem's answer{self._by_parts()}{form}, {empty} for an empty one, in {scored}{raised}"
        )

    def _by_parts(self) -> str:
        if not self.parts:
            return ""
        least = f"; {number(self.least[1])} for {self.least[0]!r}" if self.least else ""
        return f" ({', '.join(f'{name} {number(mean)}' for name, mean in self.parts)}{least})"

    def doubts(self) -> Iterator[str]:
        """Yield what people should look at before they start, and what to do."""
        if self.is_late:
            yield (
                f"the answers of {plural(self.num_problems, 'problem')} were {self.error}; a reward that hangs, or is "
                "slow, on some of them gives these none after verifier.timeout_s, and holds up the others: mend it "
                "first, or raise verifier.timeout_s and verifier.processes"
            )
        elif self.is_unknown:
            what = "no answer of a problem" if self.have_answers else "no empty completion"
            yield (
                f"{what} could be scored ({self.error}); rollouts may get no reward either, so that "
                "every group dies: mend the reward first"
            )
        elif self.raised:
            yield (
                f"raised for {self.raised} of {self.num_problems}: {self.error}; rollouts that meet it "
                "have no reward, and their groups may die: "
                + (
                    f"right answers to {plural(self.raised_right, 'problem')} are among them, of which nothing would "
                    "be learned: mend the reward, or what the data gives it"
                    if self.raised_right
                    else "give each wrong answer its reward (catch what it raises, return a number); leave the rest "
                    "raised, since what could not be judged is no 0"
                )
            )
        elif self.elsewhere is not None:
            yield (
                f"raised for {plural(self.elsewhere[0], 'wrong or long answer')} tried, and for no right or empty one: "
                f"{self.elsewhere[1]}; rollouts that meet it have no reward, and their groups may die: catch it, and "
                "give such an answer its reward"
            )
        if self.form is not None and self.form[1] >= 1:
            pass  # it asks for more than the bare answer, and gives 1 to who does what it asks for
        elif self.reference == 0:
            form = f", and at most {number(self.form[1])} in a usual form ({self.form[0]!r})" if self.form else ""
            yield (
                f"0 for the own answers of all {self.num_problems} problems tried{form}; unless it asks for another "
                "form, look at how it reads and compares, and at which column is the answer (tasksets.NAME.columns)"
            )
        elif self.less:
            some = ", ".join(f"{answer!r} got {number(reward)}" for answer, reward in self.less)
            yield (
                f"{number(self.reference or 0.0)} in the mean for the problems' own answers, 1 expected: {some}; "
                "unless your reward asks for more than the bare answer, it takes right answers for wrong ones"
            )
        if self.empty is not None and self.empty >= 1:
            yield (
                f"{number(self.empty)} for completions that say nothing; look at how it treats an empty text: a policy "
                "learns to say nothing if that is rewarded as much"
            )
        if self.unsteady is not None:
            by = f" by {' and '.join(self.drawing)}" if self.drawing else ""
            yield (
                f"the same answer got {' and '.join(map(number, self.unsteady))} when scored twice{by}; one that "
                "draws, or keeps something between calls, gives other verdicts after a restart and in each scoring "
                "process"
            )
        yield from (hack.to_text() for hack in self.hacks)


def score_references(
    reward: CompositeReward, named: RewardNamed, problems: Sequence[Problem]
) -> ReferenceScores | None:
    """Return the rewards of the problems' answers and of empty ones; of empty ones alone if no problem has an answer.

    Return None if a reward loads a model, runs programs, asks a server, or takes what the environment gives.
    """
    specs = [registry.find_spec(RewardSpec, use.name) for use in reward_uses(named, "reward")]
    is_costly = any(spec.asks_server or spec.takes_given or spec.runs_programs for spec in specs)
    if is_costly or any(hasattr(one, "open") for one in reward.rewards):
        return None
    scoring = _Scoring(reward, problems)
    thread = threading.Thread(target=scoring.run, name="score references", daemon=True)
    # Rewards print what they score, here hundreds of made-up answers; what they start may print, too.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        thread.start()
        thread.join(LIMIT_S)
    return scoring.report()


class _Scoring:
    """Scores answers to problems, in a thread that its maker does not wait for: a user's reward may hang."""

    def __init__(self, reward: CompositeReward, problems: Sequence[Problem]) -> None:
        self._reward = reward
        self._asked = [problem for problem in problems if problem.answer][:MAX_SCORED]
        self._have_answers = bool(self._asked)
        self._asked = self._asked or list(problems[:MAX_SCORED])
        self._right: list[object] = []
        """Score of each problem's own answer, or the error that the reward raised."""
        self._empty: list[object] = []
        self._formed: list[tuple[str, list[float | None]]] = []
        """Forms of the answers, with their rewards."""
        self._hacks: list[Hack] = []
        self._again: list[object] = []
        """Scores of the problems' own answers, scored once more."""
        self._wrong: list[BaseException] = []
        """Errors of answers that are neither right nor empty."""

    def run(self) -> None:
        """Score all answers."""
        try:
            self._score()
        except Exception as error:  # a user's reward may raise anything
            if not self._empty:
                self._right = self._empty = [error] * len(self._asked)

    def _score(self) -> None:
        right = [_answered(problem, problem.answer or "") for problem in self._asked]
        empty = [_answered(problem, "") for problem in self._asked]
        if self._reward.group:  # once for each problem: two siblings give its answer, and one says nothing
            both = [
                self._reward.score_all(group, group=RewardGroup.of(group))[1:]
                for group in ((one, one, other) for one, other in zip(right, empty, strict=True))
            ]
            self._right, self._empty = [one for one, _ in both], [other for _, other in both]
            return
        self._right, self._empty = self._score_all(right), self._score_all(empty)
        best = "{}", _rewards(self._right)
        if self._have_answers and self._are_less():
            for form in FORMS:
                formed = [_answered(one, form.format(one.answer)) for one in self._asked]
                self._formed.append((form, _rewards(self._score_all(formed))))
            best = max([best, *self._formed], key=lambda one: _mean(one[1]) or 0.0)
        form, rewards = best
        self._hacks.extend(find_hacks(self._said_to, self._asked, rewards, _rewards(self._empty), form))
        self._again = self._score_all(right)

    def _are_less(self) -> bool:
        """Return whether the problems' own answers get less than right ones should. Sums of rewards give more than 1,
        and what long answers lose by a penalty does not count. Of a group,
        those are less that get no more than empty ones."""
        if self._reward.group:  # two that are right may share what the better one would get
            return (_mean(_rewards(self._right)) or 0.0) <= (_mean(_rewards(self._empty)) or 0.0)
        rewards = [one for one in self._unpenalised() if one is not None]
        return not rewards or (sum(rewards) < len(rewards) and min(rewards) < NEAR)

    def _unpenalised(self) -> list[float | None]:
        """Return the rewards of the own answers without the parts that take something off them, and nothing off empty
        answers."""
        weights = self._reward.weights
        costs = [
            {name: weights[name] * one.parts.get(name, 0.0) for name in weights} if isinstance(one, Score) else {}
            for one in (*self._right, *self._empty)
        ]
        right, empty = costs[: len(self._right)], costs[len(self._right) :]
        penalties = [
            name
            for name in weights
            if len(weights) > 1
            and all(one.get(name, 0.0) <= 0 for one in right)
            and not any(one.get(name, 0.0) for one in empty)
        ]
        taken = (sum(one.get(name, 0.0) for name in penalties) for one in right)
        return [None if one is None else one - lost for one, lost in zip(_rewards(self._right), taken, strict=True)]

    def _score_all(self, items: Sequence[RewardInput]) -> list[object]:
        return [
            self._reward.score_all([item])[0] if isinstance(one, BatchFailed) else one
            for item, one in zip(items, self._reward.score_all(items), strict=True)
        ]

    def _said_to(self, pairs: Sequence[tuple[Problem, str]]) -> list[float | None]:
        scored = self._score_all([_answered(problem, said) for problem, said in pairs])
        self._wrong.extend(one for one in scored if isinstance(one, BaseException))
        return _rewards(scored)

    def report(self) -> ReferenceScores:
        """Return what was found until now."""
        num_problems, have_answers = len(self._asked), self._have_answers
        if not self._empty:
            return ReferenceScores(
                num_problems=num_problems,
                have_answers=have_answers,
                is_late=True,
                error=f"not all scored within {LIMIT_S:g} s",
            )
        right, empty, formed = _rewards(self._right), _rewards(self._empty), list(self._formed)
        again, parts = _rewards(self._again), _parts(self._right)
        unsteady = next(_unequal(right, again), None) if again else None
        errors = [
            next((one for one in pair if isinstance(one, BaseException)), None)
            for pair in zip(self._right, self._empty, strict=True)
        ]
        return ReferenceScores(
            num_problems=num_problems,
            have_answers=have_answers,
            reference=_mean(right) if have_answers else None,
            empty=_mean(empty),
            parts=parts if have_answers else (),
            least=_least(self._asked, right) if parts and have_answers and unsteady is None else None,
            less=_less_than_one(self._asked, right, self._unpenalised()) if have_answers and self._are_less() else (),
            raised=sum(None in pair for pair in zip(right, empty, strict=True)),
            raised_right=right.count(None) if have_answers else 0,
            form=max(
                ((form.format(self._asked[0].answer), _mean(rewards) or 0.0) for form, rewards in formed),
                key=lambda one: one[1],
                default=None,
            ),
            hacks=tuple(self._hacks),
            elsewhere=(len(self._wrong), _told(self._wrong[0])) if self._wrong else None,
            unsteady=unsteady,
            drawing=_drawing(self._right, self._again) if unsteady and parts else (),
            error=_told_kinds([one for one in errors if one is not None]),
        )


def _unequal(once: Sequence[float | None], again: Sequence[float | None]) -> Iterator[tuple[float, float]]:
    for a, b in zip(once, again, strict=True):
        if a is not None and b is not None and a != b:
            yield a, b


def _parts(scored: Sequence[object]) -> tuple[tuple[str, float], ...]:
    """Return the means of the parts; empty if there is but one."""
    scores = [one for one in scored if isinstance(one, Score)]
    names = list(dict.fromkeys(name for one in scores for name in one.parts))
    means = ((name, _mean([one.parts.get(name) for one in scores]) or 0.0) for name in names)
    return tuple(means) if len(names) > 1 else ()


def _drawing(once: Sequence[object], again: Sequence[object]) -> tuple[str, ...]:
    pairs = [
        (a.parts, b.parts) for a, b in zip(once, again, strict=True) if isinstance(a, Score) and isinstance(b, Score)
    ]
    return tuple(dict.fromkeys(name for a, b in pairs for name in a if a[name] != b.get(name)))


def _least(asked: Sequence[Problem], rewards: Sequence[float | None]) -> tuple[str, float] | None:
    found = [(reward, problem) for problem, reward in zip(asked, rewards, strict=True) if reward is not None]
    if len({reward for reward, _ in found}) < 2:
        return None
    reward, problem = min(found, key=lambda one: one[0])
    return shorten(problem.answer or "", 40, placeholder="..."), reward


def _told(error: BaseException) -> str:
    place = raised_at(error)
    return f"{type(error).__name__}: {error}{place and f' at {place}'}"


def _told_kinds(errors: Sequence[BaseException]) -> str:
    """Return the first error of each kind, the most frequent kind first, each with its number if there are several."""
    kinds: dict[str, list[str]] = {}
    for told in map(_told, errors):
        kinds.setdefault(rough_kind_of(told), []).append(told)
    found = sorted(kinds.values(), key=len, reverse=True)
    return "; ".join(f"{len(one)} x {one[0]}" if len(found) > 1 else one[0] for one in found)


def _rewards(scored: Sequence[object]) -> list[float | None]:
    return [getattr(one, "reward", None) for one in scored]


def _answered(problem: Problem, said: str) -> RewardInput:
    item = problem_input(problem)
    messages = (*item.messages, message_seen("assistant", said))
    ids = [*(zlib.crc32(word.encode()) >> 1 for word in said.split()), 0]  # the last one ends it
    tokens = TokenSegment(
        token_data=np.array(ids, "<i4").tobytes(), mask_data=b"\1" * len(ids), logprob_data=bytes(4 * len(ids))
    )
    return replace(item, completion=said, messages=messages, num_tokens=len(said.split()), segments=(tokens,))


def _less_than_one(
    asked: Sequence[Problem], rewards: Sequence[float | None], unpenalised: Sequence[float | None]
) -> tuple[tuple[str, float], ...]:
    found = (
        (shorten(problem.answer or "", 40, placeholder="..."), reward)
        for problem, reward, whole in zip(asked, rewards, unpenalised, strict=True)
        if reward is not None and whole is not None and whole < 1
    )
    return tuple(islice(found, NUM_NAMED))


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
