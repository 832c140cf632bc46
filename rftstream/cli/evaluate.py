"""`evaluate`: versions of a run, or any model, on the held-out problems of a run file."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rftstream.cli.options import examples, json_option, run_argument

if TYPE_CHECKING:
    from rftstream.messages import EvalResult
    from rftstream.runtime.evaluation import Versions

ALL = "all"


class VersionList(click.ParamType):
    """`0,40,200`, or `all`."""

    name = "versions"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Versions:
        if not isinstance(value, str):
            return value  # type: ignore[return-value]  # the default
        if value == ALL:
            return ALL
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() for word in words):
            self.fail(f"got {value!r}, expected numbers with commas between them, e.g. 0,40,200, or all", param, ctx)
        return [int(word) for word in words]


@examples(
    "rftstream evaluate examples/runs/arithmetic",
    "rftstream evaluate examples/arithmetic.toml --evaluation sums --versions 0,100,200 --json",
    "rftstream evaluate examples/runs/arithmetic --versions all",
)
@click.command()
@run_argument
@click.option("--evaluation", metavar="NAME", help="Only this one.  [default: all of the run file]")
@click.option("--versions", "--version", type=VersionList(), default=(), metavar="A,B,...",
              help="These versions, or `all` that are still held.  [default: the newest]")  # fmt: skip
@click.option("--again", is_flag=True, help="Also what has its result: another one is put beside it.")
@click.option("--here", is_flag=True, help="Do the work here, whoever the log says is the evaluator.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True,
              metavar="S", help="How long to wait for an evaluator's next answer.")  # fmt: skip
@json_option
def evaluate(
    run: Path, evaluation: str | None, versions: Versions, again: bool, here: bool, timeout: float, as_json: bool
) -> None:
    """Evaluate versions of a run now, and show the results, one below the other.

    Nothing is trained and a live run is not held up: if its evaluator is alive it is asked and does it next; else the
    work is done here, on the device of evaluator.device. The results go to the log and the object store as always, and
    what has its result is shown, not evaluated again; so after ctrl-C the same command does the rest. Without
    --evaluation and --versions, and nobody alive who does it, all that is still due is done (as of a finished run whose
    evaluator died). A version whose weights are not in the store any more is refused.

    RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.cli.views import opened_run, print_out
    from rftstream.runtime import evaluation as work
    from rftstream.runtime.host import prepare_process
    from rftstream.views.evaluations import result_to_json, results_to_text

    found: list[work.Evaluated] = []
    stopped = False
    with opened_run(run) as opened:
        prepare_process(opened.config, "evaluator")
        with closing(
            work.evaluate(
                opened, evaluation=evaluation, versions=versions, again=again, here=here, timeout_s=timeout, say=_say
            )
        ) as results:
            try:
                for one in results:
                    found.append(one)
                    if one.new:
                        _say(_line(one.result))
            except KeyboardInterrupt:
                stopped = True
    if as_json:
        print_out({"results": [{**result_to_json(one.result), "new": one.new} for one in found]})
    elif found:
        print_out(results_to_text(one.result for one in found))
    elif not stopped:
        click.echo("nothing is due: every version whose turn it was has its result; --versions V evaluates others")
    if stopped:
        _say("stopped; what has its result keeps it, and the same command does the rest")
        sys.exit(1)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _line(result: EvalResult) -> str:
    from rftstream.views.layout import number

    mean = number(result.metrics.get("mean"))
    unscored = f", {result.num_unscored} unscored" if result.num_unscored else ""
    return f"{result.evaluation} of version {result.name.version}: mean {mean}{unscored}"
