"""The commands: a skin over `rftstream.runtime` and what it drives. Nothing heavy is imported before it is needed.

One file per group of commands; to add one, write it there and name it in `COMMANDS`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

import rftstream
from rftstream.errors import RftError

COMMANDS = {
    "run": "rftstream.cli.run:run",
    "worker": "rftstream.cli.run:worker",
    "resume": "rftstream.cli.run:resume",
    "pause": "rftstream.cli.control:pause",
    "unpause": "rftstream.cli.control:unpause",
    "drain": "rftstream.cli.control:drain",
    "check": "rftstream.cli.views:check",
    "try": "rftstream.cli.trial:try_",
    "status": "rftstream.cli.views:status",
    "audit": "rftstream.cli.views:audit",
    "inspect": "rftstream.cli.views:inspect",
    "trace": "rftstream.cli.trace:trace",
    "experts": "rftstream.cli.experts:experts",
    "evaluate": "rftstream.cli.evaluate:evaluate",
    "dead": "rftstream.cli.dead:dead",
    "weights": "rftstream.cli.weights:weights",
    "rescore": "rftstream.cli.rescore:rescore",
    "plot": "rftstream.cli.views:plot",
    "replay": "rftstream.cli.replay:replay",
    "list": "rftstream.cli.views:list_",
    "topics": "rftstream.cli.manage:topics",
    "doctor": "rftstream.cli.manage:doctor",
    "delete": "rftstream.cli.manage:delete",
    "convert": "rftstream.cli.convert:convert",
    "completion": "rftstream.cli.completion:completion",
}
"""Command -> where it is, in the order of the help."""


class Commands(click.Group):
    """Imports a command when it is asked for, and tells our own errors as one line with their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        command.short_help = (command.help or "").partition("\n")[0]  # click would cut it in a narrow terminal
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; {_suggest(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except BrokenPipeError:
            raise
        except OSError as error:  # of --help and --version, which are written here
            _tell(_about(error))
            sys.exit(RftError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RftError as error:
            if ctx.params.get("debug"):
                raise
            _tell(str(error))
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            raise
        except OSError as error:  # a disk that is full or read-only, a folder without rights
            if ctx.params.get("debug"):
                raise
            _tell(_about(error))
            ctx.exit(RftError.exit_code)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(rftstream.__version__, prog_name="rftstream")
@click.option("--debug", is_flag=True, envvar="RFTSTREAM_DEBUG", help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Reinforcement fine-tuning of language models over a durable log.

    \b
    rftstream run examples/arithmetic.toml     a whole run on this machine
    rftstream audit examples/arithmetic.toml   what became of every rollout
    """


def main(args: Sequence[str] | None = None) -> None:
    """The console script."""
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="rftstream")
    except BrokenPipeError:  # whoever read the output has left
        sys.exit(1)
    finally:
        _give_up_unwritten()


def _give_up_unwritten() -> None:
    """What could not be written stays in a buffer, and the interpreter would complain of it when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody can be told, but the exit code says it
        click.echo(f"rftstream: {text}", err=True)


def _about(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename is not None else ""
    return f"{place}{error.strerror or error}; the system refused, `rftstream --debug ...` shows where"


def _suggest(name: str) -> str:
    from rftstream.plugins import suggest

    return suggest(name, list(COMMANDS))
