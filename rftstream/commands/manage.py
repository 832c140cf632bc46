"""The commands `delete` and `doctor`: delete a run, and check that a machine is fit for one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from rftstream.commands.options import (
    at_work,
    command,
    files_argument,
    json_option,
    load_run_file,
    run_argument,
    set_option,
)

if TYPE_CHECKING:
    from rftstream.runs.delete import Deletion

PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
"""Settings of pip, which else speaks of itself."""


@command("rftstream delete examples/runs/arithmetic", "rftstream delete examples/runs/arithmetic-2 --yes")
@run_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@json_option
def delete(run: Path, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Remove a run: log or topics and consumer groups, weights and checkpoints, run folder.

    The command shows what would be deleted and asks. It refuses while somebody works on the run. It deletes only what a
    run makes: other files in the run folder stay, and no link is followed. RUN is a run folder, or a run file (then its
    newest run).
    """
    from rftstream.commands.views import print_out
    from rftstream.runs.delete import delete_run, plan_deletion

    if as_json and not (yes or dry_run):
        raise click.UsageError("--json asks nothing; give --yes or --dry-run with it")
    plan = plan_deletion(run)
    if not as_json:
        click.echo("\n".join(_deletion_lines(plan)))
    if not (yes or dry_run):
        click.confirm("delete all of this?", abort=True)
    if not dry_run:
        delete_run(plan)
    if as_json:
        print_out({**plan.to_json(), "deleted": not dry_run})
    elif not dry_run:
        click.echo(f"{plan.folder.run_id}: deleted")


def _deletion_lines(plan: Deletion) -> list[str]:
    from rftstream.queries.formatting import columns, plural, size

    rows = [
        (name, f"a link; what is at {plan.links[name]} stays" if name in plan.links else size(count))
        for name, count in plan.parts.items()
    ]
    lines = [f"{plan.folder.path}: {size(plan.num_bytes)}", *columns(rows, left=1, indent="  ")]
    if plan.servers is not None:
        lines.append(
            f"on Kafka at {plan.servers}: {plural(len(plan.topics), 'topic')} and "
            f"{plural(len(plan.groups), 'consumer group')} of {plan.folder.run_id}"
        )
    if plan.shared_with:
        lines.append(f"stays, for {', '.join(plan.shared_with)} has the same store: what is in {plan.store}")
    elif plan.store is not None:
        lines.append(f"in {plan.store}: {plural(len(plan.objects), 'object')}")
    if plan.kept:
        lines.append(f"stays, for no run makes it: {', '.join(plan.kept)}")
    return lines


@command(
    "rftstream doctor", "rftstream doctor examples/arithmetic.toml --json", "rftstream doctor --install vllm --yes"
)
@files_argument
@set_option
@click.option("--install", "extra", metavar="EXTRA", help="Install an extra here instead: vllm, data, lora, wandb, ...")
@click.option("--yes", is_flag=True, help="With --install: do not ask.")
@json_option
def doctor(files: tuple[Path, ...], sets: tuple[str, ...], extra: str | None, yes: bool, as_json: bool) -> None:
    """Check whether this machine, and everything that a run file names, is ready for a run.

    It checks Python, packages, cores, memory, disk, limits and GPUs; with FILE also the model, the object store, and
    the broker with its version and settings. Each check is ok, a warning, or a problem with advice. Exit 0 without a
    problem, 3 if the broker is a problem, else 1. --install shows the command of pip or uv that brings an extra, asks,
    and runs it; in a checkout it installs from there.
    """
    if extra is not None:
        if files or as_json:
            raise click.UsageError("--install: installs an extra and checks nothing; leave out FILE and --json")
        _install(extra, yes=yes)
    from rftstream.commands.views import print_out

    config = load_run_file(files, sets) if files else None
    with at_work("looking at this machine" if config is None else "looking at this machine and what the file names"):
        from rftstream.preflight.doctor import examine

        report = examine(config)
    print_out(report.to_json() if as_json else report.to_text())
    sys.exit(report.exit_code)


def _install(extra: str, *, yes: bool) -> NoReturn:
    from rftstream.preflight.installing import install_command

    words = install_command(extra)
    if words is None:
        click.echo(f"{extra} is part of rftstream: nothing is missing")
        sys.exit(0)
    click.echo(shlex.join(words), err=True)
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("--install: nobody is there to be asked; add --yes")
    if not yes:
        click.confirm("run it?", default=True, abort=True, err=True)
    with at_work(f"installing {extra}"):
        code = subprocess.run([*words, "--quiet"], check=False, env={**os.environ, **PIP}).returncode
    if code == 0:
        click.echo(f"{extra} is installed")
    sys.exit(code)
