"""`replay`: training what was recorded again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from rftstream.cli.options import examples, json_option

SAY_EVERY_S = 5.0


@examples(
    "rftstream replay examples/runs/arithmetic",
    "rftstream replay examples/runs/arithmetic --from 100 --to 150 --json",
)
@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--from", "first", type=click.IntRange(min=0), default=0, show_default=True, metavar="A",
              help="First version; the checkpoint at or before it is what it begins with.")  # fmt: skip
@click.option("--to", "last", type=click.IntRange(min=0), metavar="B",
              help="Last version.  [default: the newest in force]")  # fmt: skip
@click.option("--device", metavar="DEVICE", help="cpu, cuda:0, ...  [default: what the run trained on]")
@json_option
def replay(run: Path, first: int, last: int | None, device: str | None, as_json: bool) -> None:
    """Train the recorded batches again and compare every recorded digest.

    Says where the first difference is, if there is one: exit 1; all equal: exit 0. On CPU equality is bit for bit,
    with the threads that the run recorded; where it is not promised (other libraries, a GPU) it says why. Reads the
    log and the store, writes nothing. RUN is a run folder, or a run file (then its newest run).
    """
    from rftstream.runtime.host import prepare_process
    from rftstream.runtime.runs import open_run

    opened = open_run(run)
    try:
        prepare_process(opened.config, "trainer")
        from rftstream.replay.again import replay as train_again

        found = train_again(opened, first=first, last=last, device=device, report=_progress())
    finally:
        opened.transport.close()
    click.echo(json.dumps(found.to_json(), allow_nan=False) if as_json else found.to_text())
    sys.exit(0 if found.equal else 1)


def _progress() -> Callable[[int, int, int], None]:
    """A line every few seconds, on stderr."""
    said_at = began = time.monotonic()
    done = 0

    def report(version: int, last: int, different: int) -> None:
        nonlocal said_at, done
        done += 1
        now = time.monotonic()
        if now - said_at >= SAY_EVERY_S:
            said_at = now
            left_s = (now - began) / done * (last - version)
            click.echo(f"version {version} of {last}, {different} differ; {left_s:.0f} s to go", err=True)

    return report
