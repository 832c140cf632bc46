"""Rollouts as they go on the log: from an attempt or without one, and in a form that a record can hold."""

from __future__ import annotations

from dataclasses import replace

from rftstream.contracts import codec
from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling, Task
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.errors import ContractError, MessageTooLarge
from rftstream.roles.explorer.attempt import Attempt

MAX_BODY_BYTES = MAX_RECORD_BYTES - 256 * 1024
"""Bytes that a rollout may take at most. The verdict and the headers that are added later must fit into the record,
too."""


def fit_to_record(rollout: Rollout) -> tuple[Rollout, bytes]:
    """Return the rollout and its bytes. If no record can hold it, only its ids, its length and the reason are kept."""
    try:
        return rollout, _encode(rollout)
    except MessageTooLarge as error:
        rollout = _without_content(rollout, RolloutStatus.oversized, str(error))
    except ContractError as error:  # by something that the environment said
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
    """Return the rollout that stands for a task of which nothing but the ids could be read."""
    attempt = without_tokens(RolloutStatus.undecodable, str(error))
    return rollout_of(attempt, ids, None, Sampling(), now)


def skipped(task: Task, now: float) -> Rollout:
    """Return the rollout of a task that is not attempted, since its group has an outcome."""
    attempt = without_tokens(RolloutStatus.skipped, "its group was decided before")
    return rollout_of(attempt, task.ids, task.problem, task.sampling, now)


def without_tokens(status: RolloutStatus, error: str, *, key: str = "", started_at: float = 0.0) -> Attempt:
    """Return an attempt of which there is nothing."""
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
