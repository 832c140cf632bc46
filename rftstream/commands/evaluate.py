"""The command `evaluate` runs the evaluations of a run file on versions of a run, or on any model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rftstream.commands.options import command, json_option, load_run_file, planned_parts, say, set_option
from rftstream.commands.param_types import AnyPath, RunPath
from rftstream.contracts.role_names import RoleName

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig
    from rftstream.contracts.versions import EvalResult
    from rftstream.launch.sessions.evaluation import Versions


def _versions(ctx: click.Context, param: click.Parameter, value: str | None) -> Versions:
    """Return the versions of an option such as `0,40,200`, or `all`."""
    if value is None:
        return ()
    from rftstream.errors import ConfigError
    from rftstream.launch.sessions.evaluation import parse_versions

    try:
        return parse_versions(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


@command(
    "rftstream evaluate examples/runs/arithmetic",
    "rftstream evaluate examples/arithmetic.toml --evaluation sums --versions 0,100,200 --json",
    "rftstream evaluate examples/runs/arithmetic --versions all",
    "rftstream evaluate examples/arithmetic.toml --model models/a --model models/b --out scores",
    "rftstream evaluate --model runs/gsm8k/final --benchmark gsm8k --benchmark humaneval",
)
@click.argument("run", metavar="[RUN]", required=False, type=RunPath())
@click.option("--evaluation", metavar="NAME", help="Only this one.  [default: all of the run file]")
@click.option(
    "--versions",
    "--version",
    callback=_versions,
    metavar="A,B,...",
    help="These versions, or `all` that are still held.  [default: the newest]",
)
@click.option(
    "--model",
    "models",
    metavar="PATH",
    multiple=True,
    help="A model folder, or name on the hub, in place of a run's versions; also several times.",
)
@click.option(
    "--out",
    type=AnyPath(file_okay=False),
    metavar="DIR",
    help="With --model: keep results and completions here.  [default: only shown]",
)
@click.option(
    "--benchmark",
    "benchmarks",
    metavar="NAME",
    multiple=True,
    help="With --model: a benchmark of `rftstream list benchmarks`; also several times. RUN is not needed then.",
)
@click.option(
    "--data",
    type=AnyPath(),
    metavar="PATH",
    help="With --benchmark: a copy of its data, a folder as the hub has it, or a file.  [default: from the hub]",
)
@click.option("--again", is_flag=True, help="Also what has its result.")
@click.option("--here", is_flag=True, help="Do the work here, whoever the log says is the evaluator.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="How long to wait for an evaluator's next answer.",
)
@set_option
@json_option
def evaluate(
    run: Path | None,
    evaluation: str | None,
    versions: Versions,
    models: tuple[str, ...],
    out: Path | None,
    benchmarks: tuple[str, ...],
    data: Path | None,
    again: bool,
    here: bool,
    timeout: float,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Evaluate versions of a run, or model folders, by the run file's evaluations; show them beside each other.

    Nothing is trained, and a live run is not held up. If the run's evaluator is alive, it gets the request and does it
    next; else this command does the work, on the device of evaluator.device. The results go to the log and the object
    store as always. A result that exists is shown and not computed again, so after ctrl-C the same command does the
    rest. Without --evaluation and --versions, if no evaluator is alive, the command does every evaluation that is still
    due (for instance if the evaluator of a finished run died). A version whose weights are no longer in the store is
    refused.

    With --model no run is needed or touched. RUN is then a run file, and its evaluations are run on the model with the
    settings of the file (and --set). A folder that a run left (`final/`) gets the same numbers that the run gave to
    that version. With --out every result is saved as it comes, and the same command continues after an interruption.
    With --benchmark the evaluations are benchmarks, whose data comes from the hub or from a copy that --data names; a
    RUN beside it brings its settings for sampling and devices.

    RUN is a run folder, or a run file (then its newest run).
    """
    if models and (versions or here):
        raise click.UsageError("--model: is of no run; it goes with neither --versions nor --here")
    if not models and (sets or benchmarks or out is not None):
        raise click.UsageError(
            f"{'--set' if sets else '--benchmark' if benchmarks else '--out'}: goes with --model; versions of a run "
            "are evaluated by the run's settings"
        )
    if data is not None and len(benchmarks) != 1:
        raise click.UsageError("--data: is a copy of one benchmark's data; it goes with one --benchmark")
    if run is None and not benchmarks:
        raise click.UsageError("Missing argument 'RUN'; with --model and --benchmark there need be none.")
    if models:
        config = _config_of_models(run, benchmarks, data, sets)
        _evaluate_models(config, models, evaluation, out, again=again, as_json=as_json)
    else:
        assert run is not None, "there are no benchmarks"
        _evaluate_versions(run, evaluation, versions, again=again, here=here, timeout_s=timeout, as_json=as_json)


def _evaluate_versions(
    run: Path, evaluation: str | None, versions: Versions, *, again: bool, here: bool, timeout_s: float, as_json: bool
) -> None:
    from rftstream.commands.views import opened_run, print_out
    from rftstream.launch.sessions import evaluation as work
    from rftstream.preflight.plan import Purpose, plan
    from rftstream.queries.curves.evaluations import result_to_json, results_to_text

    found: list[work.Evaluated] = []
    with opened_run(run) as opened, _stopped("what has its result keeps it, and the same command does the rest") as end:
        opened = replace(opened, config=plan(opened.config, Purpose.join, role=RoleName.evaluator).config)
        with closing(
            work.evaluate(
                opened, evaluation=evaluation, versions=versions, again=again, here=here, timeout_s=timeout_s, say=say
            )
        ) as results:
            for result in results:
                found.append(result)
                if result.new:
                    say(_line(result.result, f"version {result.result.name.version}"))
    found.sort(key=lambda one: one.result.name.version)
    if as_json:
        print_out({"results": [{**result_to_json(one.result), "new": one.new} for one in found]})
    elif found:
        print_out(results_to_text(one.result for one in found))
    elif not end.came:
        click.echo("nothing is due: every version whose turn it was has its result; --versions V evaluates others")
    end.leave()


def _config_of_models(run: Path | None, benchmarks: Sequence[str], data: Path | None, sets: Sequence[str]) -> RunConfig:
    """Return the run file's config, or the run file's with the benchmarks in place of its evaluations."""
    from rftstream.queries.reference.benchmarks import benchmark_files, with_data

    file = run / "config.toml" if run is not None and run.is_dir() else run
    if not benchmarks:
        assert file is not None, "it was asked for"
        return load_run_file([file], sets)
    here = [f"base={Path.cwd()}"] if file is None else []  # paths of --set are relative to it
    config = load_run_file(benchmark_files(benchmarks, file), [*here, *sets])
    chosen = {name: section for name, section in config.evaluations.items() if name in benchmarks}
    if data is not None:
        chosen = {name: with_data(section, data) for name, section in chosen.items()}
    return replace(config, evaluations=chosen)


def _evaluate_models(
    config: RunConfig,
    models: Sequence[str],
    evaluation: str | None,
    out: Path | None,
    *,
    again: bool,
    as_json: bool,
) -> None:
    from rftstream.commands.views import print_out
    from rftstream.launch.sessions.model_evaluation import Scored, evaluate_model, result_row
    from rftstream.queries.curves.evaluations import table

    config = planned_parts(config, RoleName.evaluator)
    found: list[Scored] = []
    goes_on = "the same command goes on" if out is not None else "with --out it would go on where it was"
    with _stopped(goes_on) as end:
        for model in dict.fromkeys(models):
            with closing(
                evaluate_model(config, model, evaluation=evaluation, out=out, again=again, say=say)
            ) as results:
                for result in results:
                    found.append(result)
                    if result.new:
                        say(_line(result.result, model))
    if as_json:
        print_out({"results": [{"model": one.model, **result_row(one.result), "new": one.new} for one in found]})
    elif found:
        rows = sorted(found, key=lambda one: list(config.evaluations).index(one.result.evaluation))
        print_out(table(("evaluation", "model"), [((row.result.evaluation, row.model), row.result) for row in rows]))
    end.leave()


class _End:
    """Records whether ctrl-C came. `_stopped` makes it."""

    def __init__(self) -> None:
        self.came = False

    def leave(self) -> None:
        if self.came:
            sys.exit(1)


@contextmanager
def _stopped(what_now: str) -> Iterator[_End]:
    end = _End()
    try:
        yield end
    except KeyboardInterrupt:
        end.came = True
        say(f"stopped; {what_now}")


def _line(result: EvalResult, of: str) -> str:
    from rftstream.queries.curves.evaluations import mean_text

    return f"{result.evaluation} of {of}: mean {mean_text(result)}"
