"""The commands `data`: run the task side of a pipeline once before a run, or run a recipe of Data-Juicer."""

from __future__ import annotations

from pathlib import Path

import click

from rftstream.commands.options import at_work, command, group, json_option, load_run_file, say, set_option
from rftstream.commands.param_types import AnyPath, RunFile
from rftstream.commands.views import print_out

out_option = click.option(
    "--out", required=True, type=AnyPath(file_okay=False), metavar="DIR", help="A new folder; it appears whole."
)


@group(
    "rftstream data prepare examples/arithmetic.toml --out data/clean",
    "rftstream data import --recipe clean.yaml --out data/cleaned",
)
def data() -> None:
    """Make data sets for tasksets, once before a run."""


@command(
    "rftstream data prepare my_run.toml --out data/clean",
    "rftstream data prepare my_run.toml --taskset math --parquet --out data/math --json",
    group=data,
)
@click.argument("file", type=RunFile())
@out_option
@click.option("--taskset", "names", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option("--parquet", is_flag=True, help="Write Parquet instead of JSON lines.")
@set_option
@json_option
def prepare(file: Path, out: Path, names: tuple[str, ...], parquet: bool, sets: tuple[str, ...], as_json: bool) -> None:
    """Run the operators for problems once over whole tasksets, and write what stays.

    FILE is a run file. DIR gets NAME.jsonl (or NAME.parquet) for each taskset, and report.json. The report counts what
    went into each operator and what came out, by reason, with digests of input and output. The files are read again and
    compared before DIR appears. If the command is killed, there is no DIR, and the same command starts again. Operators
    see no outcomes here, so solve_rate keeps everything. If an operator fails, the command ends and names the problem.
    """
    from rftstream.preflight.prepare import prepare as write

    config = load_run_file((file,), sets)
    with at_work("going through the tasksets"):
        done = write(config, out, parquet=parquet, names=names)
    print_out(done.to_json() if as_json else done.to_text())


@command(
    "rftstream data import --recipe clean.yaml --out data/cleaned",
    "rftstream data import --recipe clean.yaml --from raw.jsonl --python ~/dj/bin/python --out data/cleaned --json",
    group=data,
    name="import",
)
@click.option("--recipe", required=True, type=AnyPath(dir_okay=False), metavar="RECIPE", help="A YAML file.")
@click.option(
    "--from", "dataset", type=AnyPath(), metavar="FILE", help="The data.  [default: the recipe's dataset_path]"
)
@click.option(
    "--python",
    type=AnyPath(dir_okay=False),
    metavar="PATH",
    help="The interpreter of an environment that has Data-Juicer.  [default: one that uv makes, once]",
)
@out_option
@json_option
def import_(recipe: Path, dataset: Path | None, python: Path | None, out: Path, as_json: bool) -> None:
    """Run a recipe of Data-Juicer, and take in what comes out with its digest.

    Data-Juicer runs unchanged, in its own environment. It installs the packages there that its operators need. DIR gets
    data.jsonl, the recipe and report.json, and appears whole or not at all. A taskset can read the result; name the
    columns in the taskset.
    """
    from rftstream.integrations.data_juicer import import_data

    done = import_data(recipe, out, dataset=dataset, python=python, say=say)
    print_out(done.to_json() if as_json else done.to_text())
