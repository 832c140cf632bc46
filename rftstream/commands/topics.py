"""The commands `topics`: the topics of a run, and the rights of its users on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rftstream.commands.options import command, group, json_option, run_files
from rftstream.commands.param_types import RunPath
from rftstream.commands.views import print_out


@group(
    "rftstream topics plan run.toml",
    "rftstream topics list examples/arithmetic.toml",
    "rftstream topics apply examples/arithmetic.toml --json",
    "rftstream topics acls run.toml --dry-run",
)
def topics() -> None:
    """List a run's topics, make those that are missing, and set who may do what with them.

    FILE is a run file (its newest run, or the one that it would start), or a run folder. Later FILEs override it.
    """


def _files_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("files", metavar="[FILE]...", nargs=-1, type=RunPath(), envvar="RFTSTREAM_CONFIG")(command)


_run_option = click.option(
    "--run", "run_id", metavar="NAME", help="Another run of FILE: the next one, or one on another host."
)


@command("rftstream topics list examples/arithmetic.toml", group=topics, name="list")
@_files_argument
@json_option
def list_(files: tuple[Path, ...], as_json: bool) -> None:
    """List a run's topics beside what they should be.

    It shows partitions, how much they hold, and every setting that differs from what the run file and rftstream
    require. Exit 1 if a setting differs or a topic is missing.
    """
    _report(files, as_json, make=False)


@command("rftstream topics apply examples/arithmetic.toml --json", group=topics)
@_files_argument
@json_option
def apply(files: tuple[Path, ...], as_json: bool) -> None:
    """Make the topics that are missing.

    New topics get the right settings, on Kafka too. Existing topics are not changed; one with another number of
    partitions is an error.
    """
    _report(files, as_json, make=True)


def _report(files: tuple[Path, ...], as_json: bool, *, make: bool) -> None:
    from rftstream.preflight.plan import Purpose, plan
    from rftstream.queries.state.topics import apply_topics, find_log, list_topics

    path, *layers = run_files(files)
    config, folder = find_log(path, layers)
    plan(config, Purpose.build)
    report = apply_topics(config, folder) if make else list_topics(config, folder)
    print_out(report.to_json() if as_json else report.to_text())
    sys.exit(0 if report.fine else 1)


@command("rftstream topics plan run.toml", "rftstream topics plan run.toml --format kafka-topics", group=topics)
@_files_argument
@_run_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "kafka-topics"]),
    default="text",
    show_default=True,
    help="A text to send, or the commands of Kafka's own tool.",
)
@json_option
def plan(files: tuple[Path, ...], run_id: str | None, form: str, as_json: bool) -> None:
    """Show what to ask of those who own the brokers: settings, topics, rights.

    No broker is asked. `rftstream doctor` and `topics list` compare later what was done.
    """
    from rftstream.preflight.plan import Purpose
    from rftstream.preflight.plan import plan as plan_run
    from rftstream.queries.state.access import find_named
    from rftstream.queries.state.topics_plan import plan_topics

    if form != "text" and as_json:
        raise click.UsageError("--format kafka-topics prints commands alone; leave out --json")
    path, *layers = run_files(files)
    config, folder = find_named(path, run_id, layers)
    plan_run(config, Purpose.build)
    report = plan_topics(config, folder)
    print_out(report.to_json() if as_json else report.to_commands() if form != "text" else report.to_text())


@command(
    "rftstream topics acls run.toml",
    "rftstream topics acls run.toml --format kafka-acls",
    "rftstream topics acls run.toml --dry-run",
    "rftstream topics acls run.toml --apply --user-prefix team-a- --user reader=grafana",
    group=topics,
)
@_files_argument
@_run_option
@click.option(
    "--user-prefix",
    metavar="TEXT",
    help="Before the role, in the name of its user. Default: as transport.options.sasl_plain_username says with "
    "{role}, else rft-.",
)
@click.option(
    "--user",
    "users",
    multiple=True,
    metavar="ROLE=NAME",
    help="The user of one role, e.g. the name in its certificate; may be given several times.",
)
@click.option("--apply", "applies", is_flag=True, help="Set on the brokers what is missing, and show it.")
@click.option("--dry-run", is_flag=True, help="Only show how the brokers differ; exit 1 if something is missing.")
@click.option("--prune", is_flag=True, help="With --apply: also remove what no user of this run needs.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "kafka-acls"]),
    default="text",
    show_default=True,
    help="A table, or the commands of Kafka's own tool.",
)
@json_option
def acls(
    files: tuple[Path, ...],
    run_id: str | None,
    user_prefix: str | None,
    users: tuple[str, ...],
    applies: bool,
    dry_run: bool,
    prune: bool,
    form: str,
    as_json: bool,
) -> None:
    """Show the rights that each role needs on Kafka, or set them.

    Each role may read and write the topics that its declaration names. The user `operator` makes and deletes runs and
    sends them requests. The user `reader` only reads. Without --apply or --dry-run no broker is asked. Brokers are
    asked as the user `admin`, which needs Describe and Alter on the cluster.
    """
    from rftstream.preflight.plan import Purpose, plan
    from rftstream.queries.state.access import apply_access, compare_access, find_named, needed_access

    if prune and not (applies or dry_run):
        raise click.UsageError("--prune removes rights; give --apply with it")
    if applies and dry_run:
        raise click.UsageError("--apply sets rights and --dry-run does not; give one of them")
    if form != "text" and (as_json or applies or dry_run):
        raise click.UsageError("--format kafka-acls prints commands alone; leave out --json, --apply and --dry-run")
    named = dict(user.partition("=")[::2] for user in users)
    if wrong := [user for user in users if not user.partition("=")[2]]:
        raise click.UsageError(f"--user {wrong[0]}: expected ROLE=NAME, e.g. reader=grafana")
    path, *layers = run_files(files)
    config, folder = find_named(path, run_id, layers)
    plan(config, Purpose.build)
    report = needed_access(config, folder, prefix=user_prefix, named=named)
    difference = None
    if dry_run:
        difference = compare_access(report, config, folder)
    elif applies:
        difference = apply_access(report, config, folder, prune=prune)
    if as_json:
        print_out(report.to_json() if difference is None else {**report.to_json(), **difference.to_json()})
    elif difference is not None:
        print_out("\n".join([f"rights on {folder.run_id} at {config.transport.servers}", *difference.to_lines()]))
    else:
        print_out(report.to_commands() if form == "kafka-acls" else report.to_text())
    sys.exit(0 if difference is None or difference.fine else 1)
