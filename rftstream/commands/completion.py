"""The command `completion` prints the script by which a shell completes commands, options, and the values in
param_types.py."""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

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

    register()
    script = get_completion_class(shell)
    assert script is not None, "Choice has no others"
    click.echo(script(cli, {}, PROGRAM, VARIABLE).source())


# ------- how shells complete: click's classes and scripts, with the changes that `--set section.key=value` needs


_BASH = r"""
%(complete_func)s() {
    local IFS=$'\n'
    local response completion type value

    response=$(env COMP_LINE="${COMP_LINE:0:$COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
%(complete_var)s=bash_complete "$1")

    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            COMPREPLY=()
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            COMPREPLY=()
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
            [[ $value == *[.=] ]] && compopt -o nospace
        fi
    done
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH_ALL = """    if [ -n "$completions_with_descriptions" ]; then
        _describe -V unsorted completions_with_descriptions -U
    fi
"""
_ZSH_OPEN = """    local -a open closed
    open=(${(M)completions_with_descriptions:#*[.=]:*})
    closed=(${completions_with_descriptions:#*[.=]:*})
    if [ -n "$open" ]; then
        _describe -V unsorted open -U -S ''
    fi
    if [ -n "$closed" ]; then
        _describe -V unsorted closed -U
    fi
"""


class WordsKept(ShellComplete):
    """Keeps the words before the one that is completed, since a completion may need them. Click drops arguments that
    stand before an option without its value."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return the proposals. Completions find the earlier words as `ctx.obj`."""
        self.ctx_args: Any = {**self.ctx_args, "obj": list(args)}
        return super().get_completions(args, incomplete)


class BashByLine(WordsKept, BashComplete):
    """Completes for bash from the line as the user typed it."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the word at the cursor."""
        line = os.environ.get("COMP_LINE")
        if line is None:  # the script of an older version
            return super().get_completion_args()
        words = split_arg_string(line)[1:]
        return (words, "") if not words or line[-1:].isspace() else (words[:-1], words[-1])

    def format_completion(self, item: CompletionItem) -> str:
        """Return the item in the form that bash inserts. The text before the last word break is there already."""
        line, breaks = os.environ.get("COMP_LINE"), os.environ.get("COMP_WORDBREAKS", "")
        typed = "" if line is None else self.get_completion_args()[1]
        there = max((typed.rfind(one) + 1 for one in "=:" if one in breaks), default=0)
        return f"{item.type},{item.value[there:] if item.type == 'plain' else item.value}"


class ZshOpen(WordsKept, ZshComplete):
    """Completes for zsh, without a space after a word that continues."""

    source_template = ZshComplete.source_template.replace(_ZSH_ALL, _ZSH_OPEN)


class FishKept(WordsKept, FishComplete):
    """Completes for fish, which by itself puts no space after `.` and `=`."""


def register() -> None:
    """Replace click's own classes with these. Call it before a shell is answered."""
    for shell in (BashByLine, ZshOpen, FishKept):
        add_completion_class(shell)
