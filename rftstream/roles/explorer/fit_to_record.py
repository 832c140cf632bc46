"""Rollout records: made from an attempt or without one, and small enough for a record on the log."""

from __future__ import annotations

from dataclasses import replace

from rftstream.contracts import codec
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling, Task
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.errors import ContractError, MessageTooLarge
from rftstream.roles.explorer.attempt import Attempt

MAX_BODY_BYTES = MAX_RECORD_BYTES - 256 * 1024
"""Most bytes of a rollout. Verdict and headers, which are added later, must fit into the same record."""


def fit_to_record(rollout: Rollout) -> tuple[Rollout, bytes]:
    """Return the rollout and its bytes. If no record can hold it, keep only its ids, its length and the reason."""
    try:
        return rollout, _encode(rollout)
    except MessageTooLarge as error:
        rollout = _without_content(rollout, RolloutStatus.oversized, str(error))
    except ContractError as error:  # caused by a message of the environment
        rollout = _without_content(rollout, RolloutStatus.failed, str(error))
    try:
        return rollout, _encode(rollout)
    except MessageTooLarge:
        rollout = replace(rollout, problem=Problem(messages=()))
        return rollout, _encode(rollout)


def _encode(rollout: Rollout) -> bytes:
    value = codec.encode(rollout)
    if len(value) > MAX_BODY_BYTES:
        raise MessageTooLarge(f"{len(value)} bytes, expected at most {MAX_BODY_BYTES}")
    return value


def _without_content(rollout: Rollout, status: RolloutStatus, error: str) -> Rollout:
    return replace(rollout, status=status, turns=(), segments=(), error=error, metrics={}, attachments={}, posted=None)


def rollout_of(attempt: Attempt, ids: RolloutIds, problem: Problem | None, sampling: Sampling, now: float) -> Rollout:
    """Return the rollout record of an attempt at the problem."""
    return Rollout(
        ids=ids,
        status=attempt.status,
        problem=problem,
        turns=attempt.turns,
        segments=attempt.segments,
        num_tokens=attempt.num_tokens,
        sampling=sampling,
        error=attempt.error,
        metrics=attempt.metrics,
        posted=attempt.posted,
        started_at=attempt.started_at,
        finished_at=now,
        calls=attempt.calls,
    )


def undecodable_rollout(ids: RolloutIds, error: ContractError, now: float) -> Rollout:
    """Return the rollout for a task of which only the ids could be read."""
    attempt = without_tokens(RolloutStatus.undecodable, str(error))
    return rollout_of(attempt, ids, None, Sampling(), now)


def skipped(task: Task, now: float) -> Rollout:
    """Return the rollout of a task that is skipped because its group has an outcome."""
    attempt = without_tokens(RolloutStatus.skipped, "its group was decided before")
    return rollout_of(attempt, task.ids, task.problem, task.sampling, now)


def without_tokens(status: RolloutStatus, error: str, *, key: str = "", started_at: float = 0.0) -> Attempt:
    """Return an attempt without tokens."""
    return Attempt(
        key=key,
        status=status,
        turns=(),
        segments=(),
        num_tokens=0,
        error=error,
        metrics={},
        started_at=started_at,
    )
