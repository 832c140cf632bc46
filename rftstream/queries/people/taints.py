"""The correction ledger: batches and versions that used rollouts whose judged reward has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rftstream.config.role_sections import FeedbackSection
from rftstream.config.sections import RunConfig
from rftstream.contracts.feedback import FeedbackKind
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.questions import Applied, Judgement
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.feedback.fold import is_decided
from rftstream.queries.formatting import columns, number, plural
from rftstream.queries.people.feedback import FeedbackView, read_feedback
from rftstream.roles.buffer.people.judged_rewards import JudgedRewards
from rftstream.service.role import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A rollout whose judged reward differs from the reward in training. `read_taints` makes it."""

    rollout_id: str
    question_id: str
    batch_sequence: int
    version: int
    """The version that the batch made. All later versions build on it."""
    trained_reward: float | None
    """The reward in the batch."""
    reward: float | None
    """The reward that people's votes give it now. None: it is flagged."""


def judged_now(view: FeedbackView, settings: FeedbackSection) -> JudgedRewards:
    """Return the rewards that people's votes give now, late votes included."""
    rewards = JudgedRewards(settings)
    for judgement in view.judgements.values():
        if is_decided(judgement):
            rewards.learn(_as_open(judgement))
    return rewards


def _as_open(judgement: Judgement) -> Judgement:
    """Return the judgement that would hold if the group were still open."""
    return replace(judgement, result=None, batch_sequence=None, applied=Applied.verdict)


def read_taints(log: Log, config: RunConfig) -> list[Taint]:
    """Return the rollouts in batches whose judged reward has changed, by batch."""
    settings = config.feedback or FeedbackSection()
    view = read_feedback(log, config)
    kinds = (FeedbackKind(settings.ask), FeedbackKind.flag)
    asked = {judgement.rollouts[0]: judgement for judgement in view.judgements.values() if judgement.kind in kinds}
    if not asked:
        return []
    trained = dict(_trained(log, asked))
    rewards, found = judged_now(view, settings), []
    flags = {judgement.rollouts[0]: judgement for judgement in view.judgements.values() if judgement.flagged}
    for _, verified in log.in_force("verified"):
        if not isinstance(verified, VerifiedRollout) or verified.ids.rollout_id not in trained:
            continue
        name = verified.ids.rollout_id
        batch, before = trained[name]
        verdict = rewards.changed(verified).verdict
        now = verdict.reward if verdict is not None and name not in flags else None
        if now != before:
            judgement = flags.get(name, asked[name])
            found.append(
                Taint(
                    rollout_id=name,
                    question_id=judgement.question_id,
                    batch_sequence=batch,
                    version=batch + 1,
                    trained_reward=before,
                    reward=now,
                )
            )
    return sorted(found, key=lambda taint: (taint.batch_sequence, taint.rollout_id))


def _trained(log: Log, asked: dict[str, Judgement]) -> Iterator[tuple[str, tuple[int, float | None]]]:
    """Yield the batch, and the reward in it, for each of these rollouts that is in a batch."""
    for _, outcome in log.in_force("outcomes"):
        if not isinstance(outcome, GroupOutcome) or outcome.late or outcome.result is not GroupResult.batched:
            continue
        for rollout in outcome.rollouts:
            if rollout.rollout_id in asked and rollout.rejected is None and rollout.reward is not None:
                yield rollout.rollout_id, (outcome.batch_sequence or 0, rollout.reward)


def taints_to_json(taints: list[Taint], version: int) -> dict[str, Any]:
    """Return the ledger as a dict. `version`: the version in force."""
    batches = sorted({taint.batch_sequence for taint in taints})
    return {
        "rollouts": [asdict(taint) for taint in taints],
        "batches": batches,
        "first_version": batches[0] + 1 if batches else None,
        "versions": max(0, version - batches[0]) if batches else 0,
    }


def taints_to_text(taints: list[Taint], version: int) -> str:
    """Return the ledger as text for people."""
    if not taints:
        return "no batch holds anything that people judge otherwise now"
    rows = [("rollout", "batch", "version", "trained with", "judged now")]
    for taint in taints:
        trained = number(taint.trained_reward, 3)
        now = "flagged" if taint.reward is None else number(taint.reward, 3)
        rows.append((taint.rollout_id, str(taint.batch_sequence), f"v{taint.version}", trained, now))
    batches = sorted({taint.batch_sequence for taint in taints})
    return "\n".join(
        [
            *columns(rows),
            "",
            f"{plural(len(taints), 'rollout')} in {len(batches):,} of the batches; versions {batches[0] + 1} to "
            f"{version} stand on them",
            "`rftstream replay RUN --without feedback --into NEWRUN` trains without them",
        ]
    )
