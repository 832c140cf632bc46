"""The command `demo`: a first run, without a run file."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path

import click

from rftstream.commands.options import can_dim, command, finish, progress_option, say
from rftstream.commands.param_types import AnyPath


@command("rftstream demo", "rftstream demo --no-open", "rftstream demo --seed 1 --run-dir runs/another")
@click.option("--run-dir", type=AnyPath(), help="Folder of the run.  [default: runs/demo; then runs/demo-2, ...]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Other weights and samples.")
@click.option(
    "--open/--no-open",
    "opens",
    default=None,
    help="Show the run in a browser at the end.  [default: on a terminal of a desktop]",
)
@progress_option
def demo(run_dir: Path | None, seed: int, opens: bool | None, progress: str) -> None:
    """Train a tiny model to add, and show what it answers to sums that it never saw.

    The model is made on the spot, and nothing is downloaded. It needs half a minute on two CPU cores. The run is an
    ordinary one: every command takes its folder. At the end the studio shows it in the browser, until ctrl-C.
    """
    from rftstream.launch.sessions.demo import GOOD_MEAN, demo_config, introduction, learned
    from rftstream.launch.start import run
    from rftstream.runs.folder import shown_path

    config = demo_config(run_dir, seed)
    click.echo(f"{introduction(config)}\n")
    result = run(config, run_dir=run_dir, progress=progress)
    if result.exit_code or result.final is None:
        finish(result)
    click.echo(f"\n{result.summary()}\n")
    table, mean = learned(result.run_dir, dims=can_dim())
    click.echo(table)
    if mean < GOOD_MEAN:
        say(f"\nright: {mean:.0%}, expected {GOOD_MEAN:.0%}; a run of other luck: rftstream demo --seed {seed + 1}")
    folder = shown_path(result.run_dir)
    click.echo(f"\n{_next_steps(folder)}")
    if has_browser() if opens is None else opens:
        _show(result.run_dir)


def _next_steps(folder: str) -> str:
    from rftstream.preflight.installing import program

    called = program()
    rows = [
        (f"{called} studio {folder}", "every rollout of it, in the browser"),
        (f"{called} trace {folder} v90", "what version 90 was trained on"),
        (f"{called} init mine", "a run file for your own problems, reward and model"),
    ]
    width = max(len(text) for text, _ in rows)
    return "\n".join(["What to do next:", *(f"  {text:<{width}}    {why}" for text, why in rows)])


def has_browser() -> bool:
    """Return whether somebody sits at this machine's screen: a terminal, a display, no system of continuous tests."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("CI"):
        return False
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _show(run_dir: Path) -> None:
    """Serve the studio until ctrl-C, and let a browser open it."""
    from rftstream.commands.studio import serve_here

    def ready(url: str) -> None:
        click.echo(f"\nThe studio shows it at {url}; ctrl-C ends the studio, and the run stays.")
        with suppress(webbrowser.Error):
            webbrowser.open(url)

    with suppress(KeyboardInterrupt):  # before the server has begun
        serve_here([run_dir], ready=ready)
