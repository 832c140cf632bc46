"""`evaluate`: a version of a run on its held-out problems, now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rftstream.cli.options import examples, json_option, run_argument

if TYPE_CHECKING:
    from rftstream.messages import EvalResult


@examples(
    "rftstream evaluate examples/runs/arithmetic",
    "rftstream evaluate examples/arithmetic.toml --evaluation sums --version 200 --json",
)
@click.command()
@run_argument
@click.option("--evaluation", metavar="NAME", help="Only this one.  [default: all of the run file]")
@click.option("--version", type=click.IntRange(min=0), metavar="V", help="This version.  [default: the newest]")
@click.option("--here", is_flag=True, help="Do the work here, whoever the log says is the evaluator.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True,
              metavar="S", help="How long to wait for an evaluator's answer.")  # fmt: skip
@json_option
def evaluate(run: Path, evaluation: str | None, version: int | None, here: bool, timeout: float, as_json: bool) -> None:
    """Evaluate a version of a run now, and show the result.

    If the run's evaluator is alive it is asked and does it next; else the work is done here, on the device of
    evaluator.device, together with all that is still due (as of a finished run whose evaluator died): without options
    nothing but that. The results go to the log and the object store as always. RUN is a run folder, or a run file
    (then its newest run).
    """
    from rftstream.cli.views import opened_run, print_out
    from rftstream.runtime import evaluation as work
    from rftstream.runtime.host import prepare_process

    results = []
    with opened_run(run) as opened:
        prepare_process(opened.config, "evaluator")
        for result in work.evaluate(opened, evaluation=evaluation, version=version, here=here, timeout_s=timeout,
                                    say=lambda text: click.echo(text, err=True)):  # fmt: skip
            results.append(result)
            if not as_json:
                click.echo(_line(result))
    if as_json:
        print_out({"results": [_plain(one) for one in results]})
    elif not results:
        click.echo("nothing is due: every version whose turn it was has its result; --version V evaluates another")


def _plain(result: EvalResult) -> dict[str, Any]:
    return {
        "evaluation": result.evaluation, "version": result.name.version, "trainer_epoch": result.name.trainer_epoch,
        "num_tasks": result.num_tasks, "num_samples": result.num_samples, "num_unscored": result.num_unscored,
        "metrics": dict(result.metrics), "generations": result.generations, "best": result.best,
        "request_id": result.request_id, "evaluated_at": result.evaluated_at,
    }  # fmt: skip


def _line(result: EvalResult) -> str:
    from rftstream.views.layout import number

    names = ["mean", *sorted(name for name in result.metrics if name.startswith("pass@"))]
    told = "  ".join(f"{name} {number(result.metrics[name])}" for name in names if name in result.metrics)
    unscored = f"  {result.num_unscored} unscored" if result.num_unscored else ""
    return f"{result.evaluation} of version {result.name.version}: {told or 'no reward'}{unscored}"
