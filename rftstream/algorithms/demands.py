"""What algorithms ask of the rest of a run beside logprobs: a critic, a reference that is renewed, a greedy sibling."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rftstream import plugins
from rftstream.algorithms.base import Algorithm, CriticAlgorithm
from rftstream.algorithms.settings import CriticConfig
from rftstream.config import sampling_for
from rftstream.errors import ConfigError
from rftstream.models import ModelSpec
from rftstream.sections import RunConfig


def critic_of(algorithm: Algorithm) -> CriticConfig | None:
    """Its settings, if the algorithm has one."""
    return cast(CriticAlgorithm, algorithm).critic if "values" in algorithm.needs else None


def has_reference(algorithm: Algorithm) -> bool:
    return any(name.startswith("reference_") for name in algorithm.needs)


def check_demands(config: RunConfig, algorithm: Algorithm, backend_class: type) -> None:
    """ConfigError if the backend, or the run, cannot give what the algorithm or the run file asks for."""
    named, backend = config.trainer.algorithm, config.trainer.backend
    if critic_of(algorithm) is not None and not hasattr(backend_class, "hold_critic"):
        raise ConfigError(
            f"trainer.backend: {backend!r} cannot hold a critic, which {named!r} has; use 'torch', or an algorithm "
            "without one"
        )
    if config.trainer.reference_every is not None:
        if not has_reference(algorithm):
            raise ConfigError(
                f"trainer.reference_every: {named!r} has no reference as it is set, expected one; set its kl_coef, or "
                "leave this out"
            )
        if not hasattr(backend_class, "renew_reference"):
            raise ConfigError(
                f"trainer.reference_every: the backend {backend!r} cannot renew a reference; use 'torch', or leave it "
                "out"
            )
    has_greedy_sibling(config)


def critic_folder(config: RunConfig, critic: CriticConfig, spec: ModelSpec) -> Path:
    """The model folder that it begins as."""
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
    """Whether the first sibling of each group is sampled greedily, as a baseline. ConfigError where that leaves nothing
    to train on."""
    name = config.trainer.algorithm
    if not getattr(plugins.resolve("algorithm", name, where="trainer.algorithm"), "greedy_baseline", False):
        return False
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
