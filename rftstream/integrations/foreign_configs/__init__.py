"""Converts configs of other systems (TRL, verl, prime-rl) to run files. Scripts are read and never run.

In the order of reading:

    conversion  the target of a system's rules, and the report on each setting
    reading     YAML, TOML and shell scripts as flat settings
    trl_scopes, trl_rows, trl_script    a training script of TRL: its names, its datasets, its trainer
    trl_modules                         what is copied out of it
    trl_files, trl_sources, trl_losses, trl_training, trl
    verl_losses, verl
    prime_rl

To add a system: a module with a function of (files, gpus, trainer), and a line in `SYSTEMS`. The place of a setting in
a run file is defined once, in `rftstream.config.aliases`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from rftstream.integrations.foreign_configs.conversion import ConvertedConfig

SYSTEMS = {
    "trl": "rftstream.integrations.foreign_configs.trl:convert_trl",
    "verl": "rftstream.integrations.foreign_configs.verl:convert_verl",
    "prime-rl": "rftstream.integrations.foreign_configs.prime_rl:convert_prime_rl",
}
MARKS = {"trl": "model_name_or_path", "verl": "actor_rollout_ref", "prime-rl": "[orchestrator"}
"""System -> text that no config of another one has in it."""
TRAINERS = ("grpo", "rloo", "sft", "dpo", "reward")


def convert_config(
    system: str, files: Sequence[Path], *, gpus: int | None = None, trainer: str | None = None
) -> ConvertedConfig:
    """Return the run file for a config of another system. `gpus`: the number of GPUs it ran on, if the config does not
    say it; 0 makes a run for CPUs. `trainer`: TRL's trainer, for a YAML that does not name it."""
    module, _, name = SYSTEMS[system].partition(":")
    try:
        converted: ConvertedConfig = getattr(importlib.import_module(module), name)(list(files), gpus, trainer)
    except ConfigError as error:
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
        other = next((one for one, mark in MARKS.items() if mark in text), system)
        if other != system and MARKS[system] not in text:
            raise ConfigError(f"{error}; it looks like a config of {other}: `convert-config {other}`") from None
        raise
    return converted


def left_out(name: str) -> str | None:
    """Return a sentence about a setting of TRL that has no name here; None if TRL has none that is called so."""
    from rftstream.integrations.foreign_configs.conversion import decided_reason
    from rftstream.integrations.foreign_configs.reading import tables_of

    tables = tables_of("trl")
    if name not in tables["settings"].split():
        return None
    reason = decided_reason(name, tables["decided"])
    return f"{name}, of TRL: {reason or 'no setting here; `rftstream convert-config trl` says what becomes of it'}"
