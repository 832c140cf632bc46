"""The commands `explain`, `schema` and `init`: what a run file may contain, and a first one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from rftstream.commands.options import at_work, columns_option, command, json_option, say
from rftstream.commands.param_types import (
    AnyPath,
    complete_algorithm,
    complete_environment,
    complete_key,
    complete_reward,
)
from rftstream.errors import ConfigError

WIDTH = 110
"""Most columns that are used in a wide terminal."""


@command(
    "rftstream explain trainer.lr",
    "rftstream explain algorithms.grpo",
    "rftstream explain OOM",
    "rftstream explain 'reward hacking'",
    "rftstream explain trainer --json | jq -r '.[].settings[].key'",
)
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=complete_key)
@click.option("--all", "is_all", is_flag=True, help="List all settings that are found.  [default: the first ten]")
@json_option
def explain(keys: tuple[str, ...], is_all: bool, as_json: bool) -> None:
    """Explain a setting, a section or a part, or list the settings for a theme or some words, such as OOM.

    KEY is a setting (trainer.lr), a section (trainer, tasksets.NAME), a part (algorithms.grpo, or grpo), a setting of a
    part (algorithms.grpo.clip_low), a kind of parts (algorithms), another tool's name of a setting (num_generations),
    or a theme (OOM, gpu, resume, speed, dead): then the settings that matter, with a line each. A question about a run
    ("why was a group dropped") is answered by the command that knows. Other words ("reward hacking") list the settings
    that mention them. Part names may be `module:Class` of your own. Without KEY: the sections of a run file, the parts
    and the themes.
    """
    from rftstream.commands.views import print_out
    from rftstream.integrations.foreign_configs import left_out, metric_here
    from rftstream.queries.reference import explain as asked
    from rftstream.queries.reference import questions

    if not keys:
        print_out(asked.sections_to_json() if as_json else asked.sections_to_text())
        return
    if os.getcwd() not in sys.path:  # the user's own modules are here
        sys.path.append(os.getcwd())
    found: list[asked.Explained] = []
    left: list[str] = []
    unknown: list[ConfigError] = []
    for key in questions.whole(keys):
        if (metric := metric_here(key)) is not None:
            left.append(metric)
            continue
        said, meant = left_out(key) or questions.answer(key), []
        try:
            meant = asked.explain(key)
        except ConfigError as error:
            if said is None:
                unknown.append(error)
                continue
        if said is not None and all(one.found_by for one in meant):
            left.append(said)
        else:
            found += meant
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    if as_json and (found or left):
        print_out([*asked.to_json(found), *({"meaning": said} for said in left)])
    elif found or left:
        texts = [asked.to_text(found, width, None if is_all else asked.MOST_LISTED)] if found else []
        print_out("\n\n".join([*texts, *left]))
    for one in unknown[:-1]:
        say(f"rftstream: {one}")
    if unknown:
        raise unknown[-1]


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


# ------------------------------------------------------------------------ `init`: a first run file, from a few answers


@command(
    "rftstream init",
    "rftstream init sums --no-ask && rftstream run sums/rftstream.toml",
    "rftstream init mine --tasks train.jsonl --model models/SmolLM2-135M-Instruct --reward math",
    "rftstream init mine --tasks train.jsonl --column prompt=text --reward my_rewards:score --kafka broker:9092",
)
@click.argument("folder", metavar="[DIR]", type=AnyPath(file_okay=False), default=Path())
@click.option("--name", metavar="NAME", help="Name of the run.  [default: the folder's]")
@click.option(
    "--tasks",
    metavar="TASKS",
    help="A file of JSON lines, CSV or Parquet, a folder of a data set, or a source like arithmetic or "
    "reasoning_gym:chain_sum.  [default: a sample is written]",
)
@columns_option("What prompt or answer is called in the file, if it is nothing usual; may be given several times.")
@click.option("--model", metavar="MODEL", help="made, a model folder, or a name on the hub.  [default: made]")
@click.option(
    "--environment",
    metavar="NAME",
    shell_complete=complete_environment,
    help="Of several turns: a built-in one, module:Class or module.py:Class.  [default: one turn]",
)
@click.option(
    "--reward",
    metavar="REWARD",
    shell_complete=complete_reward,
    help="A built-in reward, or module:function.  [default: the environment's, or as the answers are]",
)
@click.option("--algorithm", metavar="NAME", shell_complete=complete_algorithm, help="[default: grpo]")
@click.option("--kafka", metavar="SERVERS", help="host:port of brokers.  [default: the log is a file]")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Batches.  [default: 250; with a model, 100]")
@click.option("--device", metavar="DEVICE", help="cpu, cuda:0, ...  [default: what the machine has]")
@click.option(
    "--held-out",
    type=click.FloatRange(0, 0.5),
    metavar="SHARE",
    help="Share of the problems for the evaluation.  [default: 0.1, at most 100 problems]",
)
@click.option(
    "--answer-format",
    type=click.Choice(("any", "boxed", "hashes")),
    help="How the model is asked to end its answer: as it likes, in \\boxed{}, after ####.  [default: any]",
)
@click.option("--ask/--no-ask", default=None, help="Ask for what is not given.  [default: on a terminal]")
@json_option
def init(
    folder: Path,
    name: str | None,
    tasks: str | None,
    columns: tuple[str, ...],
    model: str | None,
    environment: str | None,
    reward: str | None,
    algorithm: str | None,
    kafka: str | None,
    steps: int | None,
    device: str | None,
    held_out: float | None,
    answer_format: str | None,
    ask: bool | None,
    as_json: bool,
) -> None:
    """Write a first run file, which runs as it is.

    DIR gets rftstream.toml, the JSON Schema by which editors explain and check it, and a sample of problems if no TASKS
    are named. On a terminal it asks for missing answers, checks each when it is given, and offers to try the file at
    the end. Elsewhere it takes the defaults: a small new model that learns to add digits in 250 steps (0.01 of them
    right at first, then 0.99). No file is overwritten, and no file is left if the run could not start.
    """
    from rftstream.preflight import first_file
    from rftstream.preflight.first_problems import FirstFile

    if ask is None:
        ask = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
    options = {
        "name": name, "tasks": tasks, "model": model, "reward": reward, "algorithm": algorithm, "servers": kafka,
        "environment": environment, "steps": steps, "device": device, "held_out": held_out,
        "answer_format": answer_format,
    }  # fmt: skip
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    wanted = FirstFile(folder=folder, columns=dict(map(_column, columns)), **given)
    if ask:
        from rftstream.commands.interview import as_command
        from rftstream.commands.interview import ask as asked

        first_file.check_free(wanted)
        wanted = asked(wanted, set(given))
    try:
        with at_work("looking at model, tasks and parts"):
            written = first_file.write(wanted)
    except ConfigError as error:
        if not ask:
            raise
        raise ConfigError(f"{error}\ncorrect it, with your other answers: {as_command(wanted)}") from None
    from rftstream.commands.views import print_out

    print_out(written.to_json() if as_json else written.to_text())
    if ask and _wants_to_try():
        from rftstream.commands.trial import try_

        click.get_current_context().invoke(try_, files=(written.run_file,), num=2)


def _wants_to_try() -> bool:
    """Ask whether to try the file. The end of the input means no, since the file is written by then."""
    try:
        return click.confirm("\ntry two problems with it now? (nothing is trained)", default=True, err=True)
    except click.Abort:
        return False


def _column(text: str) -> tuple[str, str]:
    ours, equals, theirs = text.partition("=")
    if not equals or not ours or not theirs:
        raise ConfigError(f"--column {text}: expected OURS=THEIRS, e.g. --column prompt=question")
    return ours, theirs
