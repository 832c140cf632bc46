"""The command `export`: rollouts of a run as a data set for other programs, or for the next run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from rftstream.commands.options import command, json_option, run_argument
from rftstream.commands.param_types import AnyPath
from rftstream.commands.views import print_out


@command(
    "rftstream export runs/gsm8k data/good --reward-from 0.9 --best 1",
    "rftstream export runs/gsm8k data/pairs --as pairs --margin 0.5",
    "rftstream export runs/agent data/trajectories --as atif --tag keep",
    "rftstream run sft.toml --set experts.source=data/good/data/train-00000.jsonl",
)
@run_argument
@click.argument("folder", metavar="FOLDER", type=AnyPath(file_okay=False))
@click.option(
    "--as",
    "form",
    type=click.Choice(["sft", "pairs", "openai", "atif", "parquet"]),
    default="sft",
    show_default=True,
    help="Chats; best and worst of a group; OpenAI's messages; Harbor's trajectories; or all with tokens.",
)
@click.option("--reward-from", type=float, metavar="R", help="Least reward.")
@click.option("--reward-to", type=float, metavar="R", help="Greatest reward.")
@click.option("--version-from", type=float, metavar="N", help="Oldest version that sampled the first token.")
@click.option("--version-to", type=float, metavar="N", help="Newest version that sampled the first token.")
@click.option("--taskset", default="", help="Only this taskset.")
@click.option("--batch", type=int, metavar="N", help="Only the rollouts of a batch.")
@click.option("--fate", default="", help="trained, pending, expired, filtered or dead.")
@click.option("--status", default="", help="How sampling ended, e.g. completed.")
@click.option("--tool", default="", help="Only rollouts that called this tool; any: some tool.")
@click.option("--text", default="", help="Text that the completion has.")
@click.option("--tag", default="", help="Only rollouts, or groups, that somebody tagged so in the studio.")
@click.option("--best", type=click.IntRange(1), metavar="N", help="Only the N best of each group.")
@click.option("--margin", type=float, default=0.0, help="Least distance of the two rewards of a pair.")
@json_option
def export(run: Path, folder: Path, form: str, as_json: bool, **conditions: Any) -> None:
    """Write rollouts as a data set: a folder that `datasets.load_dataset` opens, with a card.

    Rows that teach the same are written once. Each row names its rollout, versions, reward and scorer. The folder
    appears when all of it is written. RUN is a run folder, or a run file (then its newest run), live or over.
    """
    from rftstream.api.run import open_run

    chosen = {name: conditions.pop(name) for name in ("best", "margin", "tag")}
    is_terminal = sys.stderr.isatty()

    def tell(done: int, total: int) -> None:
        if is_terminal:
            click.echo(f"\r{done:,} of {total:,} rollouts", err=True, nl=done == total)

    with open_run(run) as opened:
        found = opened.rollouts(**conditions).export(folder, form, tell=tell, **chosen)
    print_out(found.to_json() if as_json else found.to_text())
