"""`rescore`: yesterday's rollouts under another reward."""

from __future__ import annotations

from pathlib import Path

import click

from rftstream.commands.options import can_dim, command, json_option, run_argument, say, set_option
from rftstream.commands.param_types import AnyPath
from rftstream.commands.views import opened_run, print_out


@command(
    "rftstream rescore examples/runs/arithmetic --reward my_rewards:score --set trainer.algorithm=topr "
    "--into examples/runs/arithmetic-rescored",
    "rftstream rescore runs/a --reward math --set verifier.processes=8 --into runs/b --json",
    "rftstream rescore runs/a --reward feedback --into runs/judged",
    "rftstream resume examples/runs/arithmetic-rescored",
)
@run_argument
@click.option(
    "--reward",
    required=True,
    metavar="NAME",
    help="For all tasksets: a built-in one, module:function, or `feedback`: people's.",
)
@click.option("--into", required=True, type=AnyPath(file_okay=False), metavar="NEWRUN", help="Folder of the new run.")
@set_option
@json_option
def rescore(run: Path, reward: str, into: Path, sets: tuple[str, ...], as_json: bool) -> None:
    """Score the rollouts of a run again, with another reward, into a new run; compare old and new verdicts.

    The run itself is only read. Tasks and rollouts are copied with their ids, and verifiers score them; what was
    pending is skipped. `rftstream resume NEWRUN` then trains from the rescored data alone, from the model that the run
    began with, without explorers and without the staleness check. Interrupted, the same command goes on.

    With --reward feedback nothing is scored: rollouts that people have judged get their reward (as [feedback] says),
    all others keep the verdict that they have.
    """
    from rftstream.launch.sessions.rescore import rescore as score
    from rftstream.queries.decisions.comparison import compare
    from rftstream.queries.records.shown_completions import open_reader

    with opened_run(run) as source:
        new = score(source, into, reward=reward, sets=sets, say=say)
        try:
            comparison = compare(
                source.transport, new.transport, reader=open_reader(source, dims=can_dim() and not as_json)
            )
        finally:
            new.transport.close()
    if as_json:
        print_out({"run_dir": str(new.folder.path), **comparison.to_json()})
    else:
        print_out(f"{comparison.to_text()}\n\ntrain from it with: rftstream resume {into}")
