"""The commands `run`, `resume` and `worker`, which start processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from rftstream.commands.options import (
    command,
    files_argument,
    finish,
    json_option,
    layers_argument,
    load_run_file,
    progress_option,
    run_files,
    run_here_argument,
    say,
    set_option,
)
from rftstream.commands.param_types import AnyPath, RunPath, Word
from rftstream.roles import ROLES


@command(
    "rftstream run examples/arithmetic.toml",
    "rftstream run examples/arithmetic.toml --set trainer.lr=5e-4 --set run.steps=100",
    "rftstream run base.toml mine.toml --run-dir runs/try-1 --json",
    "rftstream run examples/arithmetic.toml --no-workers",
)
@files_argument
@click.option(
    "--run-dir",
    type=AnyPath(),
    help="Folder of the new run; one in which a run has ended is refused.  [default: runs/<name>; once that "
    "has ended, runs/<name>-2, ...]",
)
@set_option
@json_option
@progress_option
@click.option(
    "--no-workers",
    is_flag=True,
    help="Only make the run, if none is there that has not ended: others start the workers.",
)
def run(
    files: tuple[Path, ...],
    run_dir: Path | None,
    sets: tuple[str, ...],
    as_json: bool,
    progress: str,
    no_workers: bool,
) -> None:
    """Start a run and supervise it to its end.

    The command starts every role as a process, shows progress, restarts processes that die, and leaves a run folder
    with the trained model in final/. Of several FILEs, later ones override earlier ones. Without FILE it reads
    $RFTSTREAM_CONFIG, then ./rftstream.toml. Ctrl-C stops the run cleanly (`rftstream resume` continues it); a second
    ctrl-C stops it at once.
    """
    config = load_run_file(files, sets)
    from rftstream.launch import start

    if no_workers:
        folder, is_new = start.create(config, run_dir=run_dir)
        click.echo(
            json.dumps({"run_dir": str(folder.path), "created": is_new})
            if as_json
            else f"{folder.path}: {'created' if is_new else 'is there and has not ended'}; start a worker of each "
            f"role: rftstream worker --run-dir {folder.path} --role ROLE"
        )
        return
    stream = sys.stderr if as_json else sys.stdout
    finish(start.run(config, run_dir=run_dir, progress=progress, stream=stream), {} if as_json else None)


@command(
    "rftstream resume examples/runs/arithmetic",
    "rftstream resume examples/runs/arithmetic --set run.steps=400",
    "rftstream resume base.toml mine.toml",
)
@run_here_argument
@layers_argument
@set_option
@json_option
@progress_option
def resume(run: Path, layers: tuple[Path, ...], sets: tuple[str, ...], as_json: bool, progress: str) -> None:
    """Continue a run that was stopped or died, or add steps to a finished one.

    RUN is a run folder, or a run file (then its newest run), with the FILEs that override it. The run continues with
    its recorded settings. Later changes of the run file are shown but have no effect; --set changes a setting. Counts,
    devices, log level, steps, intervals of checkpoints and evaluations and the learning rate may change. Another model,
    taskset, template or partition count is refused. Your own modules are used in their current form; changed ones are
    listed.
    """
    from rftstream.launch import start

    stream = sys.stderr if as_json else sys.stdout
    finish(start.resume(run, layers=layers, sets=sets, progress=progress, stream=stream), {} if as_json else None)


@command(
    "rftstream worker examples/arithmetic.toml --role explorer",
    "rftstream worker --run-dir examples/runs/arithmetic --role verifier --metrics-port 9100",
)
@files_argument
@click.option(
    "--role",
    required=True,
    metavar="ROLE",
    type=Word(tuple(ROLES)),
    help="feeder, explorer, verifier, buffer, trainer, evaluator, synthesiser.",
)
@click.option("--run-dir", type=RunPath(), help="Folder of the run.  [default: FILE's newest run]")
@click.option("--process", metavar="NAME", help="Name in logs and claims.  [default: ROLE-HOST-PID]")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve /metrics and /health there; 0: any free port, written to logs/NAME.port.",
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda:0, ...  [default: what FILE says]")
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="How long to wait for the run to exist, or for a trainer with the rewards of FILES.",
)
@click.option("--parent", type=int, hidden=True, help="The process that started this one: its end is ours.")
def worker(
    files: tuple[Path, ...],
    role: str,
    run_dir: Path | None,
    process: str | None,
    metrics_port: int | None,
    device: str | None,
    wait_s: float,
    parent: int | None,
) -> None:
    """Run one process of a role, beside others of the same run.

    Any number of explorers, verifiers and synthesisers share the work and may come and go. The other roles have one
    worker in force: a later worker takes over. On SIGTERM or ctrl-C the worker finishes its work in progress and exits.
    """
    from rftstream.launch.host import run_worker

    sys.exit(
        run_worker(
            files if run_dir else run_files(files),
            run_dir,
            role,
            say=say,
            process=process,
            metrics_port=metrics_port,
            device=device,
            wait_s=wait_s,
            parent=parent,
        )
    )


@command(
    "rftstream workers run.toml --role explorer=4 --role verifier=2",
    "rftstream workers run.toml --role feeder --role buffer --role trainer --name gpu-1",
)
@files_argument
@click.option("--role", "roles", required=True, multiple=True, metavar="ROLE[=NUMBER]", help="Several times.")
@click.option("--run-dir", type=RunPath(), help="Folder of the run.  [default: FILE's newest run]")
@click.option("--name", metavar="NAME", help="Part of the workers' names, another one on each host.  [default: HOST]")
@click.option("--pid-file", type=AnyPath(), hidden=True, help="Removed at the end.")
@click.option("--wait-s", type=click.FloatRange(min=0), default=120.0, show_default=True, help="As for `worker`.")
def workers(
    files: tuple[Path, ...],
    roles: tuple[str, ...],
    run_dir: Path | None,
    name: str | None,
    pid_file: Path | None,
    wait_s: float,
) -> None:
    """Run several workers of a run on this host, beside those of other hosts.

    Workers that die are started again, as `run` does it, until the run has ended. On SIGTERM or ctrl-C all of them
    finish their work in progress and exit.
    """
    import socket

    from rftstream.launch.sessions.host_workers import run_workers
    from rftstream.roles import count_workers

    wanted = count_workers(roles, "--role")
    files = files if run_dir else run_files(files)
    name = name or socket.gethostname().partition(".")[0]
    sys.exit(run_workers(files, run_dir, wanted, name=name, say=say, pid_file=pid_file, wait_s=wait_s))
