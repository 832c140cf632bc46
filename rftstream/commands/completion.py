"""`completion`: the script by which a shell completes commands, options, and the words of param_types.py."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rftstream.commands.options import command

PROGRAM = "rftstream"


@command(
    "rftstream completion bash >> ~/.bashrc",
    "rftstream completion zsh >> ~/.zshrc",
    "rftstream completion fish > ~/.config/fish/completions/rftstream.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes your shell complete rftstream's commands.

    Settings and their values behind --set are completed, too, with the tasksets of the run file that is named.
    Put it where the shell reads it at start, as in the examples, and open a new shell; or try it at once:
    eval "$(rftstream completion bash)". It needs bash 4.4 or newer, any zsh with compinit, or fish.
    """
    from rftstream.commands import VARIABLE, cli
    from rftstream.commands.shells import register

    register()
    script = get_completion_class(shell)
    assert script is not None, "Choice has no others"
    click.echo(script(cli, {}, PROGRAM, VARIABLE).source())
