"""What operators ask of a run in the studio, by the functions of the commands: one way for pages and programs.

Who asks is the name of the token, never a field of the request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rftstream.contracts.control import DesiredState
from rftstream.errors import ConfigError
from rftstream.launch.sessions.evaluation import Versions, ask_evaluations
from rftstream.queries.records.dead import plan_retries
from rftstream.runs.folder import OpenRun
from rftstream.runs.writes.requests import ask_retries, ask_state, user_here
from rftstream.service.role import Log
from rftstream.studio.pages.page import PageOfRun

WITHIN_S = 7 * 24 * 3600.0
"""Seconds after which a dead group is not put back any more, as with the command."""
MAX_REASON = 1_000


def set_state(page: PageOfRun, state: DesiredState, *, reason: str = "") -> bool:
    """Set the run's desired state. Return whether it was another one. ConfigError if the run takes no other."""
    before = page.run.look(lambda run, _: ask_state(run, state, reason=reason[:MAX_REASON], by=asker(page)))
    return before is not state


def evaluate_versions(
    page: PageOfRun, *, evaluation: str | None, versions: Versions, again: bool = False
) -> tuple[int, int]:
    """Ask the evaluator for evaluations of versions, of the newest one if none is named. Return how many were asked
    for, and how many have their result already. ConfigError if nobody can be asked."""

    def asked(run: OpenRun, _: object) -> tuple[int, int]:
        return ask_evaluations(run, evaluation=evaluation, versions=versions, again=again, by=asker(page))

    return page.run.look(asked)


def retry_groups(
    page: PageOfRun, names: Sequence[str], *, everything: bool = False, sample: bool = False
) -> tuple[int, int]:
    """Ask for dead groups to be put back: those that are named, or all. Return how many were asked for, and how many
    were put back before. `sample`: they are sampled anew. ConfigError for a group that is not dead."""
    if not names and not everything:
        raise ConfigError("group: none is chosen, expected some of the dead groups, or all")
    chosen = () if everything else tuple(names)

    def asked(run: OpenRun, _: object) -> tuple[int, int]:
        stored, before = plan_retries(Log(run.transport), chosen, sample=sample, now=time.time())
        if stored:
            ask_retries(run, stored, within_s=WITHIN_S, by=asker(page))
        return len(stored), before

    return page.run.look(asked)


def asker(page: PageOfRun) -> str:
    """Return what the log says of who asks: the name of the token, and whose studio it is."""
    return f"{page.viewer.name}, by the studio of {user_here()}"
