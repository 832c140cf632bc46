"""Demands of algorithms on the rest of a run, beside logprobs: a critic, a renewed reference, a greedy sibling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from rftstream.algorithms.base import Algorithm, CriticAlgorithm
from rftstream.algorithms.settings import CriticConfig
from rftstream.config.loader import sampling_for
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import AlgorithmSpec, BackendSpec
from rftstream.config.sections import RunConfig, name_of_part
from rftstream.config.stages import Stages
from rftstream.contracts.token_values import EXPERTS
from rftstream.errors import ConfigError
from rftstream.models.spec import ModelSpec


def critic_of(algorithm: Algorithm) -> CriticConfig | None:
    """Return the settings of the algorithm's critic, or None if it has none."""
    return cast(CriticAlgorithm, algorithm).critic if "values" in algorithm.needs else None


def has_reference(algorithm: Algorithm) -> bool:
    """Return whether the algorithm needs the logprobs of a reference."""
    return any(name.startswith("reference_") for name in algorithm.needs)


def the_critic(algorithms: Sequence[Algorithm]) -> CriticConfig | None:
    """Return the settings of the critic that the stages share; None without a critic. ConfigError if stages have
    different ones."""
    critics = [critic for algorithm in algorithms if (critic := critic_of(algorithm)) is not None]
    if any(critic != critics[0] for critic in critics):
        raise ConfigError("stages: critics of different settings, expected one for the whole run; set them alike")
    return critics[0] if critics else None


def check_demands(config: RunConfig, algorithms: Sequence[Algorithm], backend_class: type) -> None:
    """Raise ConfigError if the backend or the run cannot meet the demands of the run file and of the algorithms (one
    for each stage)."""
    named, backend = config.trainer.algorithm, config.trainer.backend
    renews = [
        stage for stage in Stages.of(config).all if stage.own_reference and has_reference(algorithms[stage.number])
    ]
    if renews and not hasattr(backend_class, "renew_reference"):
        raise ConfigError(
            f"stages.{renews[0].number} ({renews[0].name}): the backend {backend!r} cannot renew a reference, which it "
            "would begin with; set its reference = \"run\", or use 'torch' or 'deepspeed'"
        )
    if the_critic(algorithms) is not None and not hasattr(backend_class, "hold_critic"):
        raise ConfigError(
            f"trainer.backend: {backend!r} cannot hold a critic, which {named!r} has; use 'torch' or 'deepspeed', or "
            "an algorithm without one"
        )
    if config.trainer.reference_every is not None:
        if not any(map(has_reference, algorithms)):
            raise ConfigError(
                f"trainer.reference_every: {named!r} has no reference as it is set, expected one; set its kl_coef, or "
                "leave this out"
            )
        if not hasattr(backend_class, "renew_reference"):
            raise ConfigError(
                f"trainer.reference_every: the backend {backend!r} cannot renew a reference; use 'torch' or "
                "'deepspeed', or leave it out"
            )
    _check_classifier(config)
    has_greedy_sibling(config)


def trains_classifier(config: RunConfig) -> bool:
    """Return whether the run trains a classifier instead of a policy."""
    names = {name_of_part(named, where) for where, named in config.algorithms_named().items()}
    return any(registry.find_spec(AlgorithmSpec, name).trains_classifier for name in names)


def trained_spec(config: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Return the model in the form in which the run trains it."""
    return replace(spec, as_classifier=trains_classifier(config), replays_experts=EXPERTS in config.trainer.replayed)


def _check_classifier(config: RunConfig) -> None:
    """Raise ConfigError if the run trains a classifier and asks for something that only a policy can do."""
    if not trains_classifier(config):
        return
    named, backend = config.trainer.algorithm, config.trainer.backend
    asked = {
        "stages": "stages are trained with one head" if config.stages else "",
        "evaluations": "nothing can be sampled from a classifier; see experts.held_out" if config.evaluations else "",
        "tasksets": "nothing can be sampled from a classifier" if not config.without_tasks else "",
        "model.lora": "adapters of classifiers are not trained here" if config.model.lora is not None else "",
    }
    for where, why in asked.items():
        if why:
            raise ConfigError(f"{where}: {named!r} trains a classifier, and {why}; leave it out")
    if not registry.find_spec(BackendSpec, backend).trains_classifiers:
        raise ConfigError(f"trainer.backend: {backend!r} cannot train a classifier, which {named!r} does; use 'torch'")


def critic_folder(config: RunConfig, critic: CriticConfig, spec: ModelSpec) -> Path:
    """Return the model folder from which the critic starts."""
    if critic.model is None:
        return spec.folder
    folder = (Path(config.base) / Path(critic.model).expanduser()).resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"algorithms.{config.trainer.algorithm}.critic.model: {folder}: no model folder, expected one of a reward "
            "model; without the setting the critic begins as the policy's model"
        )
    return folder


def has_greedy_sibling(config: RunConfig) -> bool:
    """Return whether the first sibling of each group is sampled greedily, as a baseline. ConfigError if nothing is left
    to train on, or if other groups of the run have no greedy sibling."""
    name = config.trainer.algorithm
    named = {where: name_of_part(one, where) for where, one in config.algorithms_named().items()}
    greedy = [where for where, one in named.items() if registry.spec(AlgorithmSpec, one, where=where).greedy_baseline]
    if not greedy:
        return False
    if len(named) > 1 or config.stages:
        raise ConfigError(
            f"{greedy[0]}: each group of {named[greedy[0]]!r} has a greedy sibling, expected it for all groups of a "
            "run, as trainer.algorithm alone, without stages"
        )
    if config.feeder.group_size < 2:
        raise ConfigError(
            f"feeder.group_size: got 1, expected at least 2: with {name!r} one sibling of each group is its baseline, "
            "and the others are trained on"
        )
    for taskset, section in config.tasksets.items():
        where = f"tasksets.{taskset}.sampling"
        if sampling_for(config, section.sampling, where=where).temperature == 0:
            raise ConfigError(
                f"{where}.temperature: got 0, expected more: with {name!r} greedy siblings are the baseline of those "
                "that are drawn"
            )
    return True
