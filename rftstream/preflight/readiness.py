"""The requirements for the start of a run: one list, which `plan` checks for all callers.

Each entry checks one thing. It returns its finding, or raises the error that `run` would end with. To add one: a line
in `requirements`. No check leaves anything behind.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.algorithms.requirements import check_demands, the_critic, trained_spec
from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.loader import sampling_for
from rftstream.config.parts import registry
from rftstream.config.parts.part_names import PART_CHECKS, named_parts
from rftstream.config.parts.part_specs import BackendSpec, PolicySpec, TasksetSpec
from rftstream.config.parts.reward_uses import reward_uses
from rftstream.config.sections import EvaluationSection, RunConfig, TasksetSection, name_of_part
from rftstream.config.stages import Stages
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.token_values import EXPERTS
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.data.tasksets import TASKSETS
from rftstream.data.tasksets.open import grows, open_taskset
from rftstream.data.tasksets.rows import first_rows
from rftstream.errors import ConfigError, MissingChecker, RftError
from rftstream.models.devices import check_device
from rftstream.models.folders import rounded
from rftstream.models.folders.folder import FAKE, check_complete, prepare_model
from rftstream.models.folders.made import DEFAULT_FAMILY
from rftstream.models.rendering import open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_tokens import ImageTokens, check_takes_images
from rftstream.policies.grammars import check_forms
from rftstream.preflight.checks.check_rewards import LOOKED_AT, check_needs
from rftstream.preflight.checks.dependencies import isolations, look_at_sandbox, look_at_servers
from rftstream.preflight.estimate import beside_bytes
from rftstream.preflight.in_hand import TOKEN_BYTES
from rftstream.rewards.resolve import build_reward
from rftstream.roles.explorer.fit_to_record import MAX_BODY_BYTES
from rftstream.runs.folder import RunFolder, candidates_here, check_transport, open_store, store_place
from rftstream.runs.making.init_from import fetch_initial
from rftstream.runs.writes.load_demonstrations import check_demonstrations
from rftstream.trackers import check_trackers
from rftstream.weights.stores.store import place_on_disk


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement for the start of a run. `requirements` makes it; `look` checks it."""

    what: str
    look: Callable[[], str | None]
    """Function that returns the finding, or None without one. Its error is a problem."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of one check. `look` makes it."""

    what: str
    found: str
    error: Exception | None = None


def look(
    config: RunConfig, *, scratch: Path | None = None, patience_s: float | None = None, here: bool = True
) -> list[Looked]:
    """Check all requirements, and return every problem, not only the first. The user's modules must be importable by
    now.

    `scratch` is a folder in which a made or copied model is prepared for the check. Without it, the model is prepared
    when the run is made. `patience_s` limits the requests to a remote store. Unless the workers run `here`,
    requirements of workers alone (GPUs, weights, the store and its keys) are not checked.
    """
    found: list[Looked] = []
    for requirement in requirements(config, scratch, patience_s, here):
        looked = _look_at(requirement)
        if looked is None or any(one.found.endswith(looked.found) for one in found if one.error is not None):
            continue  # the same problem was found already, perhaps with its section
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


def requirements(
    config: RunConfig, scratch: Path | None, patience_s: float | None, here: bool
) -> Iterator[Requirement]:
    """Yield the requirements of a run with this config."""
    folder = folder_of(config)
    for check in PART_CHECKS:
        yield Requirement("parts", lambda check=check: check(config))  # type: ignore[misc]
    yield Requirement("transport", lambda: _transport(config))
    for kind, name in dict.fromkeys(_parts(config)):
        yield Requirement(kind, lambda kind=kind, name=name: _part(config, kind, name))  # type: ignore[misc]
    own = {name: where for kind, where, name in named_parts(config) if kind == "reward" and ":" in name and here}
    for name, where in own.items():
        yield Requirement("reward", lambda name=name, where=where: _own_reward(name, where))  # type: ignore[misc]
    environments: dict[str, str] = {}
    for where, named in config.environments_named().items():
        environments.setdefault(str(named), where)
    for where in environments.values():
        yield Requirement("environment", lambda where=where: _environment(config, where))  # type: ignore[misc]
    for where, named in config.algorithms_named().items():
        yield Requirement("algorithm", lambda where=where, named=named: _algorithm(config, where, named))  # type: ignore[misc]
    for place, section in _sections(config) if here else ():
        yield Requirement(place, lambda place=place, section=section: _problems(config, place, section))  # type: ignore[misc]
    yield Requirement("forms", lambda: check_forms(config))
    yield Requirement("pipeline", lambda: _pipelines(config))
    yield Requirement("algorithm", lambda: _demands(config))
    yield Requirement("lora", lambda: _lora(config))
    yield Requirement("experts", lambda: check_demonstrations(config))
    yield Requirement("checkpoints", lambda: _check_keep_best(config))
    yield Requirement("trackers", lambda: check_trackers(config))
    for where, device in devices(config) if here else ():
        yield Requirement(device, lambda where=where, device=device: check_device(device, where=where))  # type: ignore[misc]
    yield Requirement("model", lambda: _model(config, scratch, weights=here and loads_model(config)))
    yield Requirement("run folders", lambda: check_folder(folder.path.parent, where="run.folder"))
    if here and isolations(config):
        yield Requirement("sandbox", lambda: look_at_sandbox(config))
    if here:
        policies = list(dict.fromkeys(name for kind, name in _parts(config) if kind == "policy"))
        yield Requirement("model servers", lambda: look_at_servers(config, policies))
        yield Requirement("object store", lambda: _store(config, folder, patience_s))


def folder_of(config: RunConfig) -> RunFolder:
    """Return the folder of the newest run here, or the place of the first run. The log is not opened."""
    try:
        existing = candidates_here(config)
    except OSError:  # no rights to the folder; the check of the folder reports it
        existing = []
    return existing[-1] if existing else RunFolder(Path(config.base) / config.run.folder / config.run.name)


def devices(config: RunConfig) -> list[tuple[str, str]]:
    """Return the GPUs that this run's roles use, each once, with the setting that names it: `cuda:1,2` for two of one
    setting."""
    named = [("trainer.device", config.trainer.device)]
    if not config.without_tasks and config.explorer.processes:
        named += [("explorer.devices", device) for device in config.explorer.devices]
    if config.evaluations and config.evaluator.count:
        named.append(("evaluator.device", config.evaluator.device))
    wanted = {device: where for where, device in reversed(named) if device.startswith("cuda")}
    found: dict[tuple[str, str], list[str]] = {}
    for device, where in sorted(wanted.items()):
        kind, colon, number = device.partition(":")
        found.setdefault((where, kind + colon), []).append(number)
    return [(where, kind + ",".join(numbers)) for (where, kind), numbers in found.items()]


# ------------------------------------------------------------------------------------------------ parts


def _parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "policy", config.explorer.policy
    yield "policy", config.evaluator.policy or config.explorer.policy
    yield "backend", config.trainer.backend


def _part(config: RunConfig, kind: str, name: str) -> str:
    config.build_part(kind, name)
    return f"{name} can be used"


def _own_reward(name: str, where: str) -> str:
    registry.resolve("reward", name, where=where)
    return f"{name} can be imported"


def _environment(config: RunConfig, where: str) -> str:
    config.build_environment(where)
    return f"{name_of_part(config.environments_named()[where], where)} can be used"


def _check_keep_best(config: RunConfig) -> None:
    """Refuse a canary as the measure of the best. Runs that have begun with one can still be opened."""
    best = config.trainer.keep_best
    if best is not None and config.evaluations[best].canary:
        raise ConfigError(f"trainer.keep_best: {best!r} is a canary, where the best earns least; name another")


def _transport(config: RunConfig) -> str:
    registry.resolve("transport", config.transport.kind, where="transport.kind")
    check_transport(config)
    return config.transport.kind


def _algorithm(config: RunConfig, where: str, named: object) -> str:
    part, options = config.build_algorithm(where)
    part(options)
    return f"{name_of_part(named, where)} can be used"  # type: ignore[arg-type]


def _pipelines(config: RunConfig) -> str | None:
    """Build every operator."""
    names = []
    for place in operator_places(config):
        place.build()
        names.append(f"{place.name} ({place.side} side)")
    ExperiencePipeline.of(config)
    return f"{', '.join(names)} can be used" if names else None


def _sections(config: RunConfig) -> Iterator[tuple[str, TasksetSection | EvaluationSection]]:
    for name, section in config.tasksets.items():
        yield f"tasksets.{name}", section
    for name, evaluation in config.evaluations.items():
        yield f"evaluations.{name}", evaluation


def _problems(config: RunConfig, place: str, section: TasksetSection | EvaluationSection) -> str | None:
    """Open a taskset and read its first problems. Tasksets that would be fetched from the hub, and those that another
    interpreter lists, are left to `check` and to the workers."""
    scheme, _, location = section.source.partition(":")
    spec = registry.find_spec(TasksetSpec, scheme if scheme in TASKSETS else section.source)
    if grows(section.source) or spec.venv or (spec.location == "folder or name" and _is_on_hub(location)):
        return None
    skip = section.options.get("skip", 0)
    with first_rows(LOOKED_AT + (skip if isinstance(skip, int) else 0)):
        taskset = open_taskset(place.partition(".")[2], section, config)
        problems = [taskset.problem(index) for index in range(min(len(taskset), LOOKED_AT))]
    where = f"{place}.reward"
    own = [registry.resolve("reward", use.name) for use in reward_uses(section.reward, where) if ":" in use.name]
    if any(isinstance(one, type) for one in own):  # a class may load a model when it is built
        return "can be read"
    if own or problems[0].answer is None:
        with suppress(MissingChecker):  # its rollouts wait for the package, among the dead letters
            check_needs(place, build_reward(section.reward, config, where=where, section=section), problems)
    return "can be read"


def _is_on_hub(location: str) -> bool:
    from rftstream.data.tasksets.hf import is_on_hub

    return is_on_hub(location)


def _demands(config: RunConfig) -> None:
    algorithms = [build_algorithm(config, stage.where) for stage in Stages.of(config).all]
    check_demands(config, algorithms, config.build_part("backend", config.trainer.backend)[0])


def _lora(config: RunConfig) -> None:
    if config.model.lora is not None and registry.find_spec(BackendSpec, config.trainer.backend).needs_peft:
        from rftstream.backends.torch import lora

        lora.require()
    if config.model.quantize is not None:
        able = [name for name, spec in registry.built_in(BackendSpec).items() if spec.quantizes]
        if not registry.find_spec(BackendSpec, config.trainer.backend).quantizes:
            raise ConfigError(
                f"model.quantize: got the backend {config.trainer.backend!r}, which holds no weights in four bits, "
                f"expected {' or '.join(map(repr, able))}; set trainer.backend, or leave quantize out"
            )
        rounded.require("model.quantize")
    if config.part_options("backend", config.trainer.backend).get("moments") == "8bit":
        rounded.require("backends.torch.moments")


# ------------------------------------------------------------------------------------------------ model


def _model(config: RunConfig, scratch: Path | None, *, weights: bool) -> str | None:
    """Check the model's tokenizer and template, and with `weights` the headers of its weights."""
    if scratch is None and config.model.path is None:
        return None
    place = (scratch or folder_of(config).path) / "model"
    fetch_initial(config, place)
    spec = prepare_model(config.model, place, config.run.seed, weights=False)
    if weights:
        check_complete(spec)
    _images(config, spec)
    _experts(config)
    renderer = open_renderer(spec)
    context = "unbounded" if renderer.context is None else f"{renderer.context:,} tokens"
    return f"{spec.name}: {renderer.vocabulary_size:,} token ids, context {context}"


def _images(config: RunConfig, spec: ModelSpec) -> None:
    """Check that every part that handles a model with images supports images."""
    policies = [] if config.without_tasks else [("explorer.policy", config.explorer.policy)]
    if config.evaluations:
        policies.append(("evaluator.policy", config.evaluator.policy or config.explorer.policy))
    for where, name in policies:
        takes = registry.find_spec(PolicySpec, name).takes_images
        check_takes_images(spec.folder, f"{where}: {name!r}", takes, advice="use 'hf', 'vllm' or 'openai'")
        part, _ = config.build_part("policy", name)
        if ImageTokens.of(spec.folder) is not None and (require := getattr(part, "require_images", None)) is not None:
            require(spec.folder)
    takes, name = registry.find_spec(BackendSpec, config.trainer.backend).takes_images, config.trainer.backend
    check_takes_images(spec.folder, f"trainer.backend: {name!r}", takes, advice="use 'torch'")
    has_critic = the_critic([build_algorithm(config, stage.where) for stage in Stages.of(config).all]) is not None
    check_takes_images(spec.folder, "trainer.algorithm: its critic", not has_critic, advice="use one without a critic")
    is_classifier = trained_spec(config, spec).as_classifier
    check_takes_images(spec.folder, "trainer.algorithm: a classifier", not is_classifier, advice="use a model of text")


def _experts(config: RunConfig) -> None:
    """Check that the experts that the trainer is to force are recorded, and that it can force them."""
    if EXPERTS not in config.trainer.replayed or config.without_tasks:
        return
    policy, backend = config.explorer.policy, config.trainer.backend
    if EXPERTS not in registry.find_spec(PolicySpec, policy).records:
        raise ConfigError(
            f"trainer.routing: explorer.policy {policy!r} does not record which experts tokens take, so they cannot be "
            "replayed; use 'hf' or 'vllm', or set 'own'"
        )
    part, _ = config.build_part("policy", policy)
    if (require := getattr(part, "require_experts", None)) is not None:
        require(config.explorer.devices)
    if not registry.find_spec(BackendSpec, backend).forces_experts:
        raise ConfigError(
            f"trainer.routing: trainer.backend {backend!r} cannot force experts; use 'torch', or set 'own'"
        )
    if getattr(config.build_part("backend", backend)[1], "compile", False):
        raise ConfigError(f"trainer.routing: got 'replay' with backends.{backend}.compile; leave one of them out")


def _check_replay(config: RunConfig, spec: ModelSpec, model: Any) -> list[str]:
    """Return a warning if rollouts with their experts may outgrow a record. ConfigError if the experts of the model,
    given without its weights, cannot be replayed."""
    from rftstream.models import exactness
    from rftstream.models.routers import Routers, Routing, not_replayed

    if Routers.of(model) is None:
        raise not_replayed("trainer.routing", model)
    if (probe := exactness.of_copy(type(model), model.config)) is not None:
        Routing.of(probe.model(exactness.EAGER), where="trainer.routing")
    beside, most = beside_bytes(config, spec.folder), max(one.max_tokens for one in _samplings(config))
    if most * (TOKEN_BYTES + beside) <= MAX_BODY_BYTES:
        return []
    return [
        f"trainer.routing: the experts of a token take {beside} bytes, so a rollout of {most:,} tokens "
        "(sampling.max_tokens) does not fit into a record; above "
        f"{MAX_BODY_BYTES // (TOKEN_BYTES + beside):,} tokens it ends as oversized, and is not trained"
    ]


def _samplings(config: RunConfig) -> list[Sampling]:
    return [sampling_for(config, one.sampling, where=f"tasksets.{name}") for name, one in config.tasksets.items()]


def check_computed(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Return what will be slow with this model. ConfigError for a model that the run's parts load but cannot compute.
    No weights are loaded."""
    trained = registry.find_spec(BackendSpec, config.trainer.backend).loads_model
    make = config.model.make
    is_known = spec.name == FAKE or (make is not None and make.family == DEFAULT_FAMILY)  # a plain decoder
    if is_known and config.trainer.router_aux_coef:
        from rftstream.models.routers import check_balanced

        check_balanced(None)
    if is_known and EXPERTS in config.trainer.replayed:
        raise ConfigError(f"trainer.routing: {spec.name!r} is no mixture of experts; leave the setting out")
    if is_known or not loads_model(config) or trained_spec(config, spec).as_classifier:
        return []
    from rftstream.backends.torch import paths
    from rftstream.backends.torch.network import recomputed_layers
    from rftstream.models.exactness import check_model, outline
    from rftstream.models.routers import Routers, check_balanced, check_sees_all
    from rftstream.weights.checkpoint_names import names_of

    model = outline(spec)
    check_model(model)
    if trained:
        names_of(model, spec.folder)
        options = config.build_part("backend", config.trainer.backend)[1]
        if getattr(options, "gradient_checkpointing", False):
            recomputed_layers(model)
        if config.trainer.router_aux_coef:
            check_sees_all(getattr(options, "sequence_parallel", 1))
            check_balanced(Routers.of(model))
    warnings = _check_replay(config, spec, model) if EXPERTS in config.trainer.replayed else []
    parts = {policy: registry.resolve("policy", policy) for policy in _policies(config)}
    doubts = [part.doubt_about(model) for part in parts.values() if hasattr(part, "doubt_about")]
    if trained:
        doubts.insert(0, paths.doubt_about(model))
    return [*warnings, *filter(None, doubts)]


def _policies(config: RunConfig) -> list[str]:
    policies = [] if config.without_tasks else [config.explorer.policy]
    if config.evaluations:
        policies.append(config.evaluator.policy or config.explorer.policy)
    return policies


def loads_model(config: RunConfig) -> bool:
    """Return whether any part of the run declares that it loads the model's weights."""
    loads = [registry.find_spec(PolicySpec, policy).loads_model for policy in _policies(config)]
    return registry.find_spec(BackendSpec, config.trainer.backend).loads_model or any(loads)


# ------------------------------------------------------------------------------------------------ places


def check_folder(folder: Path, *, where: str) -> str:
    """Create something in the nearest existing folder, and remove it again. ConfigError if that is refused. The rights
    alone do not show it (a read-only disk, a file in the way)."""
    folder = folder.absolute()
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".rftstream-", dir=there))
    except OSError as error:
        raise ConfigError(
            f"{where}: {folder}: nothing can be made in {there} ({error.strerror or error}), expected a folder to "
            "write to; mend its rights, or name another"
        ) from None
    return f"can be made in {there}"


def _store(config: RunConfig, folder: RunFolder, patience_s: float | None) -> str:
    """Write, read and delete an object, unless that would leave a new folder behind."""
    if place_on_disk(config.weights.store, folder.path) is not None:
        place = Path(store_place(config, folder))
        if folder.path not in place.parents:  # the run folder was checked already
            check_folder(place, where="weights.store")
        if not place.is_dir():
            return f"to be made in {next(parent for parent in place.parents if parent.is_dir())}"
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
