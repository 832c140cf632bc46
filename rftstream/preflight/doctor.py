"""`rftstream doctor`: checks whether this machine, and what a run file names, is fit for a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rftstream.config.sections import RunConfig
from rftstream.errors import RftError
from rftstream.models.folders.folder import FAKE, prepare_model
from rftstream.models.machine import read_machine
from rftstream.preflight import readiness
from rftstream.preflight.plan import Purpose, plan
from rftstream.queries.formatting import columns, plural, size
from rftstream.queries.plain import Report, pick
from rftstream.runs.folder import lies_in_folder, open_transport
from rftstream.runs.log_settings import dangers, in_words
from rftstream.sandbox.layers import find_layers
from rftstream.transport.base import Transport
from rftstream.transport.embedded import system_check
from rftstream.transport.findings import Finding, Level, ServerLook
from rftstream.weights.deltas import kernels

FREE_BYTES = 5e9
MEMORY_BYTES = 2e9
SHARED_BYTES = 1e9
OPEN_FILES = 1024
PACKAGES = ("torch", "transformers", "kafka-python", "numpy", "msgspec")
"""Packages whose versions matter most when something is odd."""


@dataclass(frozen=True, slots=True)
class DoctorReport(Report):
    """All findings of `examine`. The command shows it."""

    JSON = "ok findings=findings_to_json"

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[Finding]:
        """Return the findings that are problems."""
        return [finding for finding in self.findings if finding.level is Level.problem]

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command: the broker's own code if the broker is one of the problems."""
        return max((problem.exit_code for problem in self.problems), default=0)

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def findings_to_json(self) -> list[dict[str, Any]]:
        """Return the findings, without exit codes."""
        return [pick(finding, "level what found wanted todo") for finding in self.findings]

    def to_text(self) -> str:
        """Return the report as lines. Problems come last, where users see them first."""
        findings = sorted(self.findings, key=lambda finding: list(Level).index(finding.level))
        rows = [(str(finding.level), finding.what, finding.found) for finding in findings]
        lines: list[str] = []
        for finding, line in zip(findings, columns(rows, left=3), strict=True):
            lines.append(line)
            wanted = f"wanted: {finding.wanted}" if finding.wanted else ""
            if finding.level is not Level.ok and (advice := "; ".join(filter(None, (wanted, finding.todo)))):
                lines.append(f"         {advice}")
        warnings = sum(finding.level is Level.warning for finding in self.findings)
        verdict = plural(len(self.problems), "problem") if self.problems else "no problems"
        return "\n".join([*lines, "", f"{verdict}, {plural(warnings, 'warning')}"])


def examine(config: RunConfig | None) -> DoctorReport:
    """Check the machine and, with a config, everything that the config names. Nothing is left behind anywhere."""
    folder = Path.cwd() if config is None else Path(config.base) / config.run.folder
    findings = [
        *_python(),
        *_kernels(),
        *_machine(config),
        *_disk(folder),
        *system_check.find(folder),
        *_gpus(),
        *_sandbox(),
    ]
    if config is not None:
        for what, look in (("needs", _needs), ("broker", _broker), ("architecture", _architecture)):
            findings += _guarded(what, look, config)
    return DoctorReport(tuple(findings))


def _guarded(what: str, look: Callable[[RunConfig], Iterator[Finding]], config: RunConfig) -> list[Finding]:
    """Return the findings of `look`. Any error of a user's own part, or of a server, becomes a finding."""
    try:
        return list(look(config))
    except RftError as error:
        code = error.exit_code if error.exit_code == 3 else 1
        return [Finding(level=Level.problem, what=what, found=str(error), exit_code=code)]
    except Exception as error:
        return [Finding(level=Level.problem, what=what, found=f"{type(error).__name__}: {error}")]


def _judged(
    fine: bool, what: str, found: str, wanted: str = "", todo: str = "", *, otherwise: Level = Level.problem
) -> Finding:
    return Finding(
        level=Level.ok if fine else otherwise, what=what, found=found, wanted=wanted, todo="" if fine else todo
    )


# --------------------------------------------------------------------------------------------- this machine


def _advised(fine: bool, what: str, found: str, wanted: str, todo: str) -> Finding:
    return _judged(fine, what, found, wanted, todo, otherwise=Level.warning)


def _python() -> Iterator[Finding]:
    yield _judged(sys.version_info >= (3, 11), "python", platform.python_version(), "3.11 or newer", "install one")
    for name in PACKAGES:
        try:
            yield _judged(True, name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield _judged(False, name, "not installed", "installed", "pip install rftstream again")
    fast = importlib.util.find_spec("crc32c") is not None
    todo = "on Kafka every record is summed in Python, which is slow; pip install crc32c"
    yield _advised(fast, "crc32c", "in C" if fast else "in Python", "in C", todo)


def _kernels() -> Iterator[Finding]:
    problem = kernels.why_not()
    todo = "weights are published in full without it, and deltas of others cannot be read; install gcc"
    yield _advised(not problem, "pass over weights", problem or "compiled", "compiled", todo)


def _machine(config: RunConfig | None) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sections = () if config is None else (config.explorer, config.verifier, config.trainer, config.evaluator)
    threads = max((section.threads for section in sections), default=1)
    todo = f"a process would use {threads} threads on {cores} cores; lower threads"
    yield _advised(threads <= cores, "cores", str(cores), f"{threads} or more", todo)
    available = psutil.virtual_memory().available
    todo = "processes may be ended for want of it; lower counts, or free some"
    yield _advised(
        available >= MEMORY_BYTES, "memory available", size(available), f"{size(MEMORY_BYTES)} or more", todo
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fine = files == resource.RLIM_INFINITY or files >= OPEN_FILES
    shown = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    yield _advised(fine, "open files (ulimit -n)", shown, f"{OPEN_FILES} or more", f"ulimit -n {OPEN_FILES}")
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    fine = largest == resource.RLIM_INFINITY
    todo = "log and weights may outgrow it; ulimit -f unlimited"
    yield _advised(fine, "size of files (ulimit -f)", "unlimited" if fine else size(largest), "unlimited", todo)
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        todo = "several GPUs in one role need it; in Docker: --shm-size 1g"
        fine = free >= SHARED_BYTES
        yield _advised(fine, "shared memory (/dev/shm)", f"{size(free)} free", size(SHARED_BYTES), todo)


def _disk(folder: Path) -> Iterator[Finding]:
    there = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    yield _judged(
        free >= FREE_BYTES,
        "disk",
        f"{size(free)} free at {there}",
        f"{size(FREE_BYTES)} or more",
        "`rftstream check` says what a run needs; free some, or set run.folder",
        otherwise=Level.warning if free > FREE_BYTES / 50 else Level.problem,
    )


def _gpus() -> Iterator[Finding]:
    machine = read_machine()
    names = ", ".join(gpu.text for gpu in machine.gpus)
    found = names or machine.trouble or "none; roles on the CPU need none"
    yield _advised(not machine.trouble, "gpu", found, "torch sees it", "install a torch for this GPU's driver")


def _sandbox() -> Iterator[Finding]:
    """Yield each layer around programs of a policy. The reward `code` needs the first one; other runs need none."""
    for layer in find_layers():
        yield _advised(layer.is_there, f"sandbox: {layer.name}", layer.found, "there", layer.cost)


# --------------------------------------------------------------------------------------------- a run file


def _needs(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each requirement of `check` and `run`."""
    with tempfile.TemporaryDirectory(prefix="rftstream-doctor-") as scratch:
        for looked in plan(config, Purpose.report, scratch=Path(scratch)).looked:
            if looked.error is None:
                yield _judged(True, looked.what, looked.found)
            else:
                found, _, todo = looked.found.rpartition("; ")
                code = 3 if getattr(looked.error, "exit_code", 1) == 3 else 1
                yield Finding(
                    level=Level.problem,
                    what=looked.what,
                    found=found or todo,
                    todo=todo if found else "",
                    exit_code=code,
                )


def _architecture(config: RunConfig) -> Iterator[Finding]:
    """Yield whether transformers knows the model, unless `_needs` reports it. This is the only check with the slow
    import."""
    if config.model.path in (None, FAKE) or not readiness.loads_model(config):
        return
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory(prefix="rftstream-doctor-") as scratch:
        try:
            model = prepare_model(config.model, Path(scratch) / "model", config.run.seed, weights=False)
        except RftError:
            return
        kind = AutoConfig.from_pretrained(model.folder).model_type
    yield _judged(True, "architecture", f"{kind}, which transformers knows")


def _broker(config: RunConfig) -> Iterator[Finding]:
    if lies_in_folder(config):
        return
    with closing(open_transport(config, readiness.folder_of(config), create=True)) as transport:
        look: ServerLook | None = getattr(transport.admin, "look", None)
        if look is not None:
            findings = look.broker()
            yield from findings
            if not any(finding.level is Level.problem and finding.what == "broker" for finding in findings):
                yield from _topics(config, transport)


def _topics(config: RunConfig, transport: Transport) -> Iterator[Finding]:
    """Yield whether the run's existing topics are fit for a run."""
    there = transport.admin.topics()
    found = dangers(transport, config, begun=False)
    if there or found:
        run = readiness.folder_of(config).run_id
        wanted = "settings under which no record is lost"
        text = plural(len(there), "topic") if not found else "; ".join(found)
        yield _judged(
            not found, f"topics of {run}", text, wanted, in_words(run, found).rpartition("; ")[2] if found else ""
        )
