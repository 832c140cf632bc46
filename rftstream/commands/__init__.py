"""The commands of `rftstream`. They parse arguments, call the other packages and print. Nothing heavy is imported
before it is needed.

Each group of commands has one file. To add a command, write it there and name it in `COMMANDS`.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from rftstream.errors import RftError
from rftstream.version import __version__

GROUPS: dict[str, dict[str, str]] = {
    "First": {
        "demo": "rftstream.commands.demo:demo",
    },
    "The run file": {
        "init": "rftstream.commands.run_file:init",
        "convert-config": "rftstream.commands.convert_config:convert",
        "check": "rftstream.commands.views:check",
        "try": "rftstream.commands.trial:try_",
        "explain": "rftstream.commands.run_file:explain",
        "schema": "rftstream.commands.run_file:schema",
        "list": "rftstream.commands.views:list_",
    },
    "Before a run": {
        "doctor": "rftstream.commands.manage:doctor",
        "convert": "rftstream.commands.convert:convert",
        "sandbox": "rftstream.commands.sandbox:sandbox",
    },
    "Data and feedback": {
        "data": "rftstream.commands.data:data",
        "pipeline": "rftstream.commands.pipeline:pipeline",
        "experts": "rftstream.commands.experts:experts",
        "problems": "rftstream.commands.problems:problems",
        "feedback": "rftstream.commands.feedback:feedback",
    },
    "A run": {
        "run": "rftstream.commands.run:run",
        "resume": "rftstream.commands.run:resume",
        "pause": "rftstream.commands.control:pause",
        "unpause": "rftstream.commands.control:unpause",
        "drain": "rftstream.commands.control:drain",
        "token": "rftstream.commands.control:token",
        "logs": "rftstream.commands.logs:logs",
    },
    "On several machines": {
        "worker": "rftstream.commands.run:worker",
        "workers": "rftstream.commands.run:workers",
        "launch": "rftstream.commands.launch:launch",
        "scale-plan": "rftstream.commands.exporter:scale_plan",
        "exporter": "rftstream.commands.exporter:exporter",
        "traces": "rftstream.commands.trace:traces",
    },
    "Look at a run": {
        "status": "rftstream.commands.views:status",
        "plot": "rftstream.commands.views:plot",
        "studio": "rftstream.commands.studio:studio",
        "audit": "rftstream.commands.views:audit",
        "inspect": "rftstream.commands.views:inspect",
        "trace": "rftstream.commands.trace:trace",
        "dead": "rftstream.commands.dead:dead",
    },
    "Results": {
        "evaluate": "rftstream.commands.evaluate:evaluate",
        "weights": "rftstream.commands.weights:weights",
        "export": "rftstream.commands.export:export",
        "replay": "rftstream.commands.replay:replay",
        "rescore": "rftstream.commands.replay:rescore",
        "diff": "rftstream.commands.views:diff",
    },
    "Upkeep": {
        "topics": "rftstream.commands.topics:topics",
        "delete": "rftstream.commands.manage:delete",
        "completion": "rftstream.commands.completion:completion",
    },
}
"""The groups of the help, in order: title -> command -> where the command is."""

COMMANDS = {name: where for commands in GROUPS.values() for name, where in commands.items()}

VARIABLE = "_RFTSTREAM_COMPLETE"
"""click's environment variable. The script of `completion` sets it, and `main` then answers instead of running a
command."""

_END_SOMETHING = {"drain": ", which ends the run in order", "delete": ", which removes a run"}
"""Command that ends something -> a few words on what it does, shown when the command is proposed. Such a command is
proposed for a misspelt name only if hardly any other command can be meant."""


_START_WORKERS = ("run", "resume", "worker", "workers")


class Commands(click.Group):
    """The group of all commands. It imports a command on its first use, and prints our own errors as one line with
    their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or return None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        command.short_help = (command.help or "").partition("\n")[0]  # click would shorten it in a narrow terminal
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help, by their groups."""
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            rows = [
                (name.ljust(width), command.get_short_help_str(limit=formatter.width))
                for name in commands
                if (command := self.get_command(ctx, name)) is not None
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. UsageError, which proposes another name, if there is none."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; {_suggest(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Parse the arguments. An error while writing the output is printed as one line."""
        try:
            return super().make_context(*args, **more)
        except BrokenPipeError:
            raise
        except OSError as error:  # --help and --version write their output here
            _tell(_about(error))
            sys.exit(RftError.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Our own errors, and errors of files, are printed as one line, and so is ctrl-C where a
        command has no answer of its own. What starts workers then has none yet, or none any more, and exits with 0."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if ctx.invoked_subcommand in _START_WORKERS:
                _tell(
                    "stopped; nothing is lost: the same command begins anew, or `resume` goes on if workers had begun"
                )
                ctx.exit(0)
            _tell("stopped by ctrl-C")
            ctx.exit(RftError.exit_code)
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
@click.version_option(__version__, prog_name="rftstream")
@click.option("--debug", is_flag=True, envvar="RFTSTREAM_DEBUG", help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Reinforcement fine-tuning of language models over a durable log.

    \b
    rftstream demo                             a tiny model learns to add, in a minute
    rftstream run examples/arithmetic.toml     a whole run on this machine
    rftstream audit examples/arithmetic.toml   what became of every rollout
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the console script."""
    if VARIABLE in os.environ:  # a shell asks for completions
        from rftstream.commands.completion import register

        register()
    try:
        cli.main(args=list(args) if args is not None else None, prog_name="rftstream")
    except BrokenPipeError:  # the reader of the output has closed it
        sys.exit(1)
    finally:
        _give_up_unwritten()


def _give_up_unwritten() -> None:
    """Drop the output that could not be written. Otherwise the interpreter would complain about it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(text: str) -> None:
    with suppress(OSError):  # nobody can read a message, but the exit code reports the error
        click.echo(f"rftstream: {text}", err=True)


def _about(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{place}{error.strerror}; make room on its disk, or raise the limit, and do it again"
    return f"{place}{error.strerror or error}; the system refused, `rftstream --debug ...` shows where"


def _suggest(name: str) -> str:
    """Return the proposal for an unknown command: the command that does this under another name, else the one with the
    nearest spelling."""
    import difflib

    from rftstream.config.aliases import COMMANDS as MEANT

    near = difflib.get_close_matches(name.lower(), COMMANDS, n=3)
    surely = difflib.get_close_matches(name.lower(), _END_SOMETHING, n=1, cutoff=0.9)
    meant = (
        [MEANT[name.lower()]]
        if name.lower() in MEANT
        else surely or [one for one in near if one not in _END_SOMETHING or sorted(one) == sorted(name.lower())]
    )
    where = "`rftstream --help` shows all"
    return f"did you mean {meant[0]!r}{_END_SOMETHING.get(meant[0], '')}? {where}" if meant else where
