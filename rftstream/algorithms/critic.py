"""Which algorithms have a critic, who can hold it, and what it begins as."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rftstream.algorithms.base import Algorithm, CriticAlgorithm
from rftstream.algorithms.settings import CriticConfig
from rftstream.errors import ConfigError
from rftstream.models import ModelSpec
from rftstream.sections import RunConfig


def critic_of(algorithm: Algorithm) -> CriticConfig | None:
    """Its settings, if the algorithm has one."""
    return cast(CriticAlgorithm, algorithm).critic if "values" in algorithm.needs else None


def check_critic(config: RunConfig, algorithm: Algorithm, backend_class: type) -> None:
    """ConfigError if the algorithm has a critic and the backend cannot hold one."""
    if critic_of(algorithm) is not None and not hasattr(backend_class, "hold_critic"):
        raise ConfigError(
            f"trainer.backend: {config.trainer.backend!r} cannot hold a critic, which {config.trainer.algorithm!r} "
            "has; use 'torch', or an algorithm without one"
        )


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
