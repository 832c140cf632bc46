"""Requests of operators to a run, made with the functions of the commands. Pages and programs use the same functions.

The requester is the owner of the token, never a field of the request.
"""

from __future__ import annotations

import time

from rftstream.contracts.control import DesiredState
from rftstream.errors import ConfigError
from rftstream.launch.sessions.evaluation import ask_evaluations
from rftstream.queries.records.dead import plan_retries
from rftstream.runs.folder import OpenRun
from rftstream.runs.writes.requests import ask_retries, ask_state, user_here
from rftstream.service.role import Log
from rftstream.studio.api.types import (
    DrainBody,
    EvaluateBody,
    EvaluateDone,
    RetryBody,
    RetryDone,
    StateBody,
    StateDone,
)
from rftstream.studio.pages.page import PageOfRun

WITHIN_S = 7 * 24 * 3600.0
"""Seconds after which a request to put a dead group back expires, as with the command."""
MAX_REASON = 1_000


def pause(page: PageOfRun, body: StateBody) -> StateDone:
    """Pause the run: nothing more is admitted or trained, and what is in flight finishes."""
    return _set(page, DesiredState.paused, body.reason)


def unpause(page: PageOfRun, body: StateBody) -> StateDone:
    """Let a paused run continue."""
    return _set(page, DesiredState.running, body.reason)


def drain(page: PageOfRun, body: DrainBody) -> StateDone:
    """End the run in order: admit nothing more, and train everything in flight. It cannot be undone."""
    return _set(page, DesiredState.draining, body.reason)


def _set(page: PageOfRun, state: DesiredState, reason: str) -> StateDone:
    """Set the run's desired state. ConfigError if the run does not accept it."""
    before = page.run.look(lambda run, _: ask_state(run, state, reason=reason[:MAX_REASON], by=asker(page)))
    return StateDone(changed=before is not state, state=str(state))


def evaluate(page: PageOfRun, body: EvaluateBody) -> EvaluateDone:
    """Request evaluations of versions from the live evaluator."""

    def asked(run: OpenRun, _: object) -> tuple[int, int]:
        return ask_evaluations(
            run, evaluation=body.evaluation, versions=body.versions, again=body.again, by=asker(page)
        )

    new, known = page.run.look(asked)
    return EvaluateDone(asked=new, known=known)


def retry(page: PageOfRun, body: RetryBody) -> RetryDone:
    """Request that dead groups are put back."""
    if not body.groups and not body.everything:
        raise ConfigError("group: none is chosen, expected some of the dead groups, or all")
    chosen = () if body.everything else tuple(body.groups)

    def asked(run: OpenRun, _: object) -> RetryDone:
        stored, before = plan_retries(Log(run.transport), chosen, sample=body.sample, now=time.time())
        if stored:
            ask_retries(run, stored, within_s=WITHIN_S, by=asker(page))
        return RetryDone(asked=len(stored), put_back_before=before)

    return page.run.look(asked)


def asker(page: PageOfRun) -> str:
    """Return the requester's name for the log: the owner of the token, and the owner of the studio."""
    return f"{page.viewer.name}, by the studio of {user_here()}"
