"""The commands `check`, `status`, `diff`, `audit`, `inspect`, `plot` and `list`, which only read."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rftstream.commands.options import (
    at_work,
    can_dim,
    command,
    files_argument,
    given_run,
    json_option,
    layers_argument,
    load_run_file,
    no_index_option,
    of_this_run,
    run_argument,
    run_here_argument,
    say,
    set_option,
)
from rftstream.commands.param_types import KINDS, AnyPath, RunPath, Word, complete_topic
from rftstream.errors import RftError, pip_install

if TYPE_CHECKING:
    from rftstream.queries.audits.balance import AuditReport
    from rftstream.queries.facts.database import Index
    from rftstream.queries.state.status import Status
    from rftstream.runs.folder import OpenRun

T = TypeVar("T")


@command(
    "rftstream check examples/arithmetic.toml",
    "rftstream check examples/arithmetic.toml -v",
    "rftstream check base.toml mine.toml --set feeder.group_size=16 --json",
)
@files_argument
@set_option
@json_option
@click.option("-v", "--verbose", is_flag=True, help="Every part with its settings, tokens, memory and disk by role.")
def check(files: tuple[Path, ...], sets: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """Check everything in a run file before a run.

    It builds the settings of every part, opens tasksets (all lines of a file), and refuses prompts longer than the
    context. It shows a prompt as the model sees it, the environment's reply to the first problem's answer, and the
    reward of the answers of up to 20 problems (1 expected) and of empty ones (0 expected). It warns of long texts,
    lists of candidates and other answers that the reward pays for, and of settings that look unintended, and estimates
    memory, disk and time. Exit 2 if the run could not start.
    """
    config = load_run_file(files, sets)
    with at_work("looking at model, tasks and parts", lines=not as_json) as doing:
        from rftstream.threads import limit_threads

        limit_threads(1)
        from rftstream.preflight.checks.check import check as look

        report = look(config, doing)
    print_out(report.to_json() if as_json else report.to_text() if verbose else report.to_short_text())
    sys.exit(0 if report.ok else 2)


@command("rftstream status examples/runs/arithmetic", "rftstream status examples/arithmetic.toml --json")
@run_here_argument
@layers_argument
@json_option
@click.option(
    "--within-s",
    type=click.FloatRange(min=0, min_open=True),
    default=50.0,
    show_default=True,
    help="Seconds after which a log that has not told everything is given up (exit 3).",
)
def status(run: Path, layers: tuple[Path, ...], as_json: bool, within_s: float) -> None:
    """Show where a run stands: state, version, reward, evaluations, what waits where, who works on it.

    RUN is a run folder, or a run file (then its newest run). Later FILEs override a run file.
    """
    from rftstream.queries.state.status_reading import read_status

    def ask(doing: Callable[[str], None]) -> Status:
        doing("which run it is")
        with opened_run(run, layers) as opened:
            return read_status(opened, doing=doing)

    found = answer_within(within_s, ask)
    print_out(found.to_json() if as_json else found.to_text())


@command("rftstream diff runs/first runs/second", "rftstream diff runs/first runs/second --json | jq .settings")
@click.argument("run", metavar="RUN", type=RunPath())
@click.argument("other", metavar="RUN", type=RunPath())
@json_option
def diff(run: Path, other: Path, as_json: bool) -> None:
    """Compare two runs: the settings that differ; steps, reward, evaluations, time and tokens/s beside each other.

    It also shows what became of the groups, by operator, and how many are in batches of both. It reads both logs, and
    the runs need not have anything in common. RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.queries.decisions.run_difference import compare

    with opened_run(run) as first, opened_run(other) as second, at_work("reading both logs", at_intervals=True):
        found = compare(first, second)
    print_out(found.to_json() if as_json else found.to_text())


@command(
    "rftstream audit examples/runs/arithmetic",
    "rftstream audit examples/runs/arithmetic --json | jq .rollouts",
    "rftstream audit examples/runs/arithmetic --decisions",
    "rftstream audit runs/*",
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunPath(), callback=given_run)
@json_option
@no_index_option
@click.option("--decisions", is_flag=True, help="Compute every decision of the run's operators again, too.")
def audit(runs: tuple[Path, ...], as_json: bool, no_index: bool, decisions: bool) -> None:
    """Count from the log what became of every rollout and every group.

    admitted = pending + trained + expired + filtered + dead, also while the run is live. It shows the lengths of the
    completions by outcome, twins, and contradictions. Exit 1 if the counts do not balance or a twin is found. An index
    is kept in RUN/index (safe to delete), so that the next audit reads only new records. With --decisions the operators
    of the run file decide again about every problem and every group, with the facts that the log recorded for them. Any
    different answer is shown, with exit 1. This reads the whole log, and opens tasksets and operators. RUN is a run
    folder, or a run file (then its newest run). Several runs are counted one after the other, with --json as an object
    a line with the name; the exit code is the worst.
    """
    if len(runs) == 1:
        report = _audit(runs[0], no_index, decisions)
        print_out(report.to_json() if as_json else report.to_text())
        sys.exit(0 if report.fine else 1)
    codes = []
    for run in runs:
        try:
            report = _audit(run, no_index, decisions)
        except RftError as error:
            say(f"rftstream: {error}")
            codes.append(error.exit_code)
            continue
        print_out({"run": str(run), **report.to_json()} if as_json else f"{run}\n\n{report.to_text()}\n")
        codes.append(0 if report.fine else 1)
    sys.exit(max(codes))


def _audit(run: Path, no_index: bool, decisions: bool) -> AuditReport:
    from rftstream.queries.audits.audit import audit as count
    from rftstream.queries.decisions.recompute import recompute_run

    with opened_run(run) as opened:
        with indexed(opened, no_index) as index, at_work("reading the log", at_intervals=True) as doing:
            report = count(opened.transport, index, doing=doing)
        if decisions:
            with at_work("asking the operators again"):
                report = replace(report, recomputation=recompute_run(opened))
    return report


@command(
    "rftstream inspect examples/runs/arithmetic rollouts --last 3",
    "rftstream inspect examples/runs/arithmetic verified --where group_id=sums/0/17/0 --json",
    "rftstream inspect examples/runs/arithmetic steps --from 100 --json | jq .message.metrics.reward",
)
@run_argument
@click.argument("topic", required=False, shell_complete=complete_topic)
@json_option
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="Only this partition.")
@click.option("--from", "start", type=click.IntRange(min=0), metavar="OFFSET", help="From this offset on.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@click.option(
    "--where",
    "conditions",
    metavar="HEADER=VALUE",
    multiple=True,
    help="Only records with this header; may be given several times.",
)
def inspect(
    run: Path,
    topic: str | None,
    as_json: bool,
    partition: int | None,
    start: int | None,
    last: int | None,
    conditions: tuple[str, ...],
) -> None:
    """Show records of a topic, decoded: headers, turns as text, metrics.

    Without TOPIC: the topics of the run, what is on each, and how many records each holds. --json prints one object a
    line: topic, partition, offset, timestamp, key, headers, and message with its arrays as lists, or error if the
    record cannot be decoded. RUN is a run folder, or a run file (then its newest run).
    """
    where = {}
    for condition in conditions:
        header, equals, value = condition.partition("=")
        if not equals:
            raise click.BadParameter(f"got {condition!r}, expected HEADER=VALUE", param_hint="--where")
        where[header] = value
    from rftstream.queries.records.inspect import list_topics, record_to_json, record_to_text, select, topics_to_text
    from rftstream.queries.records.shown import open_reader
    from rftstream.service.role import Log

    num_shown = 0
    with opened_run(run) as opened:
        if topic is None:
            if start is not None or last is not None or partition is not None or where:
                raise click.UsageError("TOPIC is missing; `rftstream inspect RUN` lists the topics")
            held = list_topics(Log(opened.transport))
            print_out(held if as_json else topics_to_text(opened.run_id, held))
            return
        reader = open_reader(opened, dims=can_dim())
        for record in select(Log(opened.transport), topic, partition=partition, start=start, last=last, where=where):
            num_shown += 1
            click.echo(_to_json(record_to_json(record)) if as_json else record_to_text(record, reader))
        newest = next(iter(() if num_shown else select(Log(opened.transport), topic, last=1)), None)
    if not num_shown:
        names = sorted(name for name, _ in newest.headers) if newest is not None else list(where)
        known = "" if where.keys() <= set(names) else f"; their headers are {', '.join(names)}"
        click.echo(f"{topic}: no such records{known}" if where else f"{topic}: no records", err=True)


@command(
    "rftstream plot examples/runs/arithmetic",
    "rftstream plot examples/runs/arithmetic --out .",
    "rftstream plot examples/runs/arithmetic --tensorboard board && tensorboard --logdir board",
)
@run_here_argument
@click.option(
    "--out", type=AnyPath(file_okay=False), metavar="DIR", help="Where the pictures go.  [default: RUN/plots]"
)
@click.option(
    "--tensorboard",
    type=AnyPath(file_okay=False),
    metavar="DIR",
    help="Write event files for TensorBoard into this folder instead of pictures.",
)
@json_option
def plot(run: Path, out: Path | None, tensorboard: Path | None, as_json: bool) -> None:
    """Draw the run's curves as a page for a browser and as PNG, over steps and over time.

    Reward, evaluations, completion lengths, staleness, loss, gradient norm, entropy, mismatch and rates; only steps in
    force, with a mark where a trainer resumed; `rftstream diff A B` compares runs, `rftstream studio A B` their curves.
    The page, index.html, needs no other file. Its curves show values under the pointer, zoom, and can be switched off.
    It also shows completions from the beginning and the end, and the run's settings. RUN is a run folder, or a run file
    (then its newest run).
    """
    from rftstream.queries.curves.history import read_history
    from rftstream.queries.curves.page_facts import own_settings, read_samples
    from rftstream.queries.curves.plot import can_draw, write_events
    from rftstream.queries.curves.plot import plot as draw
    from rftstream.queries.records.shown import open_reader
    from rftstream.service.role import Log
    from rftstream.studio.plot_page import write_page

    with opened_run(run) as opened, at_work("reading the log and drawing"):
        history = read_history(Log(opened.transport))
        if tensorboard is None:
            folder = out or opened.folder.plots
            files = draw(history, run=opened.run_id, folder=folder) if can_draw() else []
            page: Path | None = write_page(
                history,
                run=opened.run_id,
                folder=folder,
                settings=own_settings(opened.config),
                samples=read_samples(Log(opened.transport), open_reader(opened, dims=False)),
            )
        else:
            files, page = [write_events(history, tensorboard)], None
    if not files:
        click.echo(f"plot: a page and no PNG, since matplotlib is missing; {pip_install('rftstream[plots]')}", err=True)
    pages = {} if page is None else {"page": str(page)}
    if as_json:
        print_out({"files": [str(file) for file in files], **pages})
    else:
        print_out("\n".join([*map(str, files), *pages.values()]))


@command("rftstream list rewards", "rftstream list algorithms --json", "rftstream list runs", name="list")
@click.argument("kind", type=Word(KINDS))
@click.option(
    "--folder",
    type=AnyPath(file_okay=False),
    metavar="DIR",
    help="Of `list runs`: where the run folders are.  [default: where run files here write them, and those "
    "one folder below]",
)
@json_option
def list_(kind: str, folder: Path | None, as_json: bool) -> None:
    """List the built-in parts of a KIND and how to plug in your own, or list the runs.

    KIND is transports, policies, backends, algorithms, rewards, environments, tasksets, benchmarks, or runs. `list
    runs` searches the places where `run` writes: beside the run files in this folder and its subfolders, and in runs/.
    `list environments` also says which packages of environments are installed, and what installs the others.
    """
    from rftstream.queries.reference import listing

    if kind in ("run", "runs"):
        lines = listing.list_runs(*(listing.run_places(Path()) if folder is None else [folder]))
        print_out(lines if as_json else listing.runs_to_text(lines))
        return
    if kind in ("benchmark", "benchmarks"):
        from rftstream.queries.reference.benchmarks import benchmarks_to_text, list_benchmarks

        benchmarks = list_benchmarks()
        print_out(benchmarks if as_json else benchmarks_to_text(benchmarks))
        return
    kind = listing.kind_of(kind)
    parts, sources = listing.list_parts(kind), listing.list_sources(kind)
    text = listing.parts_to_text(kind, parts) + listing.sources_to_text(sources)
    print_out([*parts, *sources] if as_json else text)


@contextmanager
def indexed(run: OpenRun, no_index: bool, *, looking: bool = False) -> Iterator[Index | None]:
    """Yield the run's index, or None if the caller does not want one. Errors of the index go to stderr."""
    from rftstream.queries.facts.database import opened_index

    if no_index:
        yield None
        return
    with opened_index(run, looking=looking) as index:
        yield index
        for note in index.notes if index is not None else ():
            click.echo(f"index: {note}", err=True)


@contextmanager
def opened_run(run: Path, layers: Sequence[Path] = ()) -> Iterator[OpenRun]:
    """Open the run of a folder or a run file, and close its log at the end."""
    from rftstream.api.on_log import open_named

    with at_work("opening the run"):
        opened = open_named(run, layers)
    try:
        yield opened
    finally:
        opened.transport.close()


def answer_within(seconds: float, ask: Callable[[Callable[[str], None]], T]) -> T:
    """Return what `ask` returns, or raise what it raises. If it takes longer than `seconds`, raise TransportError with
    the request that was not answered. `ask` gets a function and calls it with the name of each request."""
    from rftstream.errors import TransportError

    asked, answers = ["it"], SimpleQueue[Future[T]]()

    def answer() -> None:
        future: Future[T] = Future()
        try:
            future.set_result(ask(asked.append))
        except BaseException as error:
            future.set_exception(error)
        answers.put(future)

    threading.Thread(target=answer, name="asks the log", daemon=True).start()  # the thread ends with the command
    try:
        return answers.get(timeout=seconds).result()
    except Empty:
        raise TransportError(
            f"the log did not answer within {seconds:g} s: it was asked for {asked[-1]}; look whether its brokers are "
            "up or throttle by quotas, or wait longer with --within-s"
        ) from None


def print_out(what: Any) -> None:
    """Print a text, or any other value as JSON. Commands in a text name the run of this command."""
    context = click.get_current_context(silent=True)
    click.echo(of_this_run(what, context) if isinstance(what, str) else _to_json(what))


def _to_json(what: Any) -> str:
    from rftstream.queries.plain import printable

    return json.dumps(printable(what), ensure_ascii=False, allow_nan=False)
