"""The commands `launch` start a run on several machines: by a cluster's scheduler, by ssh, or by systemd."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click

from rftstream.commands.options import command, files_argument, group, json_option, load_run_file, run_files, set_option
from rftstream.commands.param_types import AnyPath, RunFile, Word
from rftstream.errors import ConfigError, RftError
from rftstream.roles import ROLES


@group("rftstream launch slurm run.toml --dry-run")
def launch() -> None:
    """Start a run on a cluster by its scheduler, or on plain machines."""


@command(
    "rftstream launch slurm run.toml --dry-run",
    "rftstream launch slurm run.toml --nodes 4 --explorers 12 --time 2-00:00:00 --sbatch=--partition=gpu",
    "rftstream launch slurm base.toml --each seed-1.toml --each seed-2.toml",
    "rftstream launch slurm run.toml --before 'module load cuda' --command /shared/venv/bin/rftstream",
    group=launch,
)
@files_argument
@set_option
@click.option(
    "--dry-run", is_flag=True, help="Print the batch script, make the folder of its logs, and submit nothing."
)
@click.option(
    "--each",
    type=RunFile(),
    multiple=True,
    metavar="FILE",
    help="A run of a job array, of FILE and this; several times.",
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
    each: tuple[Path, ...],
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
    from rftstream.integrations.slurm import SHARING, JobRun, JobSettings, job_script

    files = run_files(files)
    runs = [JobRun(config=load_run_file(own, sets), files=own) for own in [(*files, one) for one in each] or [files]]
    config = runs[0].config
    folder = (logs or Path(config.base) / config.run.folder / "slurm" / config.run.name).resolve()
    counts = tuple(
        (role, count) for role, count in zip(SHARING, (explorers, verifiers), strict=True) if count is not None
    )
    script = job_script(
        runs,
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
        is_array=bool(each),
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


@command(
    "rftstream launch ssh run.toml --hosts hosts.txt",
    "rftstream launch ssh run.toml --hosts hosts.txt --status",
    "rftstream launch ssh run.toml --hosts hosts.txt --logs --follow",
    "rftstream launch ssh run.toml --hosts hosts.txt --stop",
    group=launch,
)
@files_argument
@click.option("--hosts", "hosts_file", required=True, type=AnyPath(dir_okay=False), help="Lines `HOST [ROLE[=N]]...`.")
@click.option("--start", "action", flag_value="start", default=True, help="Start what does not run.  [default]")
@click.option("--status", "action", flag_value="status", help="Show the run, and each host's workers.")
@click.option("--logs", "action", flag_value="logs", help="Show the newest lines of all hosts' logs.")
@click.option("--stop", "action", flag_value="stop", help="Tell all workers to leave; the run goes on when started.")
@click.option("--follow", is_flag=True, help="With --logs: go on with what comes, until ctrl-C.")
@json_option
@click.option("--folder", metavar="PATH", help="Folder of the run files on the hosts.  [default: as here]")
@click.option("--command", metavar="PATH", help="rftstream on the hosts.  [default: as here]")
@click.option("--before", multiple=True, metavar="LINE", help="A line of shell before all else; several times.")
@click.option("--ssh", "options", multiple=True, metavar="OPTION", help="A further option of ssh; several times.")
def ssh(
    files: tuple[Path, ...],
    hosts_file: Path,
    action: str,
    follow: bool,
    as_json: bool,
    folder: str | None,
    command: str | None,
    before: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    """Start a run on machines that ssh reaches, look at it, and stop it.

    Each host has the run files and rftstream, under the same paths, and starts again what dies. Roles that no line of
    the hosts file names are dealt to the hosts without roles. Users, keys and ports are those of ssh's own config.
    """
    from rftstream.integrations.ssh_fleet import Fleet, fleet_text, read_hosts

    files = run_files(files)
    config = load_run_file(files)
    fleet = Fleet(
        hosts=read_hosts(hosts_file, config),
        folder=folder or str(Path(config.base).resolve()),
        files=[file.name if folder else str(file.resolve()) for file in files],
        state=Path(config.run.folder) / "ssh" / config.run.name,
        command=shlex.split(command) if command else (sys.executable, "-m", "rftstream"),
        before=before,
        options=options,
    )
    if action == "status":
        status = fleet.status()
        click.echo(json.dumps(status) if as_json else fleet_text(status, time.time()))
        sys.exit(1 if any(host["trouble"] for host in status["hosts"]) else 0)
    if action == "logs":
        fleet.logs(["--follow"] if follow else [], click.echo)
    elif action == "stop":
        fleet.stop(click.echo)
    else:
        fleet.start(click.echo)


@command(
    "rftstream launch systemd run.toml --role feeder --role buffer --role trainer",
    "rftstream launch systemd run.toml --role explorer --to /etc/systemd/system --user rftstream",
    group=launch,
)
@files_argument
@click.option(
    "--role",
    "roles",
    metavar="ROLE",
    type=Word(tuple(ROLES)),
    multiple=True,
    help="Several times.  [default: all of the run]",
)
@click.option("--to", type=AnyPath(file_okay=False), help="Write the units there.  [default: print them]")
@click.option("--command", metavar="PATH", help="rftstream on the host.  [default: this one]")
@click.option("--user", metavar="NAME", help="Who runs the workers.  [default: root]")
@click.option("--environment", type=AnyPath(dir_okay=False), help="A file with variables, such as keys.")
@click.option("--per-user", is_flag=True, help="For `systemctl --user`.")
def systemd(
    files: tuple[Path, ...],
    roles: tuple[str, ...],
    to: Path | None,
    command: str | None,
    user: str | None,
    environment: Path | None,
    per_user: bool,
) -> None:
    """Write units of systemd for workers of a run, one for each role.

    The unit of the feeder makes the run. Explorers, verifiers and synthesisers have a template, of which any number of
    instances is started. systemd starts again what another try can mend.
    """
    from rftstream.integrations.systemd import worker_units
    from rftstream.roles import role_specs

    files = run_files(files)
    config = load_run_file(files)
    units = worker_units(
        config,
        files,
        list(dict.fromkeys(roles)) or [spec.name for spec in role_specs() if spec.count(config)],
        shlex.split(command) if command else (sys.executable, "-m", "rftstream"),
        user=user,
        environment=environment,
        per_user=per_user,
    )
    if to is None:
        click.echo("\n".join(f"# {name}\n{text}" for name, text in units.items()), nl=False)
        return
    to.mkdir(parents=True, exist_ok=True)
    for name, text in units.items():
        (to / name).write_text(text, encoding="utf-8")
    started = " ".join(name.replace("@.", "@1.") for name in units)
    which = "systemctl --user" if per_user else "systemctl"
    click.echo(f"{', '.join(units)} in {to}; then: {which} daemon-reload && {which} enable --now {started}")
