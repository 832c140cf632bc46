"""What a run needs to be able to start: one list, gone through by `check`, `run`, `resume` and `doctor`.

Each entry looks at one thing and says what it found, or raises what `run` would end with. To add one: a line in
`requirements`. None of them leaves anything behind.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.algorithms.requirements import check_demands
from rftstream.config import registry
from rftstream.config.part_names import check_part_names, check_server_updates, check_shared, check_teacher
from rftstream.config.sections import RunConfig, name_of_algorithm
from rftstream.config.stages import Stages
from rftstream.errors import ConfigError, RftError
from rftstream.models.devices import check_device
from rftstream.models.folder import check_complete, prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.runs.folder import RunFolder, candidates_here, check_transport, open_store, store_place
from rftstream.runs.init_from import fetch_initial
from rftstream.runs.load_demonstrations import check_experts
from rftstream.trackers import check_trackers

STORE_PATIENCE_S = 5.0
"""For `check` and `doctor`, which only look."""


@dataclass(frozen=True, slots=True)
class Requirement:
    what: str
    look: Callable[[], str | None]
    """Return what was found, None where there is nothing to say. An error is a problem."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What became of a look."""

    what: str
    found: str
    error: Exception | None = None


def look(
    config: RunConfig, *, scratch: Path | None = None, patience_s: float | None = None, here: bool = True
) -> list[Looked]:
    """Go through the list; every problem is found, not the first alone. Own modules must be importable by now.

    `scratch` is a folder in which a made or copied model is prepared to be looked at; without it that is left to who
    makes the run. `patience_s` bounds the questions to a store elsewhere. Unless the workers run `here`, what only they
    need (GPUs, weights, the store and its keys) is theirs to look at."""
    found: list[Looked] = []
    for requirement in requirements(config, scratch, patience_s, here):
        looked = _look_at(requirement)
        if looked is None or any(one.found.endswith(looked.found) for one in found if one.error is not None):
            continue  # the same was told already, perhaps with its section
        if looked.error is not None:
            found = [one for one in found if one.error is None or not looked.found.endswith(one.found)]
        found.append(looked)
    return found


def _look_at(requirement: Requirement) -> Looked | None:
    try:
        text = requirement.look()
    except Exception as error:  # own modules may raise anything
        text = str(error) if isinstance(error, RftError) else f"{requirement.what}: {type(error).__name__}: {error}"
        return Looked(requirement.what, text, error)
    return None if text is None else Looked(requirement.what, text)


def require(config: RunConfig, *, here: bool = True) -> None:
    """Raise what stands in the way of a run: the error itself if there is one, else a ConfigError with all of them."""
    problems = [one for one in look(config, here=here) if one.error is not None]
    if len(problems) == 1 and isinstance(problems[0].error, RftError):
        raise problems[0].error
    if problems:
        raise ConfigError("\n".join(one.found for one in problems))


def requirements(
    config: RunConfig, scratch: Path | None, patience_s: float | None, here: bool
) -> Iterator[Requirement]:
    folder = folder_of(config)
    for check in (check_part_names, check_teacher, check_server_updates, check_shared):
        yield Requirement("parts", lambda check=check: check(config))  # type: ignore[misc]
    yield Requirement("transport", lambda: _transport(config))
    for kind, name in dict.fromkeys(_parts(config)):
        yield Requirement(kind, lambda kind=kind, name=name: _part(config, kind, name))  # type: ignore[misc]
    for where, named in config.algorithms_named().items():
        yield Requirement("algorithm", lambda where=where, named=named: _algorithm(config, where, named))  # type: ignore[misc]
    yield Requirement("algorithm", lambda: _demands(config))
    yield Requirement("lora", lambda: _lora(config))
    yield Requirement("experts", lambda: check_experts(config))
    yield Requirement("trackers", lambda: check_trackers(config))
    for where, device in devices(config) if here else ():
        yield Requirement(device, lambda where=where, device=device: check_device(device, where=where))  # type: ignore[misc]
    yield Requirement("model", lambda: _model(config, scratch, weights=here and loads_model(config)))
    yield Requirement("run folders", lambda: check_folder(folder.path.parent, where="run.folder"))
    if here:
        yield Requirement("object store", lambda: _store(config, folder, patience_s))


def folder_of(config: RunConfig) -> RunFolder:
    """The newest here, or where the first would be: nothing that is asked of it needs the log."""
    try:
        existing = candidates_here(config)
    except OSError:  # a folder without rights, which is said of it where it is looked at
        existing = []
    return existing[-1] if existing else RunFolder(Path(config.base) / config.run.folder / config.run.name)


def devices(config: RunConfig) -> list[tuple[str, str]]:
    """Settings and the GPUs that they name, of roles that this run has, each GPU once."""
    named = [("trainer.device", config.trainer.device)]
    if not config.without_tasks and config.explorer.count:
        named += [("explorer.devices", one) for one in config.explorer.devices]
    if config.evaluations and config.evaluator.count:
        named.append(("evaluator.device", config.evaluator.device))
    wanted = {device: where for where, device in reversed(named) if device.startswith("cuda")}
    return [(where, device) for device, where in sorted(wanted.items())]


# ------------------------------------------------------------------------------------------------ parts


def _parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "policy", config.explorer.policy
    yield "policy", config.evaluator.policy or config.explorer.policy
    yield "backend", config.trainer.backend
    for taskset in config.tasksets.values():
        yield "environment", taskset.environment
    for evaluation in config.evaluations.values():
        yield "environment", evaluation.environment


def _part(config: RunConfig, kind: str, name: str) -> str:
    config.build_part(kind, name)
    return f"{name} can be used"


def _transport(config: RunConfig) -> str:
    registry.resolve("transport", config.transport.kind, where="transport.kind")
    check_transport(config)
    return config.transport.kind


def _algorithm(config: RunConfig, where: str, named: object) -> str:
    part, options = config.build_algorithm(where)
    part(options)
    return f"{name_of_algorithm(named, where)} can be used"  # type: ignore[arg-type]


def _demands(config: RunConfig) -> None:
    algorithms = [build_algorithm(config, stage.where) for stage in Stages.of(config).all]
    check_demands(config, algorithms, config.build_part("backend", config.trainer.backend)[0])


def _lora(config: RunConfig) -> None:
    if config.model.lora is not None and config.trainer.backend in ("torch", "deepspeed"):
        from rftstream.backends.torch import lora

        lora.require()


# ------------------------------------------------------------------------------------------------ model


def _model(config: RunConfig, scratch: Path | None, *, weights: bool) -> str | None:
    """Its tokenizer and template, and the headers of its `weights`."""
    if scratch is None and config.model.path is None:
        return None
    place = (scratch or folder_of(config).path) / "model"
    fetch_initial(config, place)
    spec = prepare_model(config.model, place, config.run.seed)
    if weights:
        check_complete(spec)
    renderer = open_renderer(spec)
    context = "unbounded" if renderer.context is None else f"{renderer.context:,} tokens"
    return f"{spec.name}: {renderer.vocabulary_size:,} token ids, context {context}"


def loads_model(config: RunConfig) -> bool:
    """Whether any part of the run loads the model's weights, as far as its class says so (`loads_model = True`)."""
    parts = [("backend", config.trainer.backend)]
    if not config.without_tasks:
        parts.append(("policy", config.explorer.policy))
    if config.evaluations:
        parts.append(("policy", config.evaluator.policy or config.explorer.policy))
    for kind, name in parts:
        try:
            if getattr(registry.resolve(kind, name), "loads_model", False):
                return True
        except RftError:  # that is said of the part itself
            continue
    return False


# ------------------------------------------------------------------------------------------------ places


def check_folder(folder: Path, *, where: str) -> str:
    """Make something in the nearest folder that is there, and remove it again. ConfigError where that is refused:
    rights alone do not tell (a read-only disk, a file in the way)."""
    folder = folder.absolute()
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rftstream-", dir=there))
    except OSError as error:
        raise ConfigError(
            f"{where}: {folder}: nothing can be made in {there} ({error.strerror or error}), expected a folder to "
            "write to; mend its rights, or name another"
        ) from None
    return f"can be made in {there}"


def _store(config: RunConfig, folder: RunFolder, patience_s: float | None) -> str:
    """An object is written, read and deleted, where that leaves no new folder behind."""
    url = config.weights.store
    if "://" not in url or url.startswith("file://"):
        place = Path(store_place(config, folder))
        if folder.path not in place.parents:  # which is looked at already
            check_folder(place, where="weights.store")
        if not place.is_dir():
            return f"to be made in {next(one for one in place.parents if one.is_dir())}"
    store = open_store(config, folder, patience_s=patience_s)
    name, data = f"doctor/{platform.node() or 'host'}-{os.getpid()}", b"written to see whether it can be\n"
    store.put(name, data)
    try:
        same = store.get(name) == data
    finally:
        store.delete(name)
    if not same:
        raise ConfigError(
            f"weights.store: {store.url}: gave other bytes back than were put in; use another weights.store"
        )
    return f"{store.url}: written, read and deleted"
