"""The command `try` runs a few tasks through environment, policy and reward, and prints them."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import click

from rftstream.commands.options import (
    at_work,
    can_dim,
    command,
    files_argument,
    json_option,
    load_run_file,
    planned_parts,
    set_option,
)
from rftstream.contracts.role_names import RoleName


@command(
    "rftstream try examples/arithmetic.toml --num 3",
    "rftstream try mine.toml --taskset sums --samples 4 --set sampling.temperature=0.7",
    "rftstream try mine.toml --num 20 --json | jq '.rollouts[].reward'",
    name="try",
)
@files_argument
@click.option("--num", type=click.IntRange(min=1), default=1, show_default=True, help="Tasks.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Rollouts of each task.")
@click.option("--taskset", metavar="NAME", help="Only of this taskset.  [default: as the run would mix them]")
@click.option("--seed", type=click.IntRange(min=0), help="Other tasks and samples.  [default: run.seed]")
@set_option
@json_option
def try_(
    files: tuple[Path, ...],
    num: int,
    samples: int,
    taskset: str | None,
    seed: int | None,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a few tasks through environment, policy and reward, and print them; nothing is trained.

    It takes the first tasks of the run and the model before training. It prints each prompt as the model sees it, each
    sampled turn with tool calls and rewards of turns, and the reward with its parts, or the reason why there is none.
    Masked tokens were not sampled and are not trained on. Nothing is trained, and nothing is left behind. Exit 1 if no
    rollout could be scored.
    """
    config = load_run_file(files, sets)
    config = planned_parts(config, RoleName.explorer)
    from rftstream.commands.views import print_out
    from rftstream.preflight.trial import TrialReport, try_run
    from rftstream.queries.records.shown import CompletionReader

    reader = CompletionReader(dims=can_dim())
    report = TrialReport(wanted=num * samples)
    with closing(try_run(config, report, num_tasks=num, samples=samples, taskset=taskset, seed=seed)) as rollouts:
        while True:
            with at_work("sampling and scoring"):
                one = next(rollouts, None)
            if one is None:
                break
            if not as_json:
                click.echo(f"{one.to_text(reader)}\n")
    print_out(report.to_json() if as_json else report.summary())
    sys.exit(0 if report.num_scored else 1)
