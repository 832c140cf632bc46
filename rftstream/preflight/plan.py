"""The preparation of a run, declared once: import paths, thread limits, and the checks that come before its first use.

Code that uses the parts of a config calls `plan` first, with a `Purpose` that says what it will do with the run. No
other module adds import paths, checks the list of requirements or checks the names of parts.

It is in `preflight` and not in `launch`, since `check` and `doctor` report its findings before a start. A worker calls
it, too, so it imports modules that only a start needs as late as possible.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from rftstream.config.parts.part_names import check_part_names
from rftstream.config.placement import CPU, Machine, Placement, chosen_settings, place, with_devices_of
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError, RftError
from rftstream.threads import limit_threads

if TYPE_CHECKING:
    from rftstream.preflight.readiness import Looked
    from rftstream.runs.modules import OwnModule

STORE_PATIENCE_S = 5.0
"""Seconds to wait for a remote store during a report. A run waits as long as its config says."""


_added: set[str] = set()
"""Folders of run files that this process has added to its import paths."""


class Purpose(Enum):
    """The purpose of planning a run. It decides which requirements are checked, and whether a problem is raised."""

    begin = "begin"
    """Begin a new run and start its workers here (`run`): all requirements are checked, and a problem is raised."""
    resume = "resume"
    """Continue a run and start its workers here (`resume`): the same requirements as for `begin`."""
    make = "make"
    """Make a run for workers that others start (`run --no-workers`): requirements of workers alone are left to the
    workers."""
    report = "report"
    """Report what prevents a start (`check`, `doctor`): all requirements are checked, and nothing is raised."""
    build = "build"
    """Build single parts, or open the log, of a run that may not exist yet (`try`, `rescore`, `topics` ...): the names
    of parts are checked, and nothing is imported."""
    join = "join"
    """Work for a run that was planned when it was made (`worker`, `evaluate`, `replay` ...): nothing is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The result of `plan`, for the steps after it."""

    config: RunConfig
    """The config with devices and engine for this machine. Use it from here on."""
    purpose: Purpose
    placement: Placement
    run_dir: Path | None = None
    """The folder that the caller named. None: run.name decides the folder (preflight/folder_choice.py)."""
    looked: tuple[Looked, ...] = ()
    """Findings on the checked requirements; empty for `build` and `join`."""
    modules: tuple[OwnModule, ...] = ()
    """The user's own modules that the config names, except for `make` and `join`."""
    notes: tuple[str, ...] = ()
    """Notes to the user before the start: a line for each module that hides another one of the user's."""

    @property
    def problems(self) -> tuple[Looked, ...]:
        """Return the problems that prevent a start. Empty for purposes with which `plan` raises them."""
        return tuple(looked for looked in self.looked if looked.error is not None)


def plan(
    config: RunConfig,
    purpose: Purpose,
    *,
    run_dir: str | Path | None = None,
    role: str | None = None,
    scratch: Path | None = None,
) -> RunPlan:
    """Prepare this process for the parts of a run, and do the checks of the purpose.

    `role` is the role that this process works as. Array libraries get its number of threads, so call this before they
    are imported. `scratch` is a folder in which a `report` prepares the model.

    Raise a single problem itself, and several as one ConfigError. For a `report`, raise nothing.
    """
    add_import_paths(config.base)
    placement = _placed(config, purpose, role)
    config = placement.config
    if role is not None:
        limit_threads(getattr(getattr(config, role, None), "threads", 1))
    named = None if run_dir is None else Path(run_dir)
    if purpose is Purpose.join:
        return RunPlan(config=config, purpose=purpose, placement=placement, run_dir=named)
    if purpose is Purpose.build:
        check_part_names(config)
    looked = [] if purpose is Purpose.build else _look(config, purpose, scratch)
    if purpose is not Purpose.report:
        _refuse([one for one in looked if one.error is not None])
    if purpose is Purpose.begin and config.run.imported_from is not None:
        raise ConfigError(
            "run.imported_from: is for `rftstream rescore` and `replay --into`, expected none in a run file"
        )
    modules = () if purpose is Purpose.make else _own_modules(config)
    return RunPlan(
        config=config,
        purpose=purpose,
        placement=placement,
        run_dir=named,
        looked=tuple(looked),
        modules=modules,
        notes=tuple(module.warning for module in modules if module.warning is not None),
    )


def _placed(config: RunConfig, purpose: Purpose, role: str | None) -> Placement:
    """Return the config with devices and engine for this machine, or for a role that is alone on it. With `make` the
    devices stay open, since workers elsewhere choose their own."""
    joins, is_open = purpose in (Purpose.build, Purpose.join), bool(chosen_settings(config))
    if (joins and not is_open) or (purpose is Purpose.join and role is None):
        return Placement(config=config, machine=Machine())
    from rftstream.models.machine import read_machine

    machine = read_machine()
    alone = purpose is Purpose.make or role is not None
    placement = place(machine, config, alone=alone)
    if purpose is not Purpose.make:
        return placement
    return dataclasses.replace(placement, config=with_devices_of(placement.config, config))


def placed_here(config: RunConfig, wanted: Mapping[str, int]) -> RunConfig:
    """Return the config with devices and engine for workers that share this machine. `wanted`: role -> their number;
    the other roles are elsewhere, and take none of its GPUs."""
    if not chosen_settings(config):
        return config
    from rftstream.models.machine import read_machine

    explorer = dataclasses.replace(config.explorer, count=max(1, wanted.get(RoleName.explorer, 0)))
    shared = dataclasses.replace(config, explorer=explorer)
    for name in (RoleName.trainer, RoleName.evaluator):
        if name not in wanted:
            shared = dataclasses.replace(shared, **{name: dataclasses.replace(getattr(shared, name), device=CPU)})
    return place(read_machine(), shared).config


def add_import_paths(base: str | Path) -> None:
    """Add the folder of the run file and the current one, which may have the user's modules.

    They come last, so that they hide no other modules. The folder of the run file comes before the current one, also
    where Python itself put that one first, and before the folders of other run files.
    """
    own, here = str(Path(base).resolve()), os.path.realpath(os.getcwd())
    entries = [entry for entry in sys.path if entry != own or own not in _added]
    places = [os.path.realpath(entry) for entry in entries]
    first = next((n for n, place in enumerate(places) if place in {own, here, *_added}), len(places))
    if first == len(places) or places[first] != own:
        entries.insert(first, own)
        _added.add(own)
    sys.path[:] = entries if here in (own, *places) else [*entries, here]


def _look(config: RunConfig, purpose: Purpose, scratch: Path | None) -> list[Looked]:
    from rftstream.preflight import readiness

    patience_s = STORE_PATIENCE_S if purpose is Purpose.report else None
    return readiness.look(config, scratch=scratch, patience_s=patience_s, here=purpose is not Purpose.make)


def _refuse(problems: Sequence[Looked]) -> None:
    if len(problems) == 1 and isinstance(problems[0].error, RftError):
        raise problems[0].error
    if problems:
        raise ConfigError("\n".join(problem.found for problem in problems))


def _own_modules(config: RunConfig) -> tuple[OwnModule, ...]:
    from rftstream.runs.modules import find_modules

    return tuple(find_modules(config))
