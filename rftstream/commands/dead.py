"""The commands `dead` list records that could not be processed, and put them back once the cause is fixed."""

from __future__ import annotations

import time
from pathlib import Path

import click

from rftstream.commands.options import can_dim, command, group, json_option, run_argument
from rftstream.commands.views import opened_run, print_out

ids_argument = click.argument("names", metavar="[ID]...", nargs=-1)
reason_option = click.option("--reason", metavar="WORD", help="Those with this reason: error, timeout, failed, ...")
all_option = click.option("--all", "everything", is_flag=True, help="All that are listed.")


@group(
    "rftstream dead list examples/runs/arithmetic",
    "rftstream dead show examples/runs/arithmetic verifier/rollouts/3/812",
    "rftstream dead retry examples/runs/arithmetic --all",
)
def dead() -> None:
    """List dead letters and dead groups, show one, put them back, or drop them.

    A rollout that could not be scored continues without a reward, and its original record goes to the topic `dead`. A
    group with too few scored rollouts gets the outcome `dead`. When the cause is fixed, `retry` puts such groups back.
    """


@command(
    "rftstream dead list examples/runs/arithmetic",
    "rftstream dead list examples/runs/arithmetic --num 20 --json",
    group=dead,
    name="list",
)
@run_argument
@click.option("--num", type=click.IntRange(min=0), default=5, show_default=True, help="Newest letters shown.")
@click.option("--dropped", "with_dropped", is_flag=True, help="Also what was dropped.")
@json_option
def list_(run: Path, num: int, with_dropped: bool, as_json: bool) -> None:
    """Count dead letters by reason, role and topic, and dead groups by reason; show the newest letters."""
    from rftstream.queries.records.dead import read_dead, view_to_json, view_to_text
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        log = Log(opened.transport)
        view = read_dead(log, now=time.time(), with_dropped=with_dropped)
        print_out((view_to_json if as_json else view_to_text)(log, view, num_examples=num))


@command("rftstream dead show examples/runs/arithmetic verifier/rollouts/3/812", group=dead)
@run_argument
@click.argument("name", metavar="ID")
@json_option
def show(run: Path, name: str, as_json: bool) -> None:
    """Show why a record was given up, how often it was tried, and the record itself, decoded as far as possible.

    ID is the id of a letter as `list` shows it. The id of a rollout or group shows all its letters. --json prints one
    list.
    """
    from rftstream.errors import ConfigError
    from rftstream.queries.records.dead import find_letters, letter_to_json, letter_to_text
    from rftstream.queries.records.shown import open_reader
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        found, reader = find_letters(Log(opened.transport), name), open_reader(opened, dims=can_dim())
    if not found:
        raise ConfigError(f"{name}: no dead letter has this id; `rftstream dead list RUN` shows them")
    print_out(
        [letter_to_json(*one) for one in found]
        if as_json
        else "\n\n".join(letter_to_text(*one, reader) for one in found)
    )


@command(
    "rftstream dead retry examples/runs/arithmetic --all",
    "rftstream dead retry examples/runs/arithmetic --reason timeout",
    "rftstream dead retry examples/runs/arithmetic sums/0/17/0 --sample",
    group=dead,
)
@run_argument
@ids_argument
@reason_option
@all_option
@click.option("--sample", is_flag=True, help="Sample the rollouts again, also where there are some to be scored.")
@click.option(
    "--within-h",
    type=click.FloatRange(min=0, min_open=True),
    default=168.0,
    show_default=True,
    metavar="HOURS",
    help="Not done any more after so long.",
)
@json_option
def retry(
    run: Path,
    names: tuple[str, ...],
    reason: str | None,
    everything: bool,
    sample: bool,
    within_h: float,
    as_json: bool,
) -> None:
    """Put dead groups back, as new attempts with ids of their own.

    ID is the id of a letter, a rollout or a group. Rollouts that were sampled are scored again without sampling, unless
    they are too old by now. The feeder admits the groups as its limits allow: at once in a live run, after `rftstream
    resume` in a stopped one, after a resume with more steps in a finished one. Only groups with the outcome dead are
    put back; the dead sibling of a batched group stays dead.
    """
    _one_choice(names, reason, everything)
    from rftstream.queries.records.dead import plan_retries, read_dead, reasons_to_text
    from rftstream.runs.writes.requests import ask_retries
    from rftstream.service.control_view import read_control
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        log = Log(opened.transport)
        stored, before = plan_retries(log, names, reason, sample=sample, now=time.time())
        groups = list(stored)
        if groups:
            ask_retries(opened, stored, within_s=within_h * 3600)
        here = "" if groups or reason is None else reasons_to_text(read_dead(log, now=time.time()))
        control, live = read_control(opened.transport), opened.folder.is_live()
    num_stored = sum(place is not None for places in stored.values() for place in places)
    hint = _what_next(run, finished=control.finished is not None, ended=control.ended is not None, live=live)
    if as_json:
        print_out({"groups": groups, "num_stored": num_stored, "put_back_before": before, "next": hint})
        return
    text = f"{len(groups):,} groups asked to be put back, with {num_stored:,} rollouts to be scored again"
    if not groups:
        which = f"{here}; no group that died of {reason!r}" if reason else "no dead group"
        text = (
            f"{which} is left to be put back; rollouts whose group went into a batch without them stay dead and need "
            "nothing, and a group that is still open may die, or be batched, when the run goes on: ask again then"
        )
    text += f"; {before:,} were put back before" if before else ""
    print_out(f"{text}\n{hint}" if groups and hint else text)


@command(
    "rftstream dead drop examples/runs/arithmetic --reason failed --why 'a broken environment, mended'",
    "rftstream dead drop examples/runs/arithmetic --all",
    group=dead,
)
@run_argument
@ids_argument
@reason_option
@all_option
@click.option("--why", default="", metavar="TEXT", help="Kept on the log beside who asked and when.")
@json_option
def drop(run: Path, names: tuple[str, ...], reason: str | None, everything: bool, why: str, as_json: bool) -> None:
    """Have done with dead letters and dead groups: they are listed no more.

    Nothing is deleted and no count changes; `list --dropped` still shows them, and `retry` with a group's id still puts
    the group back.
    """
    _one_choice(names, reason, everything)
    from rftstream.queries.records.dead import read_dead, to_drop
    from rftstream.runs.writes.requests import drop_dead
    from rftstream.service.role import Log

    with opened_run(run) as opened:
        letters, groups = to_drop(read_dead(Log(opened.transport), now=time.time()), names, reason)
        if letters or groups:
            drop_dead(opened, letters, groups, reason=why)
    print_out(
        {"letters": letters, "groups": groups}
        if as_json
        else f"{len(letters):,} letters and {len(groups):,} groups dropped"
    )


def _one_choice(names: tuple[str, ...], reason: str | None, everything: bool) -> None:
    if bool(names) + (reason is not None) + everything != 1:
        raise click.UsageError("name what is meant: ID..., or --reason WORD, or --all")


def _what_next(run: Path, *, finished: bool, ended: bool, live: bool) -> str:
    """Return what the user has to do next if the feeder cannot put the groups back at once."""
    if finished:
        return f"the run is finished: `rftstream resume {run} --set run.steps=N` with more steps does it"
    if ended:
        return f"the feeder admits no more in this run: `rftstream resume {run}` with more steps does it after its end"
    return "" if live else f"nobody runs it here: `rftstream resume {run}` does it"
