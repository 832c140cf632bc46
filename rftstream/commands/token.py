"""`token`: with what agents elsewhere ask a run for rollouts, and where."""

from __future__ import annotations

from pathlib import Path

from rftstream.commands.options import command, json_option, run_argument


@command("rftstream token examples/runs/arithmetic", "rftstream token examples/arithmetic.toml --json | jq -r .token")
@run_argument
@json_option
def token(run: Path, as_json: bool) -> None:
    """With what agents elsewhere ask a run for rollouts: its token, and where its gateways are.

    An agent sends the token with POST BASE_URL/sessions. The token follows from the run's secret: the variable
    RFTSTREAM_GATEWAY_SECRET, if explorers have it, else a file that the first explorer makes for its user on its
    machine. Shown are the gateways of the workers on this machine that answer, with how many rollouts wait for an agent
    at each. Whoever has the token can get rollouts of this run, and nothing else. RUN is a run folder, or a run file
    (then its newest run).
    """
    from rftstream.commands.views import opened_run, print_out
    from rftstream.queries.state.agent_access import find_agent_access

    with opened_run(run) as opened:
        access = find_agent_access(opened)
    print_out(access.to_json() if as_json else access.to_text())
