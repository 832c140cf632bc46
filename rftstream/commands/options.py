"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rftstream.commands.param_types import RunFile, RunPath, complete_assignment
from rftstream.errors import ConfigError, RftError

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig
    from rftstream.contracts.role_names import RoleName
    from rftstream.launch.result import RunResult

DEFAULT_FILE = "rftstream.toml"
TOLD_EVERY_S = 10.0
"""Seconds between two lines about long work, where there is no terminal."""

files_argument = click.argument("files", metavar="[FILE]...", nargs=-1, type=RunFile(), envvar="RFTSTREAM_CONFIG")
run_argument = click.argument("run", metavar="RUN", type=RunPath())


def given_run(ctx: click.Context, _: click.Parameter, run: Any) -> Any:
    """Return RUN as given, or ./rftstream.toml."""
    if run or ctx.resilient_parsing:
        return run
    if Path(DEFAULT_FILE).is_file():
        return (Path(DEFAULT_FILE),) if isinstance(run, tuple) else Path(DEFAULT_FILE)
    raise click.UsageError(f"Missing argument 'RUN': a run folder or run file; there is no ./{DEFAULT_FILE}.")


run_here_argument = click.argument("run", metavar="[RUN]", required=False, type=RunPath(), callback=given_run)
"""RUN of commands that look at a run or go on with it."""
layers_argument = click.argument("layers", metavar="[FILE]...", nargs=-1, type=RunFile())
set_option = click.option(
    "--set",
    "sets",
    metavar="SECTION.KEY=VALUE",
    multiple=True,
    help="Change a setting, or take it away by KEY=unset; may be given several times.",
    shell_complete=complete_assignment,
)
progress_option = click.option(
    "--progress",
    type=click.Choice(["auto", "live", "plain", "none"]),
    default="auto",
    show_default=True,
    help="A live view, plain lines, or nothing; auto looks whether there is a terminal.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
no_index_option = click.option(
    "--no-index", is_flag=True, help="Read the log alone, and keep nothing of what was read."
)


def command(
    *examples: str, group: click.Group | None = None, name: str | None = None
) -> Callable[[Any], click.Command]:
    """Make the function below a command, with examples at the end of its help. With `group`, the command joins that
    group."""

    def decorate(function: Any) -> click.Command:
        make = click.command if group is None else group.command
        made = make(name, cls=RunCommand, epilog=_epilog(examples))(function)
        assert isinstance(made, click.Command)
        return made

    return decorate


class RunCommand(click.Command):
    """A command whose errors name the run that it was given, where they propose a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and say how to name several run files where one RUN is expected."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" in error.message and ".toml" in error.message:
                told = f"{error.message.rstrip('.')}; several files of a run are one RUN: first.toml,second.toml"
                raise click.UsageError(told, ctx) from None
            if "unexpected extra argument" in error.message and any("--to" in one.opts for one in self.params):
                told = f"{error.message.rstrip('.')}; a folder to write to is --to FOLDER"
                raise click.UsageError(told, ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RftError as error:
            error.args = tuple(of_this_run(one, ctx) if isinstance(one, str) else one for one in error.args)
            raise


def of_this_run(text: str, context: click.Context | None) -> str:
    """Return a text whose commands name the run that a command was given, where they say RUN."""
    from rftstream.queries.formatting import run_named

    run = None if context is None else context.params.get("run")
    layers = () if context is None else context.params.get("layers") or ()
    return text if run is None else run_named(text, ",".join(map(str, [run, *layers])) if layers else run)


def group(*examples: str) -> Callable[[Any], click.Group]:
    """Make the function below a group of commands, with examples at the end of its help."""
    return click.group(cls=CommandGroup, epilog=_epilog(examples))


class CommandGroup(click.Group):
    """A group that says which command lists, if a run is named where a command is expected."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if "list" in self.commands and args[0] not in self.commands and not args[0].startswith("-"):
            known = ", ".join(sorted(self.commands))
            ctx.fail(f"No such command {args[0]!r}; expected {known}: `{ctx.command_path} list {args[0]}` lists.")
        return super().resolve_command(ctx, args)


def _epilog(examples: Sequence[str]) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)


def from_option(help_: str, kind: Any = None) -> Callable[[Any], Any]:
    """Return the option that names the data to load."""
    return click.option("--from", "source", required=True, type=kind, metavar="FILE", help=help_)


def columns_option(help_: str) -> Callable[[Any], Any]:
    """Return the option that maps our column names to the columns of the data."""
    return click.option("--column", "columns", multiple=True, metavar="OURS=THEIRS", help=help_)


def run_files(files: Sequence[Path]) -> tuple[Path, ...]:
    """Return FILE as given (or by $RFTSTREAM_CONFIG, which click reads), else ./rftstream.toml."""
    if files:
        return tuple(files)
    if Path(DEFAULT_FILE).is_file():
        return (Path(DEFAULT_FILE),)
    here = sorted(path.name for path in Path().glob("*.toml") if path.name != "pyproject.toml")
    here = here or sorted(map(str, Path().glob(f"*/{DEFAULT_FILE}")))
    way = f"name one, {', '.join(here[:3])} here" if here else "`rftstream init` writes a first one"
    raise ConfigError(f"no run file: none given, RFTSTREAM_CONFIG is not set and there is no ./{DEFAULT_FILE}; {way}")


def load_run_file(files: Sequence[Path], sets: Sequence[str] = ()) -> RunConfig:
    """Return the resolved config of the files, the environment and --set."""
    from rftstream.config import loader

    return loader.load(run_files(files), sets=sets)


def can_dim() -> bool:
    """Return whether stdout is a terminal that shows dim text. NO_COLOR asks for plain text."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


@contextmanager
def at_work(what: str, *, lines: bool = False, at_intervals: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on a terminal which work takes time inside the block. Yield a function that names the next phase of it.
    Elsewhere the phase becomes a line on stderr: with `lines` when it begins, with `at_intervals` every TOLD_EVERY_S
    seconds, by a thread, so not round work that forks. What a user's own code prints meanwhile goes to stderr, since
    scripts read stdout."""
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            with _told_at_intervals(what) if at_intervals else nullcontext(lambda phase: None) as note:
                yield (lambda phase: say(f"{phase} ...")) if lines else note
            return
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ...") as status:
            yield lambda phase: status.update(f"{phase} ...")


@contextmanager
def _told_at_intervals(what: str) -> Iterator[Callable[[str], None]]:
    """Print the newest phase at intervals during the block. Yield a function that names it."""
    phases, ended = deque([what], maxlen=1), threading.Event()

    def tell() -> None:
        while not ended.wait(TOLD_EVERY_S):
            say(f"{phases[-1]} ...")

    teller = threading.Thread(target=tell, name="tell", daemon=True)
    teller.start()
    try:
        yield phases.append
    finally:
        ended.set()
        teller.join()


def column_pairs(pairs: tuple[str, ...], example: str) -> dict[str, str]:
    """Return the pairs of the options `--column OURS=THEIRS`. UsageError, with an example, for another form."""
    found = dict(pair.partition("=")[::2] for pair in pairs)
    if wrong := [pair for pair in pairs if not pair.partition("=")[2]]:
        raise click.UsageError(f"--column {wrong[0]}: expected OURS=THEIRS, e.g. {example}")
    return found


def planned_parts(config: RunConfig, role: RoleName) -> RunConfig:
    """Return the config with the parts of a role ready to be built in this process, and say which modules of the user
    hide others."""
    from rftstream.preflight.plan import Purpose, plan

    planned = plan(config, Purpose.build, role=role)
    for note in planned.notes:
        say(note)
    return planned.config


def say(text: str) -> None:
    """Print progress to stderr, apart from the output that scripts read."""
    click.echo(text, err=True)


def finish(result: RunResult, said: Mapping[str, Any] | None = None, text: str | None = None) -> NoReturn:
    """Print how a run ended, and exit with its exit code. With `said` the output is JSON, else text."""
    click.echo(json.dumps({**said, **result.to_dict()}) if said is not None else text or result.summary())
    if result.error:
        from rftstream.queries.formatting import run_named
        from rftstream.runs.folder import shown_path

        say(f"rftstream: {run_named(result.error, shown_path(result.run_dir))}")
    sys.exit(result.exit_code)
