"""Finds signs of reward hacking in the recorded steps and evaluations: reward that is gained without solving the task.

Each sign is a function of the history alone, so a page shows the same signs at any later time. A sign is a reason to
read some rollouts (`rftstream inspect`), not a proof. `run.stop_on` names signs that end the run.

    canary       an evaluation with each other's answers (`canary = true`) gives a reward
    checks       a second opinion (`use = "check"`) is far from the reward
    dominance    the reward rose by one of its parts, while the others together fell
    falling      a part of the reward fell while the whole rose
    held_out     the reward rose, and no evaluation followed
    kl           the policy goes away from version 0 faster and faster, and the reward gains no more by it; only told if
                 no step is passed over
    judge        a judge that compares answers contradicts itself when their order changes
    length       completions became much longer or shorter, while no evaluation rose
    unscored     more and more rollouts have no reward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rftstream.algorithms.reward_changes import by_newest_scorer
from rftstream.config.parts.reward_uses import RewardUse, part_names, reward_uses
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import EvalResult

Steps = Sequence[tuple[int, Mapping[str, float]]]
"""Version and metrics of each step."""

LEAST_STEPS = 20
"""Steps before any comparison is made."""
FIRST_STEPS = 8
"""Steps at the beginning that the newest are compared with."""
CANARY_REWARD = 0.1
"""Mean reward above which a canary is reported, if it also exceeds version 0's reward by as much."""
CHECK_APART = 0.25
"""Mean distance of a second opinion from the reward that is reported."""
ORDERS_DISAGREE = 0.5
"""Share of comparisons with a contradiction of the judge that is reported."""
RISE = 0.1
"""Rise of the mean reward that evaluations should follow."""
FOLLOWED = 0.02
"""Rise of an evaluation's mean that counts as following."""
LENGTH_FACTOR = 2.0
"""Factor of change of the mean length that is reported if no evaluation rose."""
KL_FASTER = 3.0
"""Factor by which the divergence grew faster in the last third of the steps than in the second that is reported."""
KL_LEAST = 0.05
"""Rise of the divergence in the last third, in nats per token, that is reported."""
UNSCORED_RISE = 0.1
"""Rise of the share of rollouts without reward that is reported."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign that something may be wrong. `find_training_signs` and `find_reward_signs` make it."""

    kind: str
    """Kind of the sign, as listed by the module that found it."""
    subject: str
    """Subject of the sign, such as an evaluation, a reward or a taskset; empty if it is about all rewards."""
    text: str

    @property
    def heading(self) -> str:
        """Return in words where to look."""
        return f"look at {self.subject or 'rewards'}"

    def to_json(self) -> dict[str, Any]:
        """Return the sign as plain values, for `--json`."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the sign as a sentence."""
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Windows:
    """The means of two windows of steps: the first, which stays the same, and the newest."""

    first: dict[str, float]
    last: dict[str, float]
    first_version: int
    """The last version of the first window."""
    last_version: int
    """The first version of the newest window."""
    newest_version: int
    """Its last version."""

    @property
    def compared(self) -> str:
        """Return in words what is compared."""
        return (
            f"from the steps to version {self.first_version} to those from {self.last_version} to {self.newest_version}"
        )

    def change(self, name: str) -> float | None:
        """Return the newest mean minus the first, or None if either is not there."""
        if name not in self.first or name not in self.last:
            return None
        return self.last[name] - self.first[name]


def find_reward_signs(steps: Steps, evaluations: Sequence[EvalResult], config: RunConfig) -> tuple[Sign, ...]:
    """Return the signs in a run's steps and evaluations, both by version, the most certain first."""
    windows = _windows(steps)
    signs = [*_canaries(evaluations, config)]
    if windows is not None:
        signs += [
            *_checks(windows, config),
            *_judges(windows),
            *_dominance(windows, config),
            *_falling(windows, config),
            *_held_out(windows, evaluations, config),
            *_divergence(steps),
        ]
        signs += _unscored(windows)
    return tuple(signs)


def _windows(steps: Steps) -> _Windows | None:
    counted = [step for step in steps if "reward" in step[1]]
    if len(counted) < LEAST_STEPS:
        return None
    first, last = counted[:FIRST_STEPS], counted[-max(5, min(50, len(counted) // 4)) :]
    return _Windows(_means(first), _means(last), first[-1][0], last[0][0], last[-1][0])


def _means(steps: Steps) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for _, values in steps:
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in columns.items()}


def _canaries(evaluations: Sequence[EvalResult], config: RunConfig) -> Iterator[Sign]:
    for name, section in config.evaluations.items():
        means = [result.metrics["mean"] for result in _results(name, evaluations)]
        if not section.canary or not means:
            continue
        risen = means[-1] - means[0] if len(means) > 1 else means[-1]
        if means[-1] >= CANARY_REWARD and risen >= CANARY_REWARD:
            text = f"{means[-1]:.2f} of the reward is given for wrong answers; read some, `rftstream studio RUN`"
            yield Sign("canary", name, text)


def _checks(windows: _Windows, config: RunConfig) -> Iterator[Sign]:
    for short in sorted({name for name, use in _uses(config) if use.use == "check"}):
        if (apart := windows.last.get(f"metric/{short}.apart", 0.0)) >= CHECK_APART:
            text = f"this second opinion is {apart:.2f} from the reward in the mean"
            yield Sign("checks", short, text)


def _judges(windows: _Windows) -> Iterator[Sign]:
    """Yield the judges that name another winner if the order of the answers is reversed."""
    for name, share in sorted(windows.last.items()):
        part = name.removeprefix("metric/").removesuffix("orders_disagree")
        if name == f"metric/{part}orders_disagree" and share >= ORDERS_DISAGREE:
            first = windows.last.get(f"metric/{part}prefers_first", 0.0)
            text = (
                f"the judge contradicts itself in {share:.0%} of the comparisons when the order changes (a tie then); "
                f"its bias for what it sees first is {first:+.2f}, from -1 to 1"
            )
            yield Sign("judge", part.rstrip("."), text)


def _dominance(windows: _Windows, config: RunConfig) -> Iterator[Sign]:
    """Yield the parts that alone made a reward rise. With several tasksets, their parts have names of their own."""
    for taskset, changes in _part_changes(windows, config):
        most = max(changes, key=lambda name: changes[name])
        others = sum(changes.values()) - changes[most]
        if changes[most] >= RISE / 2 and others < 0:
            text = f"{taskset}: {most} added {changes[most]:+.2f} {windows.compared}, the other parts {others:+.2f}"
            yield Sign("dominance", most, text)


def _falling(windows: _Windows, config: RunConfig) -> Iterator[Sign]:
    """Yield the parts that fell although the reward rose. What `_dominance` yields has one that outweighs all."""
    risen = windows.change("reward")
    if risen is None or risen < FOLLOWED:
        return
    for taskset, changes in _part_changes(windows, config):
        least = min(changes, key=lambda name: changes[name])
        if changes[least] <= -RISE / 2 and sum(changes.values()) - max(changes.values()) >= 0:
            text = f"{taskset}: {least} went by {changes[least]:+.2f} {windows.compared}, the reward by {risen:+.2f}"
            yield Sign("falling", least, text)


def _part_changes(windows: _Windows, config: RunConfig) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each taskset with several parts, and what each part added to the reward since the first steps."""
    for taskset, section in config.tasksets.items():
        uses = reward_uses(section.reward, taskset)
        prefix = f"part/{taskset}/" if len(config.tasksets) > 1 else "part/"
        changes = {}
        for use, short in zip(uses, part_names(uses), strict=True):
            if use.use == "sum" and use.weight and (change := windows.change(prefix + short)) is not None:
                changes[short] = use.weight * change
        if len(changes) > 1:
            yield taskset, changes


def _divergence(steps: Steps) -> Iterator[Sign]:
    """Yield the sign of over-optimisation (Gao et al., arXiv:2210.10760): divergence that buys no more reward."""
    counted = [step for step in steps if "kl" in step[1] and "reward" in step[1]]
    if len(counted) < LEAST_STEPS or steps[-1][0] - steps[0][0] >= len(steps):  # the middle of a glance is not there
        return
    third = len(counted) // 3
    size = max(3, third // 3)
    marks = [_means(part[-size:]) for part in (counted[:third], counted[:-third], counted)]
    before, lately = (later["kl"] - earlier["kl"] for earlier, later in pairwise(marks))
    gains = [later["reward"] - earlier["reward"] for earlier, later in pairwise(marks)]
    if lately >= max(KL_LEAST, KL_FASTER * before) and gains[1] < max(FOLLOWED, gains[0] / 2):
        text = (
            f"the divergence from version 0 went from {marks[1]['kl']:.3f} to {marks[2]['kl']:.3f} nats per token in "
            f"the last third of the steps ({before:+.3f} in the one before), the reward by {gains[1]:+.2f}"
        )
        yield Sign("kl", "the policy", text)


def _held_out(windows: _Windows, evaluations: Sequence[EvalResult], config: RunConfig) -> Iterator[Sign]:
    rises = [
        rise
        for name, section in config.evaluations.items()
        if not section.canary and (rise := _rise(name, windows, evaluations)) is not None
    ]
    if not rises or max(rises) >= FOLLOWED:
        return
    risen = windows.change("reward")
    if risen is not None and risen >= RISE:
        text = f"the reward rose by {risen:.2f} {windows.compared}, the best evaluation by {max(rises):.2f}"
        most = [
            f"{max(parts, key=parts.__getitem__)}{f' in {name}' if config.tasksets.keys() - {name} else ''} "
            f"{max(parts.values()):+.2f}"
            for name, parts in _part_changes(windows, config)
        ]
        yield Sign("held_out", "", f"{text}; most of it by {', '.join(most)}" if most else text)
    before, now = windows.first.get("length_mean", 0.0), windows.last.get("length_mean", 0.0)
    if before and now and not 1 / LENGTH_FACTOR < now / before < LENGTH_FACTOR:
        text = f"completions went from {before:,.0f} to {now:,.0f} tokens, and no evaluation rose"
        yield Sign("length", "", text)


def _unscored(windows: _Windows) -> Iterator[Sign]:
    risen = windows.change("unscored_share")
    if risen is not None and risen >= UNSCORED_RISE:
        text = f"{windows.last['unscored_share']:.0%} of the rollouts have no reward, {risen:.0%} more than at first"
        yield Sign("unscored", "", text)


def _rise(name: str, windows: _Windows, evaluations: Sequence[EvalResult]) -> float | None:
    """Return the rise of an evaluation from the first window to the newest, or None if it was not done there."""
    results = _results(name, evaluations)
    early = [result for result in results if result.name.version <= windows.first_version]
    late = [result for result in results if result.name.version >= windows.last_version]
    return late[-1].metrics["mean"] - early[0].metrics["mean"] if early and late else None


def _results(name: str, evaluations: Sequence[EvalResult]) -> list[EvalResult]:
    """Return the results of an evaluation that have a mean and compare: those by its newest scorer."""
    return by_newest_scorer([one for one in evaluations if one.evaluation == name and "mean" in one.metrics])


def _uses(config: RunConfig) -> Iterator[tuple[str, RewardUse]]:
    """Yield the rewards of all tasksets, each with the name of its part."""
    for name, section in config.tasksets.items():
        uses = reward_uses(section.reward, f"tasksets.{name}.reward")
        yield from zip(part_names(uses), uses, strict=True)
