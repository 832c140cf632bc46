"""The commands `launch` start a run on the machines of a cluster's scheduler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click

from rftstream.commands.options import command, files_argument, group, load_run_file, run_files, set_option
from rftstream.commands.param_types import AnyPath
from rftstream.errors import ConfigError, RftError


@group("rftstream launch slurm run.toml --dry-run")
def launch() -> None:
    """Start a run on a cluster, by its scheduler."""


@command(
    "rftstream launch slurm run.toml --dry-run",
    "rftstream launch slurm run.toml --nodes 4 --explorers 12 --time 2-00:00:00 --sbatch=--partition=gpu",
    "rftstream launch slurm run.toml --before 'module load cuda' --command /shared/venv/bin/rftstream",
    group=launch,
)
@files_argument
@set_option
@click.option(
    "--dry-run", is_flag=True, help="Print the batch script, make the folder of its logs, and submit nothing."
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="More than one needs Kafka.")
@click.option("--explorers", type=click.IntRange(0), help="How many.  [default: explorer.count]")
@click.option("--verifiers", type=click.IntRange(0), help="How many.  [default: verifier.count]")
@click.option("--time", "time_", default="24:00:00", show_default=True, help="Of one job; then the next one goes on.")
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="A further option of sbatch; several times.")
@click.option("--before", multiple=True, metavar="LINE", help="A line of shell before all else; several times.")
@click.option("--command", metavar="PATH", help="rftstream on the nodes.  [default: this one]")
@click.option(
    "--logs", type=AnyPath(file_okay=False), help="Folder of the job's logs.  [default: slurm beside the runs]"
)
def slurm(
    files: tuple[Path, ...],
    sets: tuple[str, ...],
    dry_run: bool,
    nodes: int,
    explorers: int | None,
    verifiers: int | None,
    time_: str,
    more: tuple[str, ...],
    before: tuple[str, ...],
    command: str | None,
    logs: Path | None,
) -> None:
    """Submit a run as a batch job of SLURM.

    Each worker is a job step. The single roles run on the first node; explorers and verifiers are spread over all
    nodes. A worker that dies is started again. When the job's time is up, the job goes back into the queue, and the run
    continues from its log. Each attempt has its own log files. All nodes must see the run file and rftstream under the
    same paths.
    """
    from rftstream.integrations.slurm import SHARING, JobSettings, job_script

    files = run_files(files)
    config = load_run_file(files, sets)
    folder = (logs or Path(config.base) / config.run.folder / "slurm" / config.run.name).resolve()
    counts = tuple(
        (role, count) for role, count in zip(SHARING, (explorers, verifiers), strict=True) if count is not None
    )
    script = job_script(
        config,
        files,
        folder,
        JobSettings(
            nodes=nodes,
            time=time_,
            counts=counts,
            more=more,
            before=before,
            command=(command,) if command else (sys.executable, "-m", "rftstream"),
        ),
        sets=sets,
    )
    folder.mkdir(parents=True, exist_ok=True)  # SLURM writes no log if the folder is missing
    if dry_run:
        click.echo(script, nl=False)
        return
    if (sbatch := shutil.which("sbatch")) is None:
        raise ConfigError(
            "launch slurm: no sbatch here, expected a host of a SLURM cluster; --dry-run prints the script"
        )
    path = folder / "job.sh"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run([sbatch, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RftError(f"launch slurm: sbatch refused {path}: {done.stderr.strip() or done.stdout.strip()}")
    click.echo(f"{done.stdout.strip()}; its logs are in {folder}")
