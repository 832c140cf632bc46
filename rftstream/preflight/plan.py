"""The preparation of a run, declared once: import paths, thread limits, and the checks that come before its first use.

Whoever uses the parts that a config names calls `plan` first, and says by a `Purpose` what will be done with the run.
No other module adds import paths, goes through the list of requirements or checks the names of parts.

It stands in `preflight` and not in `launch`, since `check` and `doctor` report what it finds before a start. A worker
calls it, too, so it imports nothing that only a start needs before it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from rftstream.config.parts.part_names import check_part_names
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, RftError
from rftstream.threads import limit_threads

if TYPE_CHECKING:
    from rftstream.preflight.readiness import Looked
    from rftstream.runs.modules import OwnModule

STORE_PATIENCE_S = 5.0
"""Seconds that a store elsewhere is asked for a report. A run has the patience that its config says."""


class Purpose(Enum):
    """The caller's purpose with a run that is planned. It decides which requirements are looked at, and whether a
    problem is raised."""

    begin = "begin"
    """Begin a new run and start its workers here (`run`): all requirements are looked at, and a problem is raised."""
    resume = "resume"
    """Go on with a run and start its workers here (`resume`): the same requirements as for `begin`."""
    make = "make"
    """Make a run for workers that others start (`run --no-workers`): what only workers need is theirs to look at."""
    report = "report"
    """Say what stands in the way of a start (`check`, `doctor`): all requirements are looked at, and nothing is
    raised."""
    build = "build"
    """Build single parts, or open the log, of a run that may not exist yet (`try`, `rescore`, `topics` ...): the names
    of parts are checked, and nothing is imported."""
    join = "join"
    """Work for a run that was planned when it was made (`worker`, `evaluate`, `replay` ...): nothing is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The result of `plan` for the steps after it. `plan` makes it."""

    config: RunConfig
    purpose: Purpose
    run_dir: Path | None = None
    """The folder that the caller named. None: run.name decides the folder (preflight/folder_choice.py)."""
    looked: tuple[Looked, ...] = ()
    """Findings on the requirements that were looked at; empty for `build` and `join`."""
    modules: tuple[OwnModule, ...] = ()
    """The user's own modules that the config names, for `begin`, `resume` and `report`."""
    notes: tuple[str, ...] = ()
    """Notes to the user before the start: a line for each module that hides the one beside the run file."""

    @property
    def problems(self) -> tuple[Looked, ...]:
        """Return what stands in the way of a start. Empty where `plan` would have raised it."""
        return tuple(looked for looked in self.looked if looked.error is not None)


def plan(
    config: RunConfig,
    purpose: Purpose,
    *,
    run_dir: str | Path | None = None,
    role: str | None = None,
    scratch: Path | None = None,
) -> RunPlan:
    """Prepare this process for the parts of a run, and check what the purpose asks for.

    `role` is the role whose work this process does by itself: array libraries get its number of threads, so the call
    must come before they are imported. `scratch` is a folder in which a `report` prepares the model.

    Raises the problem itself if there is one, or a ConfigError with all of them; nothing for a `report`."""
    _add_import_paths(config)
    if role is not None:
        limit_threads(getattr(getattr(config, role, None), "threads", 1))
    named = None if run_dir is None else Path(run_dir)
    if purpose is Purpose.build:
        check_part_names(config)
    if purpose in (Purpose.build, Purpose.join):
        return RunPlan(config=config, purpose=purpose, run_dir=named)
    looked = _look(config, purpose, scratch)
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
        run_dir=named,
        looked=tuple(looked),
        modules=modules,
        notes=tuple(module.warning for module in modules if module.warning is not None),
    )


def _add_import_paths(config: RunConfig) -> None:
    """Add the folder of the run file and the one of the command, where users' own modules lie. They come last, to hide
    no others."""
    for folder in (os.getcwd(), str(Path(config.base).resolve())):
        if folder not in sys.path:
            sys.path.append(folder)


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
