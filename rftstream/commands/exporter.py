"""The commands `exporter` and `scale-plan`: metrics of a whole run for Prometheus and for autoscalers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from rftstream.commands.options import at_work, command, json_option, run_argument
from rftstream.commands.param_types import RunPath
from rftstream.commands.views import print_out
from rftstream.errors import ConfigError


@command(
    "rftstream exporter examples/runs/arithmetic",
    "rftstream exporter runs/first runs/second --host 0.0.0.0 --port 9400 --every-s 15",
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; it asks nobody who they are."
)
@click.option("--port", type=click.IntRange(0, 65535), default=9400, show_default=True, help="0: one that is free.")
@click.option(
    "--every-s", type=click.FloatRange(0.1), default=5.0, show_default=True, help="Seconds between two looks at a log."
)
def exporter(runs: tuple[Path, ...], host: str, port: int, every_s: float) -> None:
    """Serve metrics of whole runs, from their logs, for Prometheus.

    The metrics: rollouts that wait for each role (as `audit` counts them), the outcomes of all admitted rollouts with
    reasons, the newest step, the oldest open group, and the workers wanted. They are served during the run and after
    it, whichever workers are alive. The exporter only reads, and nothing waits for it. It keeps an index of the log in
    RUN/index (safe to delete). It also serves /livez and /readyz. RUN is a run folder, or a run file (then its newest
    run).
    """
    from rftstream.integrations.exporter import serve
    from rftstream.launch.logging import setup

    setup("exporter", level="info", form="text", echoes=False)
    serve(
        runs,
        host=host,
        port=port,
        every_s=every_s,
        ready=lambda url: click.echo(f"{url} has {', '.join(map(str, runs))}; ctrl-C ends it"),
    )


@command(
    "rftstream scale-plan examples/runs/arithmetic",
    "rftstream scale-plan examples/arithmetic.toml --json | jq '.[] | {role, wanted}'",
    name="scale-plan",
)
@run_argument
@json_option
@click.option(
    "--at-least", type=click.IntRange(0), default=0, show_default=True, help="Workers wanted without a backlog."
)
def scale_plan(run: Path, as_json: bool, at_least: int) -> None:
    """Print how many explorers and verifiers the backlog of a run needs.

    wanted = ceil(backlog / max_concurrent), and never more than there are partitions. The backlog counts rollouts,
    those in progress included. An autoscaler that reads the exporter's metrics computes the same number. RUN is a run
    folder, or a run file (then its newest run).
    """
    from rftstream.queries.state.following import RunFollower, plan_text
    from rftstream.queries.state.following import scale_plan as plan
    from rftstream.runs.folder import open_run

    with at_work("reading the log"), closing(RunFollower(open_run(run))) as follower:
        counts, config = follower.look_at_all().counts, follower.run.config
    if counts is None:
        raise ConfigError(f"{run}: nothing is on its log yet, expected tasks; wait until the feeder has begun")
    found = plan(config, counts.rollouts, at_least=at_least)
    print_out([one.to_json() for one in found] if as_json else plan_text(found))
