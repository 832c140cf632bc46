"""`replay --pipeline`: applies other operators to the groups that a run recorded, and trains them as a new run.

Nothing is sampled or scored. The run begins with the model that the other one began with. Its buffer makes the batches
from all recorded groups, in the order in which they were admitted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.config.data_pipelines.pipeline_files import with_pipelines_of
from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.launch.result import RunResult
from rftstream.launch.sessions.replay_into import CHANGEABLE, FIXED, may_change
from rftstream.launch.start import resume_if_incomplete
from rftstream.preflight.plan import Purpose, plan
from rftstream.queries.datasets.scorers import scored_otherwise
from rftstream.queries.formatting import plural
from rftstream.queries.plain import Report
from rftstream.replay.regrouped import VerdictImport
from rftstream.runs.folder import (
    OpenRun,
    RunFolder,
    shown_path,
)
from rftstream.runs.making.fork import (
    begun_config,
    changed_keys,
    check_begun_with,
    check_records,
    derive_for_groups,
    differences,
)
from rftstream.runs.making.imported import check_whole
from rftstream.runs.making.made_from import make_from
from rftstream.runs.writes.additions import Say
from rftstream.service.role import Log
from rftstream.transport.base import Transport

OF_PIPELINE = re.compile(r"(tasksets\.[a-z0-9_-]+\.)?pipeline\b")
"""Settings of operators. They are shown by the operators' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan(Report):
    """The plan of a replay under other operators. `PipelineReplay.plan` makes it; the command shows it."""

    run: str
    """Folder of the run whose groups are decided anew."""
    run_dir: str
    operators: tuple[str, ...]
    """Operators of the experience side, in order, as `place: name`."""
    changed: tuple[str, ...]
    """One line for each changed setting, as `key before -> after`."""
    unscored: int = 0
    """Rollouts that are left out, since another version of the reward than the wanted one scored them."""
    algorithm: str = ""
    """Algorithm of the new run."""

    def to_text(self) -> str:
        """Return the plan as lines for a person."""
        lines = [f"{shown_path(Path(self.run_dir))}: all groups of {shown_path(Path(self.run))}, decided anew"]
        lines += [f"operator {line}" for line in self.operators] or ["no operators: every group is kept"]
        if self.unscored:
            lines.append(f"without {plural(self.unscored, 'rollout')} that another version of the reward scored")
            if self.algorithm == "grpo":
                lines.append(
                    "better with --algorithm topr: later versions sampled what is left, which grpo learns little of"
                )
        others = [line for line in self.changed if not OF_PIPELINE.match(line)]
        return "\n".join([*lines, *(f"changed: {line}" for line in others)])


class PipelineReplay:
    """A replay of a run's recorded groups under other operators. The command makes it, shows `plan`, and calls
    `prepare` and then `train`.

    The constructor checks everything: ConfigError if the replay cannot be done as asked."""

    def __init__(self, source: OpenRun, file: Path, into: Path, *, sets: Sequence[str] = (), scorer: str = "") -> None:
        """`scorer`: the version of the reward without whose verdict a rollout is left out; see `scored_otherwise`."""
        self._source = source
        self._folder = RunFolder(into.resolve())
        self.config = self._configure(file, sets)
        begun = begun_config(source, self._folder, self.config, has_versions=False)
        check_begun_with(begun, self.config, self._folder)
        if begun is None:
            check_whole(source.transport, "tasks", "rollouts", "verified")
        self._unscored, of = scored_otherwise(Log(source.transport), scorer) if scorer else (frozenset[str](), "")
        self._said = (f"verdicts all -> of {of} alone",) if scorer else ()
        if begun is not None:
            check_records(self._folder, self.config, self._said)

    @property
    def plan(self) -> PipelinePlan:
        """Return the plan of the replay."""
        places = [place for place in operator_places(self.config) if place.side == "experience"]
        return PipelinePlan(
            run=str(self._source.folder.path),
            run_dir=str(self._folder.path),
            operators=tuple(f"{place.where}: {place.name}" for place in places),
            changed=differences(self._source, self.config),
            unscored=len(self._unscored),
            algorithm=self.config.trainer.algorithm,
        )

    def _configure(self, file: Path, sets: Sequence[str]) -> RunConfig:
        source, needs, made = self._source, "groups to decide about", "groups that are decided anew"
        config = derive_for_groups(source, self._folder, [*sets, "verifier.count=0"], needs=needs, made=made)
        keys = changed_keys(self._source, config, sets)
        changeable = ("buffer", *CHANGEABLE, *(() if config.experts is not None else ("experts",)))  # as a whole
        if refused := sorted(key for key in keys if not may_change(key, changeable)):
            raise ConfigError(
                f"{', '.join(refused)}: a replay decides and trains anew what was recorded, which this cannot change "
                f"any more; expected settings of buffer, {', '.join(CHANGEABLE)}, but not {' or '.join(FIXED)}"
            )
        config = with_pipelines_of(config, file)
        for place in operator_places(config):
            place.build()
        config = plan(config, Purpose.build).config
        build_algorithm(config)
        return config

    def prepare(self, say: Say) -> None:
        """Prepare the new run for training. After a crash, a second call continues where the first one stopped."""
        folder, config = self._folder, self.config

        def import_into(transport: Transport) -> VerdictImport:
            return VerdictImport(self._source.transport, transport, folder.run_id, say, unscored=self._unscored)

        changed = (*self.plan.changed, *self._said)
        make_from(self._source, folder, config, import_into, changed=changed, other_operators=True)

    def train(self, *, progress: str = "auto", stream: TextIO | None = None) -> RunResult:
        """Train the new run as `rftstream resume` does. If it has ended, return its result."""
        return resume_if_incomplete(self._folder.path, progress=progress, stream=stream)
