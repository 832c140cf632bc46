"""Finds signs of training problems in the recorded steps and evaluations, from the first step on.

Each sign is a function of the history alone, as in `algorithms.reward_signs`. A sign is a reason to look, not a proof.

    lr           the newest steps have learned nothing, by a learning rate of 0
    unscored     many rollouts have no reward, and as many at first; `reward_signs` tells of a share that rises
    truncated    a token limit ends most completions, and no fewer than at first
    no_signal    no step has had a learning signal yet, or none for some steps
    collapsed    the reward, or else an evaluation, is far below what it was
    entropy      the policy says nearly the same each time, though some problems are not solved
    length       completions became much longer, and no better
    evaluation   an evaluation fell while the reward rose
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rftstream.algorithms.learning_signal import STEPS_WITHOUT_SIGNAL, WARN_AFTER_STEPS, likely_cause
from rftstream.algorithms.reward_changes import by_newest_scorer
from rftstream.algorithms.reward_signs import UNSCORED_RISE, Sign
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import EvalResult, StepRecord
from rftstream.queries.formatting import number, plural

WINDOW = 5
"""Steps at each end of the history that are compared."""
LEAST_STEPS = 2 * WINDOW
"""Steps before a change is reported."""
MANY_UNSCORED = 0.1
"""Share of rollouts without a reward that is reported."""
MANY_CUT = 0.5
"""Share of completions cut by a token limit that is reported."""
NOT_FALLING = 0.9
"""Share of the first value: a value above it has not fallen."""
LOW_ENTROPY = 0.1
"""Share of the first entropy below which entropy is reported."""
ALIKE = 0.8
"""Share of groups with equal rewards above which siblings count as alike."""
UNEVEN = 0.25
"""Standard deviation of the rewards, as a share of their mean, above which some problems count as unsolved."""
LENGTH_FACTOR = 2.0
"""Factor of growth of the mean length that is reported."""
RISE = 0.1
"""Rise of the reward that justifies longer completions."""
CUT_RISE = 0.25
"""Rise of the share of truncated completions that no reward justifies."""
FALL = 0.05
"""Fall of an evaluation's mean that is reported, if it exceeds chance."""
COLLAPSED = 0.5
"""Fall of the reward that is reported, as a share of its best; it must also exceed `SPREADS` standard deviations."""
SPREADS = 0.75
REWARD_ROSE = 0.02
"""Rise of the reward with which a fall of an evaluation is reported."""


_BACK = (
    "if a setting was changed there, such as trainer.lr, `rftstream resume RUN --set run.resume=VERSION --set ...` "
    "goes back to an earlier checkpoint and takes better ones"
)


def find_training_signs(
    steps: Sequence[StepRecord], evaluations: Sequence[EvalResult], config: RunConfig
) -> tuple[Sign, ...]:
    """Return the signs in the steps and evaluations of a run, both by version."""
    if not steps:
        return ()
    return (
        *_no_lr(steps),
        *_unscored(steps),
        *_truncated(steps),
        *_no_signal(steps, config),
        *(tuple(_collapsed(steps)) or _collapsed_evaluations(evaluations, config)),
        *_entropy(steps),
        *_length(steps),
        *_evaluations(steps, evaluations, config),
    )


def _no_lr(steps: Sequence[StepRecord]) -> Iterator[Sign]:
    if len(steps) < WINDOW or (ends := _ends(steps, "lr")) is None:
        return
    ((first, last),) = ends
    if last == 0:
        why = "set trainer.lr" if first == 0 else f"trainer.lr_schedule has brought it there from {number(first)}"
        yield Sign("lr", "trainer.lr", f"the newest steps have a learning rate of 0, so nothing is learned: {why}")


def _unscored(steps: Sequence[StepRecord]) -> Iterator[Sign]:
    if (ends := _ends(steps, "unscored_share")) is None:
        return
    ((first, last),) = ends
    if last < MANY_UNSCORED or (len(steps) >= LEAST_STEPS and last - first >= UNSCORED_RISE):
        return
    text = f"{last:.0%} of the newest rollouts have no reward, and teach nothing: `rftstream dead list RUN` says why"
    yield Sign("unscored", "rewards", text)


def _truncated(steps: Sequence[StepRecord]) -> Iterator[Sign]:
    if (ends := _ends(steps, "truncated_share")) is None:
        return
    ((first, last),) = ends
    if last < MANY_CUT or (len(steps) >= LEAST_STEPS and last < NOT_FALLING * first):
        return
    text = f"{last:.0%} of the newest completions are cut off by sampling.max_tokens or model.context"
    yield Sign("truncated", "completions", text)


def _no_signal(steps: Sequence[StepRecord], config: RunConfig) -> Iterator[Sign]:
    """Yield the sign that comes before `find_no_signal` reports."""
    without = int(steps[-1].metrics.get(STEPS_WITHOUT_SIGNAL, 0))
    if min(len(steps), WINDOW) <= without < WARN_AFTER_STEPS:
        since = "since the run began" if without >= len(steps) else "until now"
        yield Sign(
            "no_signal", "groups", f"{plural(without, 'step')} {since}: {likely_cause(steps[-1].metrics, config)}"
        )


def _collapsed(steps: Sequence[StepRecord]) -> Iterator[Sign]:
    steps = [step for step in steps if "reward" in step.metrics]
    if len(steps) < 2 * LEAST_STEPS:
        return
    sums = list(accumulate((step.metrics["reward"] for step in steps), initial=0.0))
    means = [(end - begin) / LEAST_STEPS for begin, end in zip(sums, sums[LEAST_STEPS:], strict=False)]
    begin = max(range(len(means)), key=means.__getitem__)
    best, last = means[begin], means[-1]
    ends = [*steps[begin : begin + LEAST_STEPS], *steps[-LEAST_STEPS:]]  # at one of them all rewards may be equal
    spread = max(step.metrics.get("reward_std", 0.0) for step in ends)
    if best - last < max(COLLAPSED * abs(best), SPREADS * spread) or best == last:
        return
    at = next(step.name.version for step in reversed(steps) if step.metrics["reward"] > (best + last) / 2)
    text = f"fell from {number(best)} to {number(last)}, most of it after version {at:,}; {_BACK}"
    yield Sign("collapsed", "the reward", text)


def _collapsed_evaluations(evaluations: Sequence[EvalResult], config: RunConfig) -> Iterator[Sign]:
    """Yield the evaluations that collapsed. They are known where only the newest steps are."""
    for name, best, newest, chance in _bests(evaluations, config):
        then, now = best.metrics["mean"], newest.metrics["mean"]
        if then - now >= max(COLLAPSED * abs(then), 2 * chance):
            text = f"fell from {number(then)} at version {best.name.version:,} to {number(now)} at version "
            yield Sign("collapsed", name, f"{text}{newest.name.version:,}; {_BACK}")


def _entropy(steps: Sequence[StepRecord]) -> Iterator[Sign]:
    if (ends := _ends(steps, "entropy", "zero_variance_share", "reward", "reward_std")) is None:
        return
    (first, last), (_, alike), (_, reward), (_, std) = ends
    fell = len(steps) >= LEAST_STEPS and last <= LOW_ENTROPY * first
    if fell and alike >= ALIKE and std >= UNEVEN * abs(reward):
        text = (
            f"entropy went from {number(first)} to {number(last)} nats per token, and {alike:.0%} of the groups have "
            "equal rewards, though not all problems are solved: what is not found by now will hardly be. A lower "
            "trainer.lr, a higher entropy_coefficient of the algorithm or a larger feeder.group_size explores longer"
        )
        yield Sign("entropy", "the policy", text)


def _length(steps: Sequence[StepRecord]) -> Iterator[Sign]:
    if (ends := _ends(steps, "length_mean", "reward", "truncated_share")) is None:
        return
    (first, last), (reward_first, reward_last), (cut_first, cut_last) = ends
    if len(steps) < LEAST_STEPS or not first or last < LENGTH_FACTOR * first:
        return
    if reward_last - reward_first < RISE or cut_last - cut_first >= CUT_RISE:
        text = (
            f"completions went from {first:,.0f} to {last:,.0f} tokens, the reward from {number(reward_first)} to "
            f"{number(reward_last)}, those cut off from {cut_first:.0%} to {cut_last:.0%}"
        )
        yield Sign("length", "completions", text)


def _evaluations(steps: Sequence[StepRecord], evaluations: Sequence[EvalResult], config: RunConfig) -> Iterator[Sign]:
    """Yield the evaluations that are below their best by more than chance although the reward rose."""
    for name, best, newest, chance in _bests(evaluations, config):
        fell = best.metrics["mean"] - newest.metrics["mean"]
        then, now = (_reward_at(steps, one.name.version) for one in (best, newest))
        if fell > max(FALL, chance) and then is not None and now is not None and now >= then + REWARD_ROSE:
            text = (
                f"fell from {number(best.metrics['mean'])} at version {best.name.version:,} to "
                f"{number(newest.metrics['mean'])} at version {newest.name.version:,}, while the reward went from "
                f"{number(then)} to {number(now)}"
            )
            yield Sign("evaluation", name, text)


def _bests(evaluations: Sequence[EvalResult], config: RunConfig) -> Iterator[tuple[str, EvalResult, EvalResult, float]]:
    """Yield each evaluation with its best and its newest result, and what chance changes."""
    for name, section in config.evaluations.items():
        results = by_newest_scorer([one for one in evaluations if one.evaluation == name and "mean" in one.metrics])
        if section.canary or not results:
            continue
        best, newest = max(results, key=lambda result: result.metrics["mean"]), results[-1]
        yield name, best, newest, 1 / math.sqrt(max(1, newest.num_tasks * newest.num_samples - newest.num_unscored))


def _reward_at(steps: Sequence[StepRecord], version: int) -> float | None:
    """Return the mean reward of the steps around a version, or None if none of them has a reward."""
    rewards = [
        step.metrics["reward"]
        for step in steps
        if "reward" in step.metrics and abs(step.name.version - max(version, WINDOW)) < WINDOW
    ]
    return sum(rewards) / len(rewards) if rewards else None


def _ends(steps: Sequence[StepRecord], *names: str) -> list[tuple[float, float]] | None:
    """Return the means of each metric over the first and over the newest steps. None if one of them is missing there,
    as in steps of a training loop that gives none."""
    ends = []
    for name in names:
        first, last = (
            [step.metrics[name] for step in some if name in step.metrics] for some in (steps[:WINDOW], steps[-WINDOW:])
        )
        if not first or not last:
            return None
        ends.append((sum(first) / len(first), sum(last) / len(last)))
    return ends
