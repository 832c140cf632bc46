"""A run as a batch job of SLURM: the node of each worker, and the script that starts the workers.

The script makes the run or continues it, and keeps one job step (`srun`) for each worker. It restarts workers after
passing failures, and puts itself back into the queue when its time is up. So none of our processes has to live between
jobs.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.roles import role_specs
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.trainer import TRAINER
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import lies_in_folder
from rftstream.service.role_spec import RoleKind

HEAD, BODY = (Path(__file__).with_name(f"slurm_{part}.sh") for part in ("head", "job"))
"""Template of the beginning of a script, and the part that is the same for every run."""
WARNING_S = 120
"""Seconds before the end of its time at which the job gets a signal. A worker takes up to 40 of them to finish its work
in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The requirements of a SLURM job. The command makes it from its options."""

    nodes: int = 1
    time: str = "24:00:00"
    """Time limit, written as for SLURM's --time."""
    counts: tuple[tuple[str, int], ...] = ()
    """Role -> number of workers, if it differs from the run file."""
    more: tuple[str, ...] = ()
    """Further options for sbatch, passed on unchanged."""
    before: tuple[str, ...] = ()
    """Lines of shell that run first, such as those that load modules."""
    command: tuple[str, ...] = ()
    """Command that runs rftstream on the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """A run of the job. The command makes it from its files."""

    config: RunConfig
    files: Sequence[Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStep:
    """One worker of the job, which is a separate step. `plan_steps` makes it."""

    name: str
    role: str
    node: int
    cpus: int
    gpus: int
    """Number of GPUs that the worker sees, as cuda:0 and so on. 0: none."""


def plan_steps(config: RunConfig, settings: JobSettings) -> tuple[WorkerStep, ...]:
    """Return the workers of a job. The single roles run on the first node; the other workers are spread over all nodes,
    from the last one on. ConfigError if several nodes cannot share the log."""
    if settings.nodes > 1 and lies_in_folder(config):
        raise ConfigError(
            f"--nodes {settings.nodes}: the log of transport.kind {config.transport.kind!r} is on one host, expected "
            "--nodes 1, or transport.kind = 'kafka'"
        )
    counts, steps, dealt = dict(settings.counts), [], 0
    for spec in role_specs():
        count = counts.get(spec.name, spec.count(config))
        devices = spec.devices(config)
        for number in range(count):
            node = 0
            if spec.kind is not RoleKind.single:
                node = settings.nodes - 1 - dealt % settings.nodes
                dealt += 1
            device = devices[number % len(devices)] if devices else "cpu"
            steps.append(
                WorkerStep(
                    name=f"{spec.name}-{number}",
                    role=spec.name,
                    node=node,
                    cpus=_cpus(config, spec.name),
                    gpus=_gpus(config, spec.name, device),
                )
            )
    return tuple(steps)


def _cpus(config: RunConfig, role: str) -> int:
    section: Any = getattr(config, role, None)
    threads = getattr(section, "threads", 1)
    return threads + config.verifier.processes if role == VERIFIER.name else threads


def _gpus(config: RunConfig, role: str, device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    backend = config.trainer.backend
    setting = registry.find_spec(BackendSpec, backend).processes_setting if role == TRAINER.name else ""
    if not setting:
        return 1
    _, options = config.build_part("backend", backend)
    return int(getattr(options, setting))  # a backend of several processes uses a GPU for each


def job_script(
    runs: Sequence[JobRun], folder: Path, settings: JobSettings, *, sets: Sequence[str] = (), is_array: bool = False
) -> str:
    """Return the batch script. `folder`: folder for the logs of all attempts. `is_array`: each run is a task of a job
    array. ConfigError if `sets` cannot be kept in a job, or if two runs have one name."""
    if sets:
        raise ConfigError(
            f"--set {sets[0]}: a job goes on with the run when it is started anew, expected all settings in the run "
            "file; write them there"
        )
    names = [run.config.run.name for run in runs]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ConfigError(
            f"--each: several runs are named {twice[0]!r}, expected a run.name of its own in each file; write it there"
        )
    planned = [(run, plan_steps(run.config, settings)) for run in runs]
    by_node = [[step for step in steps if step.node == node] for _, steps in planned for node in range(settings.nodes)]
    cpus, gpus = (max(sum(getattr(step, what) for step in steps) for steps in by_node) for what in ("cpus", "gpus"))
    template = jinja2.Template(HEAD.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    head: str = template.render(
        settings=settings,
        cpus=cpus,
        gpus=gpus,
        warning_s=WARNING_S,
        folder=str(folder),
        is_array=is_array,
        nodes=[[step.name for step in steps] for steps in by_node[: settings.nodes]],
        runs=[
            {
                "name": run.config.run.name,
                "folder": str(folder / run.config.run.name if is_array else folder),
                "files": [str(file.resolve()) for file in run.files],
                "steps": [_kept(step, settings.nodes) for step in steps],
            }
            for run, steps in planned
        ],
        quoted=shlex.join,
    )
    return head + BODY.read_text(encoding="utf-8").rstrip() + "\n"


def _kept(one: WorkerStep, nodes: int) -> list[str]:
    """Return the words of the script's line that keeps a worker running."""
    options = ["--ntasks=1", "--nodes=1", "--exact", f"--cpus-per-task={one.cpus}", f"--job-name={one.name}"]
    if nodes > 1:
        options.append(f"--relative={one.node}")
    options.append(f"--gpus-per-node={one.gpus}" if one.gpus else "--gres=none")
    device = ["--device", "cuda:0"] if one.gpus else []
    return ["keep", one.name, *options, "--", "--role", one.role, *device]


SHARING = (EXPLORER.name, VERIFIER.name)
"""Roles whose number of workers in a job may differ from the run file."""
