"""Chooses sizes of a run that fit a machine, for a first run file: the largest whose estimated memory has room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftstream.config import loader
from rftstream.config.placement import Machine, place
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.preflight.checks.check_report import CheckReport
from rftstream.preflight.checks.check_resources import disk_of, memory_of
from rftstream.preflight.memory import MAIN

ROOM = 0.9
"""Share of a place's memory that the estimate may take."""
RECOMPUTED: Mapping[str, Any] = {"backends": {"torch": {"gradient_checkpointing": True}}}
LARGE: Mapping[str, Any] = {
    RoleName.trainer: {"tokens_per_microbatch": 32_768},
    RoleName.explorer: {"max_concurrent": 256},
}
"""For GPUs with room."""
SIZES: tuple[Mapping[str, Any], ...] = (
    {},
    {RoleName.trainer: {"tokens_per_microbatch": 8_192}},
    {RoleName.trainer: {"tokens_per_microbatch": 4_096}, **RECOMPUTED},
    {RoleName.trainer: {"tokens_per_microbatch": 2_048}, RoleName.explorer: {"max_concurrent": 32}, **RECOMPUTED},
    {RoleName.trainer: {"tokens_per_microbatch": 1_024}, RoleName.explorer: {"max_concurrent": 16}, **RECOMPUTED},
)
"""Settings that are tried, the largest first; {} are the defaults."""


def fitting_sizes(machine: Machine, config: RunConfig, report: CheckReport) -> dict[str, Any]:
    """Return the sections of the run file that make the run fit, by the facts that `check` has found. If nothing fits,
    return the smallest sizes."""
    found: dict[str, Any] = {}
    for sizes in (*([LARGE] if machine.gpus else []), *SIZES):
        found = dict(sizes)
        if _fits(machine, _with(config, sizes), report):
            break
    disk = disk_of(config, report)
    return {**found, "weights": {"keep": 2}} if disk is not None and not disk.fits else found


def _with(config: RunConfig, sizes: Mapping[str, Any]) -> RunConfig:
    values = loader.to_dict(config)
    for section, settings in sizes.items():
        values[section] = {**values.get(section, {}), **settings}
    return loader.from_dict(values)


def _fits(machine: Machine, config: RunConfig, report: CheckReport) -> bool:
    memory = memory_of(place(machine, config).config, report)
    room = {MAIN: machine.memory_bytes, **{f"cuda:{n}": gpu.memory_bytes for n, gpu in enumerate(machine.gpus)}}
    return memory is None or all(memory.total(one) <= ROOM * room.get(one, 0) for one in memory.places)
