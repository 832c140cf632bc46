"""`trace`: everything that the log has of one rollout, group, batch or version."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rftstream.commands.options import at_work, can_dim, command, json_option, no_index_option, run_argument


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
    each with topic, partition, offset and time. What stands there twice is marked TWIN.

    ID is as the other commands print it: a rollout (sums/0/17/0/3), a group (sums/0/17/0), a batch (batch:17), a
    version (v12; 1/12 for the one of trainer epoch 1; or its object in the store), a problem that joined while the run
    went on (more/5, with what it was made of), or a record (rollouts[3]@8172)
    or dead letter (verifier/rollouts/3/8172), which stand for whatever they belong to. What an audit has read
    (RUN/index) is not read again. RUN is a run folder, or a run file (then its newest run).
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
