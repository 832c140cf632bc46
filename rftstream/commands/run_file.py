"""`explain` and `schema`: what a run file may hold, for people and for editors."""

from __future__ import annotations

import os
import shutil
import sys

import click

from rftstream.commands.options import command, json_option
from rftstream.commands.param_types import complete_key

WIDTH = 110
"""Columns that are used of a wide terminal."""


@command(
    "rftstream explain trainer.lr",
    "rftstream explain algorithms.grpo",
    "rftstream explain trainer --json | jq -r '.[].settings[].key'",
)
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=complete_key)
@json_option
def explain(keys: tuple[str, ...], as_json: bool) -> None:
    """Explain a setting, a section or a part: its meaning, its values and its default.

    KEY is a setting (trainer.lr), a section (trainer, tasksets.NAME), a part (algorithms.grpo, or grpo), a setting of a
    part (algorithms.grpo.clip_low), a kind of parts (algorithms), or another tool's name of a setting (learning_rate).
    Part names may be `module:Class` of your own. Without KEY: the sections of a run file and the parts.
    """
    from rftstream.commands.views import print_out
    from rftstream.queries.reference import explain as asked

    if not keys:
        print_out(asked.sections_to_json() if as_json else asked.sections_to_text())
        return
    if os.getcwd() not in sys.path:  # where modules of one's own lie
        sys.path.append(os.getcwd())
    found = [one for key in keys for one in asked.explain(key)]
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    print_out(asked.to_json(found) if as_json else asked.to_text(found, width))


@command(
    "rftstream schema > rftstream.schema.json",
    "(echo '#:schema ./rftstream.schema.json'; cat mine.toml) > described.toml",
)
def schema() -> None:
    """Print the JSON Schema of a run file, for editors.

    An editor with Taplo (Even Better TOML) or Tombi then shows what a setting means, completes keys and names, and
    marks what is wrong. It finds the schema by the first line of the run file: #:schema ./rftstream.schema.json.
    """
    from rftstream.queries.reference.run_file_schema import schema_text

    click.echo(schema_text(), nl=False)
