"""`rftstream doctor`: whether this machine, and what a run file names on it and elsewhere, is fit for a run."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rftstream.errors import RftError
from rftstream.modelfolder import FAKE, prepare_model
from rftstream.rendering import open_renderer
from rftstream.runtime.preflight import check_part_names
from rftstream.runtime.runs import RunFolder, candidates_here, open_store, open_transport
from rftstream.sections import RunConfig, name_of_algorithm
from rftstream.transport import embedded_findings
from rftstream.transport.findings import Finding, Level, ServerLook
from rftstream.views.layout import columns, plural, size
from rftstream.weights import kernels

FREE_BYTES = 5e9
MEMORY_BYTES = 2e9
SHARED_BYTES = 1e9
OPEN_FILES = 1024
STORE_PATIENCE_S = 5.0
PACKAGES = ("torch", "transformers", "kafka-python", "numpy", "msgspec")
"""Whose versions are asked for first when something is odd."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[Finding]:
        return [one for one in self.findings if one.level is Level.problem]

    @property
    def exit_code(self) -> int:
        """That of the broker, if it is one of several problems."""
        return max((one.exit_code for one in self.problems), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.problems,
            "findings": [
                {"level": str(one.level), "what": one.what, "found": one.found, "wanted": one.wanted, "todo": one.todo}
                for one in self.findings
            ],
        }

    def to_text(self) -> str:
        rows = [(str(one.level), one.what, one.found) for one in self.findings]
        lines: list[str] = []
        for finding, line in zip(self.findings, columns(rows, left=3), strict=True):
            lines.append(line)
            if finding.level is not Level.ok:
                wanted = f"wanted: {finding.wanted}" if finding.wanted else ""
                lines.append(f"         {'; '.join(filter(None, (wanted, finding.todo)))}")
        warnings = sum(one.level is Level.warning for one in self.findings)
        verdict = plural(len(self.problems), "problem") if self.problems else "no problems"
        return "\n".join([*lines, "", f"{verdict}, {plural(warnings, 'warning')}"])


def examine(config: RunConfig | None) -> DoctorReport:
    """Of the machine; with a config of what it names, too. Nothing is left anywhere."""
    folder = Path.cwd() if config is None else Path(config.base) / config.run.folder
    findings = [
        *_python(),
        *_kernels(),
        *_machine(config),
        *_disk(folder),
        *embedded_findings.find(folder),
        *_devices(config),
    ]
    if config is not None:
        for what, look in (("parts", _parts), ("broker", _broker), ("object store", _store), ("model", _model)):
            findings += _guarded(what, look, config)
    return DoctorReport(tuple(findings))


def _guarded(what: str, look: Callable[[RunConfig], Iterator[Finding]], config: RunConfig) -> list[Finding]:
    """Whatever a part of the user's own, or a server, makes of it is a finding."""
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
    return Finding(level=Level.ok if fine else otherwise, what=what, found=found, wanted=wanted,
                   todo="" if fine else todo)  # fmt: skip


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
    there = next(one for one in (folder.resolve(), *folder.resolve().parents) if one.exists())
    free = shutil.disk_usage(there).free
    yield _judged(free >= FREE_BYTES, "disk", f"{size(free)} free at {there}", f"{size(FREE_BYTES)} or more",
                  "`rftstream check` says what a run needs; free some, or set run.folder",
                  otherwise=Level.warning if free > FREE_BYTES / 50 else Level.problem)  # fmt: skip
    can = os.access(there, os.W_OK | os.X_OK)
    yield _judged(can, "run folders", f"{'can' if can else 'cannot'} be made in {there}", "a folder to write to",
                  "set run.folder, or mend its rights")  # fmt: skip


def _devices(config: RunConfig | None) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # told already
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(num_gpus))
    yield _judged(True, "gpu", names or "none that torch sees; roles on cpu need none")
    wanted: set[str] = set()
    if config is not None:
        wanted = {*config.explorer.devices, config.trainer.device, config.evaluator.device}
    for device in sorted(one for one in wanted if one.startswith("cuda")):
        there = all(int(one) < num_gpus for one in (device.partition(":")[2] or "0").split(","))
        yield _judged(there, device, "there" if there else "not there", "a GPU that torch sees",
                      "install a torch for this GPU's driver, or set another device")  # fmt: skip


# --------------------------------------------------------------------------------------------- a run file


def _folder_of(config: RunConfig) -> RunFolder:
    """The newest here, or where the first would be: nothing that is asked of it needs the log."""
    existing = candidates_here(config)
    return existing[-1] if existing else RunFolder(Path(config.base) / config.run.folder / config.run.name)


def _parts(config: RunConfig) -> Iterator[Finding]:
    check_part_names(config)
    for kind, name in (("policy", config.explorer.policy), ("backend", config.trainer.backend)):
        config.build_part(kind, name)
        yield _judged(True, kind, f"{name} can be imported")
    for where, named in config.algorithms_named().items():
        config.build_algorithm(where)
        yield _judged(True, "algorithm", f"{name_of_algorithm(named, where)} can be imported")


def _model(config: RunConfig) -> Iterator[Finding]:
    """Its config and tokenizer; weights are not loaded."""
    with tempfile.TemporaryDirectory(prefix="rftstream-doctor-") as scratch:
        model = prepare_model(config.model, Path(scratch) / "model", config.run.seed)
        renderer = open_renderer(model)
        if model.name != FAKE:
            from transformers import AutoConfig

            AutoConfig.from_pretrained(model.folder)
        context = "unbounded" if renderer.context is None else f"{renderer.context:,} tokens"
        yield _judged(True, "model", f"{model.name}: {renderer.vocabulary_size:,} token ids, context {context}")


def _store(config: RunConfig) -> Iterator[Finding]:
    """An object is written, read and deleted, where that leaves no new folder behind."""
    folder = _folder_of(config)
    if "://" not in config.weights.store or config.weights.store.startswith("file://"):
        place = folder.path / config.weights.store.removeprefix("file://")
        if not place.is_dir():
            there = next(one for one in (place, *place.parents) if one.exists())
            yield _judged(os.access(there, os.W_OK), "object store", f"to be made in {there}", "a folder to write to",
                          "set weights.store, or mend its rights")  # fmt: skip
            return
    store = open_store(config, folder, patience_s=STORE_PATIENCE_S)
    name, data = f"doctor/{platform.node() or 'host'}-{os.getpid()}", b"written by rftstream doctor\n"
    store.put(name, data)
    try:
        same = store.get(name) == data
    finally:
        store.delete(name)
    yield _judged(same, "object store", f"{store.url}: written, read and deleted", "the same bytes back",
                  "it gave other bytes back than were put in; use another weights.store")  # fmt: skip


def _broker(config: RunConfig) -> Iterator[Finding]:
    if config.transport.kind == "embedded":
        return
    transport = open_transport(config, _folder_of(config), create=True)
    try:
        look: ServerLook | None = getattr(transport.admin, "look", None)
        if look is not None:
            yield from look.broker()
    finally:
        transport.close()
