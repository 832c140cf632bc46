"""`pause`, `unpause` and `drain`: what a user asks of a run that is under way."""

from __future__ import annotations

from pathlib import Path

import click

from rftstream.commands.options import command, run_argument

reason_option = click.option("--reason", default="", help="Kept on the log beside who asked and when.")


@command("rftstream pause examples/runs/arithmetic --reason 'the disk is being changed'")
@run_argument
@reason_option
def pause(run: Path, reason: str) -> None:
    """Admit no more tasks and train no more steps; what is in flight finishes. Taken back by `unpause`."""
    _ask(run, "paused", reason, "paused: nothing more is admitted or trained until `rftstream unpause`")


@command("rftstream unpause examples/runs/arithmetic")
@run_argument
@reason_option
def unpause(run: Path, reason: str) -> None:
    """Go on with a paused run."""
    _ask(run, "running", reason, "running again")


@command("rftstream drain examples/runs/arithmetic")
@run_argument
@reason_option
def drain(run: Path, reason: str) -> None:
    """End a run in order: admit no more, train all that is on its way, leave final/."""
    _ask(run, "draining", reason, "draining: the run ends once all that was admitted is trained")


def _ask(path: Path, state: str, reason: str, done: str) -> None:
    from rftstream.contracts.control import DesiredState
    from rftstream.runs.folder import open_run
    from rftstream.runs.writes.requests import ask_state

    run = open_run(path)
    try:
        before = ask_state(run, DesiredState(state), reason=reason)
    finally:
        run.transport.close()
    click.echo(f"{run.run_id}: {'it was so already' if before == state else done}")
