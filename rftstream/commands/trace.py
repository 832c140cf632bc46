"""The commands `trace` and `traces`: everything on the log about one rollout, group, batch or version, and a run as
spans."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import click

from rftstream.commands.options import at_work, can_dim, command, group, json_option, no_index_option, run_argument


@command(
    "rftstream trace examples/runs/arithmetic sums/0/17/0/3",
    "rftstream trace examples/arithmetic.toml batch:17",
    "rftstream trace runs/a more/5",
    "rftstream trace examples/arithmetic.toml v12 --json | jq .children",
    "rftstream trace examples/arithmetic.toml 'verified[6]@6399'",
)
@run_argument
@click.argument("name", metavar="ID")
@json_option
@no_index_option
def trace(run: Path, name: str, as_json: bool, no_index: bool) -> None:
    """Follow a rollout, a group, a batch or a version up and down the log.

    Task, rollout with the versions that sampled it, verdict, outcome, batch, step, weights, evaluations, dead letters:
    each with topic, partition, offset and time. Of a batch the best, a middling and the worst rollout have their texts.
    A record that exists twice is marked TWIN.

    ID is as the other commands print it: a rollout (sums/0/17/0/3), a group (sums/0/17/0), a batch (batch:17), a
    version (v12; 1/12 for the one of trainer epoch 1; or its object in the store), a problem that joined while the run
    went on (more/5, with what it was made of), or a record (rollouts[3]@8172) or dead letter
    (verifier/rollouts/3/8172), which stand for whatever they belong to. Records that an audit has read (RUN/index) are
    not read again. RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.commands.views import indexed, opened_run, print_out
    from rftstream.queries.traces.trace import trace as follow

    with opened_run(run) as opened, indexed(opened, no_index, looking=True) as index, at_work("reading the log"):
        found = follow(opened, name, index, dims=can_dim() and not as_json)
    if as_json:
        print_out(found.to_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(soft_wrap=True).print(found.to_tree())
    else:
        click.echo(found.to_text())


# --------------------------------------------------------------------------------- `traces`: a run in a tracing system


@group("rftstream traces export examples/runs/arithmetic --otlp http://localhost:4318")
def traces() -> None:
    """Send a run to a tracing system, such as Jaeger or Tempo."""


@command(
    "rftstream traces export examples/runs/arithmetic --otlp http://localhost:4318",
    "rftstream traces export examples/runs/arithmetic --follow",
    "OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer ...' rftstream traces export runs/x --otlp https://traces:4318",
    group=traces,
)
@run_argument
@click.option(
    "--otlp",
    metavar="URL",
    help="Collector for OTLP over HTTP. Default: OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.",
)
@click.option("--follow", is_flag=True, help="Go on with what comes, until the run is over.")
@click.option(
    "--every-s", type=click.FloatRange(0.1), default=5.0, show_default=True, help="Seconds between two looks."
)
@json_option
def export(run: Path, otlp: str | None, follow: bool, every_s: float, as_json: bool) -> None:
    """Send a run's groups, rollouts, model calls, verdicts, batches, steps, weights and evaluations as spans.

    The spans are made from the log, so the run needs no preparation, and may have ended weeks ago. Each group is a
    trace, and each batch is a trace. Links connect groups with batches, and a rollout with the steps whose versions
    sampled it. Ids are derived from the run, so a second export gives the same spans the same ids. Headers for the
    collector come from OTEL_EXPORTER_OTLP_HEADERS. RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.integrations.traces import Collector, Sent, send_new
    from rftstream.queries.traces.spans import SpanReader
    from rftstream.runs.folder import open_run
    from rftstream.service.control_view import read_control
    from rftstream.service.role import Log

    collector, sent = Collector(otlp), Sent()
    is_terminal = sys.stderr.isatty()

    def tell() -> None:
        if is_terminal:
            click.echo(f"\r{sent.spans:,} spans of {sent.traces:,} traces", err=True, nl=False)

    opened = open_run(run)
    with closing(opened.transport):
        reader = SpanReader(Log(opened.transport), opened.folder.run_id, Path(opened.config.model.path or "made").name)
        try:
            while True:
                is_over = not follow or read_control(opened.transport).finished is not None
                send_new(reader, collector, sent, tell)
                if is_over:
                    break
                time.sleep(every_s)
        finally:
            if is_terminal:
                click.echo(err=True)
    if as_json:
        click.echo(json.dumps({"url": collector.url, "spans": sent.spans, "traces": sent.traces}))
    else:
        click.echo(f"{sent.spans:,} spans of {sent.traces:,} traces are at {collector.url}")
