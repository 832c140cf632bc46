"""Converts configs of other systems (TRL, verl, prime-rl) to run files. Scripts are read and never run.

In the order of reading:

    conversion  the target of a system's rules, and the report on each setting
    reading     YAML and TOML as flat settings
    shell       scripts that launch a training
    trl/scripts/scopes, beside, maps, rows, loaded, values, reader     a training script of TRL
    trl/scripts/rest                    what no rule reads of it
    trl/scripts/modules, slices         what is copied out of it
    trl/files, sources, losses, rewards, training, rules
    verl_losses, verl
    prime_rl

To add a system: a module with a function of (files, gpus, trainer), and a line in `SYSTEMS`. The place of a setting in
a run file is defined once, in `rftstream.config.aliases`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from rftstream.integrations.foreign_configs.conversion import ConvertedConfig

SYSTEMS = {
    "trl": "rftstream.integrations.foreign_configs.trl.rules:convert_trl",
    "verl": "rftstream.integrations.foreign_configs.verl:convert_verl",
    "prime-rl": "rftstream.integrations.foreign_configs.prime_rl:convert_prime_rl",
}
MARKS = {"trl": "model_name_or_path", "verl": "actor_rollout_ref", "prime-rl": "[orchestrator"}
"""System -> text that no config of another one has in it."""
TRAINERS = ("grpo", "rloo", "sft", "dpo", "reward")
METRICS = {
    "reward": "critic/score/mean critic/rewards/mean",
    "zero_variance_share": "frac_reward_zero_std",
    "length_mean": "completions/mean_length response_length/mean",
    "truncated_share": "completions/clipped_ratio response_length/clip_ratio",
    "clip_fraction": "clip_ratio/region_mean actor/pg_clipfrac",
    "importance_weight": "sampling/importance_sampling_ratio/mean",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "step_s": "step_time timing_s/step",
}
"""Metric of a step -> its names in the logs of TRL and verl."""

MOST_GPUS = 64
"""More GPUs than any one machine has. A run file names those of its own machine."""


def convert_config(
    system: str, files: Sequence[Path], *, gpus: int | None = None, trainer: str | None = None
) -> ConvertedConfig:
    """Return the run file for a config of another system. `gpus`: the number of GPUs it ran on, if the config does not
    say it; 0 makes a run for CPUs. `trainer`: TRL's trainer, for a YAML that does not name it. ConfigError for a number
    of GPUs that no machine has."""
    if gpus is not None and not 0 <= gpus <= MOST_GPUS:
        raise ConfigError(
            f"--gpus: got {gpus:,}, expected 0 to {MOST_GPUS}: a run file names the GPUs of one machine; give its own, "
            "others join with `rftstream workers`"
        )
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


def metric_here(name: str) -> str | None:
    """Return a sentence about a metric of TRL or verl; None if none that we have is called so there."""
    found = next((here for here, names in METRICS.items() if name in names.split()), None)
    if part := re.fullmatch("rewards/(.+)/mean", name):
        found = f"part/{part[1]}"
    if found is None:
        return None
    return f"{name}, a metric: {found} of a step here; `rftstream inspect RUN steps --last 1` shows it"
