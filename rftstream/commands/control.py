"""The commands `pause`, `unpause`, `drain` and `token`, which a user gives while a run is under way."""

from __future__ import annotations

from pathlib import Path

import click

from rftstream.commands.options import command, json_option, run_argument

reason_option = click.option("--reason", default="", help="Kept on the log beside who asked and when.")


@command("rftstream pause examples/runs/arithmetic --reason 'the disk is being changed'")
@run_argument
@reason_option
def pause(run: Path, reason: str) -> None:
    """Pause a run until `unpause`: admit no tasks and train no steps. Work in flight finishes."""
    _ask(run, "paused", reason, "paused: nothing more is admitted or trained until `rftstream unpause`")


@command("rftstream unpause examples/runs/arithmetic")
@run_argument
@reason_option
def unpause(run: Path, reason: str) -> None:
    """Continue a paused run."""
    _ask(run, "running", reason, "running again")


@command("rftstream drain examples/runs/arithmetic")
@run_argument
@reason_option
def drain(run: Path, reason: str) -> None:
    """End a run in order: admit no more tasks, train all that were admitted, write final/."""
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


# ----------------------------------------- `token`: what agents elsewhere need to ask a run for rollouts


@command("rftstream token examples/runs/arithmetic", "rftstream token examples/arithmetic.toml --json | jq -r .token")
@run_argument
@json_option
def token(run: Path, as_json: bool) -> None:
    """Print the token with which agents elsewhere ask a run for rollouts, and where its gateways are.

    An agent sends the token with POST BASE_URL/sessions. The token is derived from the run's secret. The secret is the
    variable RFTSTREAM_GATEWAY_SECRET if explorers have it, else a file that the first explorer makes for its user on
    its machine. It shows the gateways on this machine that answer, and how many rollouts wait for an agent at each
    gateway. The token gives access to rollouts of this run, and to nothing else. RUN is a run folder, or a run file
    (then its newest run).
    """
    from rftstream.commands.views import opened_run, print_out
    from rftstream.queries.state.agent_access import find_agent_access

    with opened_run(run) as opened:
        access = find_agent_access(opened)
    print_out(access.to_json() if as_json else access.to_text())
