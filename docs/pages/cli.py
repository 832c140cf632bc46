"""docs/cli.md: every command with its arguments and options, from click."""

from __future__ import annotations

import click

from pages.markdown import table
from rftstream.commands import COMMANDS, cli


def commands() -> str:
    with click.Context(cli, info_name="rftstream") as context:
        return "\n\n".join(_command(name, context) for name in COMMANDS)


def _command(name: str, parent: click.Context) -> str:
    command = cli.get_command(parent, name)
    assert command is not None
    with click.Context(command, info_name=name, parent=parent) as context:
        usage = " ".join(["rftstream", name, *command.collect_usage_pieces(context)])
        paragraphs = [" ".join(one.split()) for one in (command.help or "").split("\n\n")]
        rows = [_option(one, context) for one in command.params if isinstance(one, click.Option) and not one.hidden]
        text = f"## rftstream {name}\n\n```\n{usage}\n```\n\n" + "\n\n".join(paragraphs)
        text += f"\n\n{table(('option', 'meaning'), rows)}"
        examples = [line.strip() for line in (command.epilog or "").splitlines()[2:]]
        return text + ("\n\n```sh\n" + "\n".join(examples) + "\n```" if examples else "")


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    names = ", ".join(f"`{one}`" for one in option.opts)
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    said = " ".join((option.help or "").split())
    said += "" if not option.required else " Required."
    if option.show_default and option.default is not None:
        said += f" [default: {option.default}]"
    return f"{names}{value}".replace("`,", "`, ").replace("  ", " "), said.strip()
