"""The commands `problems` add problems to a growing taskset of a run and list them, and list doubtful ones of any."""

from __future__ import annotations

import getpass
import math
import time
from contextlib import closing
from pathlib import Path

import click

from rftstream.commands.options import (
    at_work,
    column_pairs,
    columns_option,
    command,
    from_option,
    group,
    json_option,
    run_argument,
    say,
)
from rftstream.commands.views import opened_run, print_out


@group("rftstream problems add runs/a --from more.jsonl", "rftstream problems list runs/a --last 20")
def problems() -> None:
    """Add problems to solve to a taskset while the run goes on, and list them; list those with doubtful answers.

    A run file declares such a taskset by `source = "log:problems"`. People and programs add problems with this command.
    The role `synthesiser` has a model make problems. What is wrong with a run is said by `rftstream status RUN` and
    `audit RUN`.
    """


@command(
    "rftstream problems add runs/a --from more.jsonl",
    "rftstream problems add runs/a --from new.parquet --taskset more --column prompt=question --by ada",
    "rftstream problems add runs/a --from variants.jsonl --column parent=made_of --by rewriter --agent --json",
    group=problems,
)
@run_argument
@from_option("JSON lines, Parquet, a folder of a Hugging Face dataset, or hf:NAME of one on the hub.")
@click.option("--taskset", metavar="NAME", help="The growing taskset; default: the only one.")
@columns_option("Which column is what: prompt, messages, answer, system, tools, data_source, images, parent, kind.")
@click.option("--system", metavar="TEXT", help="System prompt put in front, where there is none.")
@click.option("--by", metavar="NAME", help="Who made them; default: you, as the system calls you.")
@click.option("--agent", is_flag=True, help="A program made them, not a person.")
@click.option("--dry-run", is_flag=True, help="Look at everything, write nothing.")
@json_option
def add(
    run: Path,
    source: str,
    taskset: str | None,
    columns: tuple[str, ...],
    system: str | None,
    by: str | None,
    agent: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Add problems to a growing taskset of a run, live or not, each once however often it is added.

    A row has a `prompt` or `messages`, an `answer`, and what else the reward takes, as in the file of a taskset. Every
    row is first rendered with the run's template. An error names the row, and then nothing is written. `parent` names
    the problem that the new one was made from (TASKSET/INDEX). `kind` says how the two are related (reworded, varied,
    harder).
    """
    from rftstream.contracts.problems import ProblemMaker
    from rftstream.preflight.plan import Purpose, plan
    from rftstream.runs.writes.add_problems import ProblemsFile, add_problems, choose_growing, problems_source

    with opened_run(run) as opened:
        plan(opened.config, Purpose.join)
        wanted = ProblemsFile(
            source=problems_source(source),
            taskset=choose_growing(opened.config, taskset),
            made_by=by or getpass.getuser(),
            maker=ProblemMaker.agent if agent else ProblemMaker.person,
            columns=column_pairs(columns, "prompt=question"),
            system=system,
        )
        added = add_problems(
            opened.transport, opened.config, opened.folder, wanted, now=time.time(), say=say, dry_run=dry_run
        )
    print_out(added.to_json() if as_json else added.to_text())


@command(
    "rftstream problems list runs/a",
    "rftstream problems list runs/a --rejected --last 10",
    "rftstream problems list runs/a --json | jq .rejected",
    group=problems,
    name="list",
)
@run_argument
@click.option("--taskset", metavar="NAME", help="Only of this growing taskset.")
@click.option("--rejected", is_flag=True, help="What a model made that did not join, with the reason.")
@click.option("--last", type=click.IntRange(min=1), metavar="NUM", help="Only the newest so many.")
@json_option
def list_(run: Path, taskset: str | None, rejected: bool, last: int | None, as_json: bool) -> None:
    """List the problems to solve that have joined a run, in order: who made each, of which problem, and how many
    attempts at it had its answer."""
    from rftstream.data.tasksets.open import grows
    from rftstream.queries.records.problem_list import list_problems
    from rftstream.runs.writes.add_problems import choose_growing
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        growing = [name for name, section in opened.config.tasksets.items() if grows(section.source)]
        name = None if taskset is None else choose_growing(opened.config, taskset)
        found = list_problems(Log(opened.transport), growing, taskset=name, rejected=rejected, last=last)
    print_out(found.to_json() if as_json else found.to_text())


@command(
    "rftstream problems doubtful runs/a",
    "rftstream problems doubtful runs/a --json | jq -r '.[] | [.problem, .answer, .agreed] | @tsv'",
    group=problems,
)
@run_argument
@click.option("--num", type=click.IntRange(min=1), default=50, show_default=True, help="Most problems that are listed.")
@json_option
def doubtful(run: Path, num: int, as_json: bool) -> None:
    """List the problems, of any taskset, whose reference answer may be wrong.

    Of at least 8 attempts none got a reward of 0.5, and most gave one answer. Either that answer is right, or the
    policy makes the same mistake each time: somebody has to look. The studio's index is used, and kept in RUN/index
    (safe to delete). RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.queries.catalog.problems import count_problems, find_problems
    from rftstream.queries.catalog.run_index import RunIndex
    from rftstream.queries.formatting import columns, plural
    from rftstream.queries.plain import plain
    from rftstream.runs.folder import open_run

    with (
        closing(RunIndex(open_run(run))) as index,
        at_work("reading what was said", at_intervals=True),
        index.catalog(texts=True) as opened,
    ):
        found = [] if opened is None else find_problems(*opened, doubtful=True, limit=num)
        num_scored = 0 if opened is None else count_problems(*opened, reward=(-math.inf, None))
    if as_json:
        print_out([plain(one) for one in found])
        return
    rows = [
        (
            f"{one.taskset} {one.problem}",
            *(" ".join((text or "").split())[:60] for text in (one.answer, one.agreed)),
            f"{one.num_agreed:,} of {one.num_answers:,}",
        )
        for one in found
    ]
    heads = ("problem", "reference answer", "most attempts say", "how many")
    none = (
        f"no doubtful problem, of {plural(num_scored, 'problem')} with rewards"
        if num_scored
        else "no problem has rewards yet: those of decided groups count, in a rescored run after `rftstream resume`"
    )
    print_out("\n".join(columns([heads, *rows], left=3)) if rows else none)
