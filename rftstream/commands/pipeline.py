"""The commands `pipeline` show what operators would do before a run uses them."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rftstream.commands.options import at_work, command, group, json_option, load_run_file, set_option
from rftstream.commands.param_types import RunFile, RunPath
from rftstream.commands.views import opened_run, print_out


@group(
    "rftstream pipeline preview examples/arithmetic.toml",
    "rftstream pipeline preview stricter.toml --run runs/a --json",
)
def pipeline() -> None:
    """Try operators of data pipelines on the data, before a run uses them."""


@command(
    "rftstream pipeline preview examples/arithmetic.toml --num 500",
    "rftstream pipeline preview --run runs/a",
    "rftstream pipeline preview stricter.toml --run runs/a --json",
    group=pipeline,
)
@click.argument("file", type=RunFile(), required=False)
@click.option("--run", "run", type=RunPath(), metavar="RUN", help="A run whose groups and outcomes are looked at.")
@click.option(
    "--num",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    metavar="N",
    help="Look at the first N problems of each taskset, and the newest N groups.",
)
@set_option
@json_option
def preview(file: Path | None, run: Path | None, num: int, sets: tuple[str, ...], as_json: bool) -> None:
    """Show what goes into each operator and comes out, by reason, with examples.

    FILE is a run file, or with --run a file with [[pipeline]] and [[tasksets.NAME.pipeline]] alone. Operators for
    problems see the first problems of each taskset. With --run they know the outcomes of that run, and operators for
    groups see the groups that the run recorded. Without FILE the operators are the run's own. Nothing is sampled,
    scored or written. Exit 1 if an operator raised an exception or returned an invalid answer.
    """
    if file is None and run is None:
        raise click.UsageError("FILE and --run are missing; name a run file, a run, or both")

    from rftstream.config.data_pipelines.pipeline_files import with_pipelines_of
    from rftstream.queries.decisions.pipeline_preview import preview as look

    if run is None:
        assert file is not None
        config = load_run_file((file,), sets)
        with at_work("asking the operators"):
            found = look(config, None, num=num)
    else:
        if sets:
            raise click.UsageError("--set: with --run the settings are the run's; give operators by FILE")
        with opened_run(run) as opened, at_work("asking the operators"):
            config = opened.config if file is None else with_pipelines_of(opened.config, file)
            found = look(config, opened.transport, num=num)
    print_out(found.to_json() if as_json else found.to_text())
    sys.exit(1 if found.failures else 0)
