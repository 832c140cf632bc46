"""A verdict is a reward with its parts, or the reason why there is none. Topic `verified`: verifier -> buffer.

Shapes: T tokens of a segment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from rftstream.contracts.arrays import Array
from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.rollouts import Rollout, RolloutStatus, is_without_roles
from rftstream.contracts.rules import Violation, presence, rule, show
from rftstream.contracts.structs import message_part
from rftstream.contracts.tasks import RolloutIds, headers_of_ids

SPENT = "spent_"
"""Prefix of the names of metrics that are amounts, such as `spent_requests`: these are summed, too."""


PEOPLE = "feedback"
"""Name of the scorer of a verdict that only annotators gave."""


_ENVIRONMENT = re.compile(r"\+env-[0-9a-f]+$")


def with_environment(scorer_version: str, digest: str) -> str:
    """Return the version of a scorer that takes the reward of an environment, with the environment's own digest. An
    empty one is not known, as in verdicts of older releases."""
    return f"{scorer_version}+env-{digest}" if digest else scorer_version


def without_environment(scored_by: str) -> str:
    """Return a scorer's name and version without the environment's digest."""
    return _ENVIRONMENT.sub("", scored_by)


@message_part(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and how it came about."""

    reward: float
    """The reward, a finite number."""
    scorer: str
    """Name of the reward."""
    scorer_version: str
    """Changes whenever the same rollout could get another reward."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts; `reward` is their weighted sum unless the scorer says otherwise."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the reward measured, for the trackers."""
    additions: dict[str, Array] = field(default_factory=dict)
    """Arrays that the algorithm may need, e.g. teacher_logprobs [T]."""
    roles: dict[str, float | None] = field(default_factory=dict)
    """Reward of each role of the rollout's segments. None: the role is not trained. Empty: all have `reward`."""

    @property
    def scored_by(self) -> str:
        """Return the name and the version of the scorer. Rewards of two versions do not compare."""
        return f"{self.scorer} {self.scorer_version}"


def spent_amounts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what a verdict cost, by kind such as `requests`: the sums over all its rewards."""
    amounts: dict[str, float] = {}
    for name, value in metrics.items():
        short = name.rpartition(".")[2]
        if short.startswith(SPENT):
            kind = short.removeprefix(SPENT)
            amounts[kind] = amounts.get(kind, 0.0) + value
    return amounts


BY_ENVIRONMENT = "environment: "
"""Beginning of the error where the reward that the environment gave is missing or no number. It is recorded with the
rollout, so another try at scoring ends alike."""


class UnscorableReason(StrEnum):
    """Why a rollout has no reward."""

    undecodable = "undecodable"
    """Its record could not be decoded; only the headers are known."""
    failed = "failed"
    """The rollout failed, so there is nothing to score."""
    skipped = "skipped"
    """Its group was decided before it was sampled."""
    timeout = "timeout"
    """The scorer did not end within its time limit."""
    error = "error"
    """The scorer failed."""
    missing_checker = "missing_checker"
    """The scorer needs something that is not installed."""
    oversized = "oversized"
    """It outgrew the record limit; its segments are gone."""
    no_reward = "no_reward"
    """Environment or agent was to give the reward, and gave none."""


def _verified_headers(verified: VerifiedRollout) -> Facts:
    rollout = verified.rollout
    return {
        **headers_of_ids(verified.ids),
        "status": RolloutStatus.undecodable if rollout is None else rollout.status,
        "num_tokens": 0 if rollout is None else rollout.num_tokens,
        "reason": verified.reason,
    }


def _is_without_roles(verified: VerifiedRollout) -> bool:
    rollout, verdict = verified.rollout, verified.verdict
    has_none = rollout is None or is_without_roles(rollout.segments, rollout.posted)
    return has_none and (verdict is None or not verdict.roles)


@message(
    "verified_rollout",
    version=8,
    readable_since=6,
    skippable=_is_without_roles,
    topic="verified",
    key=lambda verified: verified.ids.rollout_id,
    headers=_verified_headers,
)
class VerifiedRollout(Message):
    """A rollout with its verdict, or with the reason why it has none. `verified`: verifier -> buffer."""

    ids: RolloutIds
    """The ids that the task had."""
    rollout: Rollout | None
    """The rollout; None exactly when `reason` is undecodable."""
    verdict: Verdict | None
    """The verdict; None if the rollout could not be scored, which is not a reward of 0."""
    reason: UnscorableReason | None = None
    """Why there is no verdict; set exactly when `verdict` is None."""
    detail: str | None = None
    """More about the verdict, or about the reason why there is none, for people: such as the first test that failed."""
    verified_at: float = 0.0
    """When the verifier was done with it."""


@rule(
    VerifiedRollout,
    json_schema={
        "if": {"properties": {"verdict": {"type": "null"}}},
        "then": {"required": ["reason"], "properties": {"reason": {"type": "string"}}},
        "else": {"properties": {"reason": {"type": "null"}}},
        "allOf": [
            {
                "if": {"required": ["reason"], "properties": {"reason": {"const": "undecodable"}}},
                "then": {"properties": {"rollout": {"type": "null"}}},
                "else": {"properties": {"rollout": {"type": "object"}}},
            }
        ],
    },
)
def _check_verified_rollout(verified: VerifiedRollout) -> Violation | None:
    if (verified.verdict is None) is (verified.reason is None):
        return ".reason", (
            f"got {presence(verified.reason)} beside {presence(verified.verdict)} verdict, "
            "expected exactly one of reason and verdict"
        )
    undecodable = verified.reason is UnscorableReason.undecodable
    if (verified.rollout is None) is not undecodable:
        return ".rollout", f"got {presence(verified.rollout)}, expected none exactly when the reason is undecodable"
    if verified.rollout is not None and verified.rollout.ids != verified.ids:
        return ".rollout.ids", f"got those of {show(verified.rollout.ids.rollout_id)}, expected the record's own ids"
    return None
