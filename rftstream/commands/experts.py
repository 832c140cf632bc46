"""The commands `experts` load demonstrations and preference pairs for a run to learn from."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from rftstream.commands.options import (
    column_pairs,
    columns_option,
    command,
    from_option,
    group,
    json_option,
    run_argument,
    say,
)
from rftstream.commands.views import opened_run, print_out


@group(
    "rftstream experts load examples/runs/mix --from demonstrations.jsonl",
    "rftstream experts load runs/dpo --from hf:data/pairs --dry-run",
)
def experts() -> None:
    """Load demonstrations and preference pairs, for the algorithms mix, chord, sft, dpo and reward_model.

    A run file names them by `experts.source`. This command adds more of them to an existing run.
    """


@command(
    "rftstream experts load examples/runs/mix --from demonstrations.jsonl",
    "rftstream experts load runs/a --from chats.parquet --column messages=conversation --json",
    "rftstream experts load runs/dpo --from hf:data/pairs --dry-run",
    group=experts,
)
@run_argument
@from_option(
    "JSON lines, JSON, CSV, Parquet, a folder of a Hugging Face dataset, hf:NAME of one on the hub, or run:RUN."
)
@columns_option("Which column is what: messages, prompt, completion, chosen, rejected, system, tools, weight.")
@click.option("--system", metavar="TEXT", help="System prompt put in front, where there is none.")
@click.option("--split", help="Of a Hugging Face dataset; default: train.")
@click.option("--subset", help="Of a Hugging Face dataset that has several.")
@click.option("--skip-too-long", is_flag=True, help="Leave out what is longer than the context.")
@click.option("--dry-run", is_flag=True, help="Look at everything, write nothing.")
@json_option
def load(
    run: Path,
    source: str,
    columns: tuple[str, ...],
    system: str | None,
    split: str | None,
    subset: str | None,
    skip_too_long: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Load demonstrations or preference pairs into a run, live or not, each once however often it is loaded.

    A row is a chat (`messages`, or `conversations`), `prompt` and `completion`, or `prompt`, `chosen` and `rejected`.
    Every row is first rendered with the run's template. An error names the line, and then nothing is written. Passes
    that begin from now on include the new rows.
    """
    from rftstream.config.loader import demonstrations_source
    from rftstream.config.sections import DemonstrationsSection
    from rftstream.preflight.plan import Purpose, plan
    from rftstream.queries.datasets.taking import take_rollouts
    from rftstream.runs.writes.load_demonstrations import load_demonstrations

    options = {name: value for name, value in (("split", split), ("subset", subset)) if value is not None}
    section = DemonstrationsSection(
        source=demonstrations_source(source, Path()),
        columns=column_pairs(columns, "messages=conversation"),
        system=system,
        options=options,
        too_long="skip" if skip_too_long else "error",
    )

    with opened_run(run) as opened, tempfile.TemporaryDirectory() as scratch:
        plan(opened.config, Purpose.join)
        datasets = Path(scratch) if dry_run else opened.folder.demonstrations
        take_rollouts(opened.config, section, datasets, is_recorded=not dry_run)
        loaded = load_demonstrations(
            opened.transport, opened.config, opened.folder, section, say=say, dry_run=dry_run, datasets=datasets
        )
    print_out(loaded.to_json() if as_json else loaded.to_text())
