"""The command `export`: rollouts of a run as a data set for other programs, or for the next run."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from rftstream.commands.options import command, json_option, run_argument
from rftstream.commands.param_types import AnyPath
from rftstream.commands.views import print_out
from rftstream.errors import ConfigError


@command(
    "rftstream export runs/gsm8k data/good --reward-from 0.9 --best 1",
    "rftstream export runs/gsm8k data/pairs --as pairs --margin 0.5",
    "rftstream export runs/agent data/trajectories --as atif --tag keep",
    "rftstream export runs/gsm8k data/once-more --again data/good",
    "rftstream run sft.toml --set experts.source=run:runs/gsm8k",
)
@run_argument
@click.argument("folder", metavar="FOLDER", type=AnyPath(file_okay=False))
@click.option(
    "--as",
    "form",
    type=click.Choice(["sft", "pairs", "openai", "atif", "parquet"]),
    help="Chats (default), best and worst of a group, OpenAI's messages, Harbor's trajectories, or all with tokens.",
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
@click.option(
    "--scorer",
    default="",
    metavar="VERSION",
    help="Only what this version of the reward scored, or people judged: newest, or the beginning of its digest.",
)
@click.option("--best", type=click.IntRange(1), metavar="N", help="Only the N best of each group.")
@click.option("--margin", type=float, metavar="R", help="Least distance of the two rewards of a pair.")
@click.option("--again", metavar="DIGEST", help="The same data set as before: its digest, or its folder.")
@json_option
def export(run: Path, folder: Path, again: str | None, as_json: bool, **conditions: Any) -> None:
    """Write rollouts as a data set: a folder that `datasets.load_dataset` opens, with a card.

    Rows that teach the same are written once. Each row names its rollout, versions, reward and scorer. The folder
    appears when all of it is written. The run's log keeps who took which rollouts, and the digest of the rows, by which
    `trace` and --again know them. RUN is a run folder, or a run file (then its newest run), live or over.
    """
    from rftstream.queries.catalog.run_index import RunIndex
    from rftstream.queries.datasets.choosing import Conditions, export_again, export_rollouts
    from rftstream.runs.folder import open_run

    is_terminal = sys.stderr.isatty()

    def tell(done: int, total: int) -> None:
        if is_terminal:
            click.echo(f"\r{done:,} of {total:,} rollouts", err=True, nl=done == total)

    chosen = {name: value for name, value in conditions.items() if value not in (None, "")}
    with closing(RunIndex(open_run(run))) as index:
        if again is None:
            found = export_rollouts(index, Conditions.of(chosen, where="export"), folder, tell=tell)
        elif chosen:
            raise ConfigError(f"export: got --again and conditions ({', '.join(chosen)}), expected one of them")
        else:
            found = export_again(index, again, folder, tell=tell)
    print_out(found.to_json() if as_json else found.to_text())
