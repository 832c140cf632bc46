"""Runs whose reward compares siblings: what it must have said, from the rollouts on the log."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from random import Random
from unittest.mock import patch

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.errors import RewardError
from rftstream.rewards.base import RewardGroup
from rftstream.roles.verifier.step import reward_input
from rftstream.service.loops import results

COMPARED = f"{__name__}:better_than_siblings"
WEIGHT = 0.25
SCORED = (RolloutStatus.completed, RolloutStatus.truncated)


def better_than_siblings(group: RewardGroup, unscorable_share: float = 0.0) -> list[float]:
    """How many siblings each beats, by luck. It says who was there, too, and cannot be computed for some groups."""
    luck = [zlib.crc32(f"{one.prompt}|{one.completion}".encode()) for one in group.siblings]
    if min(luck) / 2**32 < unscorable_share / len(luck):
        raise RewardError("these cannot be compared")
    there = zlib.crc32(repr((group.numbers, sorted(group.absent.items()))).encode()) % 64
    return [64.0 * sum(one > other for other in luck) + there for one in luck]


def with_compared(config: RunConfig, seed: object) -> RunConfig:
    """The run with such a reward beside those that it has. Siblings may come too late, and bodies may not fit."""
    random, values = Random(f"compared {seed}"), loader.to_dict(config)
    quick = (
        config.policies["fake"]["tokens_per_s"] == 0.0 and not config.environments
    )  # else hardly a group would come together in time
    for section in values["tasksets"].values():
        before = section["reward"] if isinstance(section["reward"], list) else [{"name": section["reward"]}]
        section["reward"] = [*before, {"name": COMPARED, "weight": WEIGHT, "group": True}]
    values["rewards"][COMPARED] = {"unscorable_share": random.choice([0.0, 0.0, 0.1])}
    values["verifier"] |= {
        "max_waiting_bytes": random.choice([1, 2000, 1 << 28]),
        "group_timeout_s": random.choice([None, None, 3.0, 20.0] if quick else [None, None, 60.0, 200.0]),
    }
    return loader.from_dict(values)


def some_transactions_small(seed: object) -> AbstractContextManager[None]:
    """For half of the seeds a transaction takes one result, so that anything may come between two."""
    most = Random(f"transactions {seed}").choice([1, results.MAX_TRANSACTION_BYTES])
    return patch.object(results, "MAX_TRANSACTION_BYTES", most)


def compares(config: RunConfig) -> bool:
    return COMPARED in config.rewards


class ComparedLaws:
    """The verdicts of a group are one transaction, and say what the reward says of the siblings in it."""

    def __init__(self, config: RunConfig, judge: Callable[[Rollout], float | None]) -> None:
        self._share = config.rewards[COMPARED]["unscorable_share"]
        self._waits = config.verifier.group_timeout_s is None
        self._judge = judge
        self.num_late = 0
        """Groups that were judged without siblings which came later, or may have."""
        self.num_judged = 0

    def transaction(self, verified: Sequence[VerifiedRollout]) -> None:
        groups: dict[str, list[VerifiedRollout]] = defaultdict(list)
        for one in verified:
            groups[one.ids.group_id].append(one)
        for siblings in groups.values():
            self._group(sorted(siblings, key=lambda one: one.ids.sibling))

    def _group(self, siblings: Sequence[VerifiedRollout]) -> None:
        group_id, size = siblings[0].ids.group_id, siblings[0].ids.group_size
        assert len(siblings) == size or not self._waits, f"{group_id}: {len(siblings)} of {size} siblings were judged"
        there = [one for one in siblings if one.rollout is not None and one.rollout.status in SCORED]
        late = [one for one in there if one.reason is UnscorableReason.timeout]
        if 2 * len(siblings) <= size:
            assert late == there, f"{group_id}: less than half was judged"
        elif late:  # several parts of a group that came together in no time, in one transaction
            assert not self._waits
        else:
            self.num_judged += 1
            self.num_late += len(siblings) < size
            verdicts = [one.verdict.reward if one.verdict else None for one in there]
            expected = list(self._possible(siblings, there))
            assert verdicts in expected, f"{group_id}: {verdicts}, expected {expected}"

    def _possible(
        self, siblings: Sequence[VerifiedRollout], there: Sequence[VerifiedRollout]
    ) -> Iterator[list[float | None]]:
        """The rewards. Where siblings may be late, those that failed may have been given up before, too."""
        numbers, size = tuple(one.ids.sibling for one in there), siblings[0].ids.group_size
        rollouts = [one.rollout for one in there if one.rollout is not None]
        status = {one.ids.sibling: str(one.rollout.status if one.rollout else "undecodable") for one in siblings}
        missing = [number for number in range(size) if number not in numbers]
        known = [{status.get(number, "late")} | (set() if self._waits else {"late"}) for number in missing]
        alone = list(map(self._judge, rollouts))
        for why in itertools.product(*known):
            absent = dict(zip(missing, why, strict=True))
            group = RewardGroup(siblings=tuple(map(reward_input, rollouts)), numbers=numbers, absent=absent)
            try:
                given = better_than_siblings(group, self._share) if there else []
            except RewardError:
                yield [None] * len(there)
            else:
                yield [
                    None if own is None else own + WEIGHT * one for own, one in zip(alone, given, strict=True)
                ]  # fmt: skip
