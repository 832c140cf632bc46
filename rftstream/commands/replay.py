"""The commands `replay` and `rescore`: train a run's recorded batches again, or score its rollouts with another
reward."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from rftstream.commands.options import (
    can_dim,
    command,
    finish,
    json_option,
    progress_option,
    run_argument,
    say,
    set_option,
)
from rftstream.commands.param_types import AnyPath, RunFile
from rftstream.commands.views import opened_run, print_out
from rftstream.contracts.role_names import RoleName

if TYPE_CHECKING:
    from rftstream.launch.sessions.replay_into import Replay
    from rftstream.launch.sessions.replay_pipeline import PipelineReplay
    from rftstream.runs.folder import OpenRun

SAY_EVERY_S = 5.0


@command(
    "rftstream replay examples/runs/arithmetic",
    "rftstream replay examples/runs/arithmetic --from 100 --to 150 --json",
    "rftstream replay examples/runs/arithmetic --set trainer.lr=5e-4 --into examples/runs/slower",
    "rftstream replay runs/a --from 200 --algorithm my_losses:Reinforce --into runs/b --dry-run",
    "rftstream replay runs/a --pipeline stricter.toml --into runs/stricter",
    "rftstream replay runs/a --without feedback --into runs/mended",
    "rftstream replay runs/a --pipeline a.toml --scorer newest --algorithm topr --into runs/mended",
)
@run_argument
@click.option(
    "--from",
    "first",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="A",
    help="First version; the checkpoint at or before it is what it begins with.",
)
@click.option(
    "--to", "last", type=click.IntRange(min=0), metavar="B", help="Last version.  [default: the newest in force]"
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda:0, ...  [default: what the run trained on]")
@click.option(
    "--into",
    type=AnyPath(file_okay=False),
    metavar="NEWRUN",
    help="Train into a new run, in this folder, instead of comparing.",
)
@click.option(
    "--pipeline",
    type=RunFile(),
    metavar="FILE",
    help="With --into: decide anew about all recorded groups, with the operators of this file.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="ID",
    help="With --into: leave out this rollout, group or problem (TASKSET/NUMBER); `feedback`: what people judge "
    "otherwise now.",
)
@click.option(
    "--scorer",
    default="",
    metavar="VERSION",
    help="With --into: only what this reward scored: newest, or the beginning of its version.",
)
@click.option("--algorithm", metavar="NAME", help="Of the new run; short for --set trainer.algorithm=NAME.")
@set_option
@click.option("--dry-run", is_flag=True, help="With --into: only show what would be trained.")
@json_option
@progress_option
def replay(
    run: Path,
    first: int,
    last: int | None,
    device: str | None,
    into: Path | None,
    pipeline: Path | None,
    without: tuple[str, ...],
    scorer: str,
    algorithm: str | None,
    sets: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    progress: str,
) -> None:
    """Train the recorded batches again, and compare; or under other settings, into a new run.

    Without --into it compares every recorded digest. Exit 0 if all are equal; else exit 1, and the first difference is
    shown. On a CPU equality is bit for bit, with the number of threads that the run recorded. Where equality is not
    promised (other libraries, a GPU), the command says why. It reads the log and the store, and writes nothing.

    With --into it makes a new run that trains the batches between versions A and B under other settings of training
    (--algorithm, --set). The new run begins with the state that RUN had at A. Nothing is sampled or scored; the groups
    keep their ids. `rftstream resume NEWRUN`, or the same command again, continues the new run.

    With --without the batches are trained without some rollouts: those that are named, or with `--without feedback`
    those whose reward people have changed since they were trained (`rftstream feedback taints` lists them). With
    --scorer they are trained without what another version of the reward scored. A group with fewer than
    buffer.min_siblings rollouts left is left out as a whole. The command lists the affected batches and versions.

    With --pipeline the batches are made anew. The operators of FILE (a run file, or operators alone) and the settings
    of [buffer] decide about every recorded group, and training starts from the model that RUN began with. With --scorer
    whole batches may go, too. At the end the command compares both runs: batches, rewards, and the groups that each
    operator rejected.

    RUN is a run folder, or a run file (then its newest run).
    """
    if algorithm is not None:
        sets = (*sets, f"trainer.algorithm={json.dumps(algorithm)}")
    given = {"--pipeline": pipeline, "--dry-run": dry_run, "--algorithm": algorithm, "--without": without}
    _check_options({**given, "--scorer": scorer, "--set": sets}, into, of_part=first > 0 or last is not None)

    from rftstream.launch.sessions.replay_into import Replay
    from rftstream.launch.sessions.replay_pipeline import PipelineReplay
    from rftstream.preflight.plan import Purpose, plan

    with opened_run(run) as opened:
        opened = replace(opened, config=plan(opened.config, Purpose.join, role=RoleName.trainer).config)
        if into is None:
            _compare(opened, first, last, device, as_json=as_json)
        else:
            if device is not None:
                sets = (*sets, f"trainer.device={json.dumps(device)}")
            if pipeline is not None:
                replayed = PipelineReplay(opened, pipeline, into, sets=sets, scorer=scorer)
                _decide_anew(opened, replayed, into, dry_run=dry_run, as_json=as_json, progress=progress)
            branch = Replay(opened, into, sets=sets, first=first, last=last, without=without, scorer=scorer)
            _branch(branch, dry_run=dry_run, as_json=as_json, progress=progress)


def _check_options(given: Mapping[str, object], into: Path | None, *, of_part: bool) -> None:
    """Refuse options that do not go together. `given`: those of a new run; `of_part`: whether some versions alone are
    asked for."""
    names = [name for name, value in given.items() if value]
    if names and into is None:
        raise click.UsageError(f"{names[0]}: without --into nothing is changed; name the folder of a new run by --into")
    if given["--pipeline"] and of_part:
        raise click.UsageError("--pipeline: decides about all groups of the run; leave out --from and --to")
    if given["--pipeline"] and given["--without"]:
        raise click.UsageError("--without: leaves rollouts out of recorded batches; leave out --pipeline")


def _compare(opened: OpenRun, first: int, last: int | None, device: str | None, *, as_json: bool) -> None:
    from rftstream.replay.again import replay as train_again

    found = train_again(opened, first=first, last=last, device=device, report=_lines())
    click.echo(json.dumps(found.to_json(), allow_nan=False) if as_json else found.to_text())
    sys.exit(0 if found.equal else 1)


def _branch(branch: Replay, *, dry_run: bool, as_json: bool, progress: str) -> None:
    if not as_json:
        click.echo(branch.plan.to_text())
    if dry_run:
        if as_json:
            click.echo(json.dumps({**branch.plan.to_json(), "dry_run": True}))
        return
    branch.prepare(say, _lines())
    result = branch.train(progress=progress, stream=sys.stderr if as_json else sys.stdout)
    finish(result, branch.plan.to_json() if as_json else None)


def _decide_anew(
    opened: OpenRun, replayed: PipelineReplay, into: Path, *, dry_run: bool, as_json: bool, progress: str
) -> NoReturn:
    from rftstream.queries.decisions.side_by_side import compare_runs
    from rftstream.runs.folder import open_run

    if not as_json:
        click.echo(replayed.plan.to_text())
    if dry_run:
        if as_json:
            print_out({**replayed.plan.to_json(), "dry_run": True})
        sys.exit(0)
    replayed.prepare(say)
    result = replayed.train(progress=progress, stream=sys.stderr if as_json else sys.stdout)
    new = open_run(into)
    try:
        found = compare_runs((opened.run_id, opened.transport), (new.run_id, new.transport))
    finally:
        new.transport.close()
    if as_json:
        print_out({**replayed.plan.to_json(), **result.to_dict(), "comparison": found.to_json()})
    else:
        click.echo(f"{result.summary()}\n\n{found.to_text()}")
    if result.error:
        click.echo(f"rftstream: {result.error}", err=True)
    elif (why := found.why_nothing_is_left()) is not None:
        click.echo(f"rftstream: {why}", err=True)
        sys.exit(1)
    sys.exit(result.exit_code)


def _lines() -> Callable[[int, int, int], None]:
    """Return a report function that prints a line to stderr every few seconds."""
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


# ------------------------------------------------------------- `rescore`: recorded rollouts under another reward


@command(
    "rftstream rescore examples/runs/arithmetic --reward my_rewards:score --set trainer.algorithm=topr "
    "--into examples/runs/arithmetic-rescored",
    "rftstream rescore runs/a --reward math --set verifier.processes=8 --into runs/b --json",
    "rftstream rescore runs/a --into runs/mended",
    "rftstream rescore runs/a --new-answers --into runs/mended",
    "rftstream rescore runs/a --reward feedback --into runs/judged",
    "rftstream resume examples/runs/arithmetic-rescored",
)
@run_argument
@click.option(
    "--reward",
    metavar="NAME",
    help="For all tasksets: a built-in one, module:function, a TOML list of several, or `feedback`: people's. "
    "[default: each taskset's own, by its code as it is now]",
)
@click.option("--into", required=True, type=AnyPath(file_okay=False), metavar="NEWRUN", help="Folder of the new run.")
@click.option(
    "--new-answers",
    is_flag=True,
    help="Score by the answers and columns that the data has by now, where a problem has the same prompt.",
)
@set_option
@json_option
def rescore(run: Path, reward: str | None, into: Path, new_answers: bool, sets: tuple[str, ...], as_json: bool) -> None:
    """Score the rollouts of a run again, with another or a mended reward, into a new run; compare the verdicts.

    The run itself is only read. Tasks and rollouts are copied with their ids, and verifiers score them; pending ones
    are skipped. `rftstream resume NEWRUN` then trains on the rescored data alone. It starts from the model that the run
    began with, without explorers and without the staleness check. After an interruption the same command continues.

    With --reward feedback no reward function runs. Rollouts that people have judged get the judged reward (as
    [feedback] says); all others keep their verdict.
    """
    from rftstream.launch.sessions.rescore import rescore as score
    from rftstream.queries.decisions.comparison import compare
    from rftstream.queries.records.shown import open_reader

    with opened_run(run) as source:
        try:
            new = score(source, into, reward=reward, sets=sets, say=say, new_answers=new_answers)
        except KeyboardInterrupt:
            say("stopped; what is scored stays, and the same command goes on")
            sys.exit(1)
        try:
            comparison = compare(
                source.transport, new.transport, reader=open_reader(source, dims=can_dim() and not as_json)
            )
        finally:
            new.transport.close()
    if as_json:
        print_out({"run_dir": str(new.folder.path), **comparison.to_json()})
    else:
        is_default = new.config.trainer.algorithm == "grpo"
        advised = " --set trainer.algorithm=topr" if is_default else ""
        why = "\n(topr, since grpo soon learns no more from rollouts of older versions)" if is_default else ""
        print_out(f"{comparison.to_text()}\n\ntrain from it with: rftstream resume {into}{advised}{why}")
