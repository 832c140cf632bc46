"""The effect of annotators' judgements on open groups: changed rewards, and siblings that are left out.

The verdict on `verified` stays the scorer's. In the buffer the judged reward replaces it, under the part `human`:
operators, outcomes and experiences see the judged reward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import FeedbackKind
from rftstream.contracts.questions import Applied, Judgement, VoteEffect
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import PEOPLE, Verdict, VerifiedRollout
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.groups import Group, Sibling
from rftstream.transport.base import Transport

HUMAN = "human"
"""Name of the reward part that annotators gave."""
FLAGGED = "feedback: flagged"
"""Reason of a sibling that is left out because annotators flagged it."""

VERDICT_KINDS = (FeedbackKind.label, FeedbackKind.rating, FeedbackKind.flag)


class JudgedRewards:
    """The current rewards and flags of open groups. FeedbackIntake makes it and calls `learn` for each judgement, in
    order. `apply` then sets them in a group, and `changed` in a body."""

    def __init__(self, settings: FeedbackSection) -> None:
        self._settings = settings
        self._rewards: dict[str, float] = {}
        self._flagged: set[str] = set()
        self._originals: dict[tuple[TopicPartition, int], Sibling] = {}
        """Siblings of open groups before their reward was changed."""

    @property
    def num_rewards(self) -> int:
        """Number of rollouts with a reward from annotators."""
        return len(self._rewards)

    def learn(self, judgement: Judgement) -> bool:
        """Add a judgement. Return whether it may change an open group; a judgement of a decided group never does."""
        if judgement.effect is not VoteEffect.counted or judgement.result is not None:
            return False
        if judgement.kind not in VERDICT_KINDS or not judgement.rollouts:
            return False
        (rollout_id,) = judgement.rollouts
        if judgement.kind is FeedbackKind.flag:
            if judgement.applied is Applied.verdict:
                self._flagged.add(rollout_id)
            else:
                self._flagged.discard(rollout_id)
            return True
        if judgement.kind != self._settings.ask:
            return False
        if judgement.applied is Applied.verdict and judgement.reward is not None:
            self._rewards[rollout_id] = judgement.reward
        else:
            self._rewards.pop(rollout_id, None)
        return True

    def apply(self, group: Group) -> None:
        """Set the current rewards in the siblings of an open group."""
        for number, sibling in group.siblings.items():
            original = self._originals.get(sibling.place_offset, sibling)
            changed = self._sibling(original)
            if changed is not original:
                self._originals[sibling.place_offset] = original
            group.siblings[number] = changed
        flagged = [number for number, one in group.siblings.items() if one.summary.rollout_id in self._flagged]
        group.left_out = dict.fromkeys(sorted(flagged), FLAGGED)

    def forget(self, group: Group) -> None:
        """Forget a group that has an outcome."""
        for sibling in group.siblings.values():
            self._originals.pop(sibling.place_offset, None)

    def changed(self, verified: VerifiedRollout) -> VerifiedRollout:
        """Return a body with the judged reward, or the body itself if there is none."""
        human = self._rewards.get(verified.ids.rollout_id)
        if human is None or verified.rollout is None:
            return verified
        verdict = verified.verdict
        if verdict is None:
            alone = Verdict(reward=human, scorer=PEOPLE, scorer_version="1", parts={HUMAN: human})
            return replace(verified, verdict=alone, reason=None, detail=None)
        changed = replace(
            verdict,
            reward=self._mixed(verdict.reward, human),
            parts={**verdict.parts, HUMAN: human},
            roles=self._mixed_roles(verdict.roles, human),
        )
        return replace(verified, verdict=changed)

    def _sibling(self, sibling: Sibling) -> Sibling:
        human = self._rewards.get(sibling.summary.rollout_id)
        if human is None:
            return sibling
        reward = human if sibling.summary.reward is None else self._mixed(sibling.summary.reward, human)
        roles = self._mixed_roles(sibling.summary.roles, human)
        summary = replace(sibling.summary, reward=reward, reason=None, roles=roles)
        return replace(sibling, summary=summary, parts={**sibling.parts, HUMAN: human})

    def _mixed_roles(self, roles: Mapping[str, float | None], human: float) -> dict[str, float | None]:
        return {role: None if one is None else self._mixed(one, human) for role, one in roles.items()}

    def _mixed(self, reward: float, human: float) -> float:
        weight = self._settings.weight
        return human if weight == 1.0 else (1.0 - weight) * reward + weight * human


class JudgedBodies(Bodies):
    """Bodies of open groups with their judged rewards. The step makes it in runs that ask annotators."""

    def __init__(self, transport: Transport, max_bytes: int, rewards: JudgedRewards) -> None:
        super().__init__(transport, max_bytes)
        self._judged = rewards

    def get_all(
        self, places: Collection[tuple[TopicPartition, int]]
    ) -> dict[tuple[TopicPartition, int], VerifiedRollout]:
        """Return the rollouts at these places, with their current judged rewards."""
        return {place: self._judged.changed(verified) for place, verified in super().get_all(places).items()}
