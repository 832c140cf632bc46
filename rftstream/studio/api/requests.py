"""The part of the interface for programs that operators ask something of the run with."""

from __future__ import annotations

from rftstream.contracts.control import DesiredState
from rftstream.studio.api.types import (
    DrainBody,
    EvaluateBody,
    EvaluateDone,
    RetryBody,
    RetryDone,
    StateBody,
    StateDone,
)
from rftstream.studio.asking import evaluate_versions, retry_groups, set_state
from rftstream.studio.pages.page import PageOfRun


def pause(page: PageOfRun, body: StateBody) -> StateDone:
    """Pause the run: nothing more is admitted or trained, and what is in flight finishes."""
    return _set(page, DesiredState.paused, body.reason)


def unpause(page: PageOfRun, body: StateBody) -> StateDone:
    """Let a paused run go on."""
    return _set(page, DesiredState.running, body.reason)


def drain(page: PageOfRun, body: DrainBody) -> StateDone:
    """End the run in order: admit no more, and train all that is on its way. It is not taken back."""
    return _set(page, DesiredState.draining, body.reason)


def _set(page: PageOfRun, state: DesiredState, reason: str) -> StateDone:
    return StateDone(changed=set_state(page, state, reason=reason), state=str(state))


def evaluate(page: PageOfRun, body: EvaluateBody) -> EvaluateDone:
    """Ask the evaluator that is alive for evaluations of versions."""
    asked, known = evaluate_versions(page, evaluation=body.evaluation, versions=body.versions, again=body.again)
    return EvaluateDone(asked=asked, known=known)


def retry(page: PageOfRun, body: RetryBody) -> RetryDone:
    """Ask for dead groups to be put back."""
    asked, before = retry_groups(page, body.groups, everything=body.everything, sample=body.sample)
    return RetryDone(asked=asked, put_back_before=before)
