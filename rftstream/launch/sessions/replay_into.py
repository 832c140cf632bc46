"""`replay --into`: trains the batches that a run recorded under other settings, as a new run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rftstream.algorithms.by_taskset import build_algorithm
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.launch.result import RunResult
from rftstream.launch.start import resume_if_incomplete
from rftstream.preflight.plan import Purpose, plan
from rftstream.queries import plain
from rftstream.queries.datasets.scorers import scored_otherwise
from rftstream.queries.formatting import plural
from rftstream.queries.people.taints import read_taints
from rftstream.replay.again import Report, check_versions, save_state
from rftstream.replay.branch import BatchImport, Extent, measure
from rftstream.replay.recorded import read_recorded, settings_of
from rftstream.replay.without import LeftOut, find_left_out
from rftstream.runs.folder import OpenRun, RunFolder, open_store, shown_path
from rftstream.runs.making.fork import (
    begun_config,
    changed_keys,
    check_begun_with,
    check_records,
    derive_config,
    differences,
)
from rftstream.runs.making.made_from import make_from
from rftstream.runs.manifest import changed_settings
from rftstream.runs.writes.additions import Say
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.transport.base import Transport
from rftstream.weights.checkpoints import CheckpointStore

CHANGEABLE = (
    "trainer",
    "stages",
    "algorithms",
    "backends",
    "evaluations",
    "evaluator",
    "policies",
    "weights",
    "trackers",
    "log",
    "transport",
    "run.steps",
    "run.hours",
    "run.stop_reward",
    "run.stop_reward_over",
)
"""Sections and settings that a replay may change, since the data does not depend on them."""
FEEDBACK = "feedback"
"""Used instead of names of rollouts: all rollouts whose judged reward has changed since they were trained."""
FIXED = ("trainer.shares", "transport.partitions")
"""Settings of these sections that stay fixed, since they define the layout of the data on the log."""


TRAINED_BY = ("trainer.", "stages.", "algorithms.", "backends.", "run.steps ")
"""Settings that the weights depend on. A resume may have changed them in the middle of the run."""
OF_TASKSET = re.compile(r"tasksets\.[a-z0-9_-]+\.algorithm\b")
"""Setting of a taskset that a replay may change: how the taskset is learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(plain.Report):
    """The plan of a replay into a new run. `Replay.plan` makes it; the command shows it."""

    run: str
    """Folder of the run whose batches are trained."""
    run_dir: str
    first: int
    """Version that the replay begins with. Its weights, optimizer and schedule are the recorded ones."""
    last: int
    num_batches: int
    num_groups: int
    num_rollouts: int
    changed: tuple[str, ...]
    """One line for each changed setting, as `key before -> after`."""
    left_out: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Batch -> number of `rollouts` and of whole `groups` that are left out of it."""

    def to_text(self) -> str:
        """Return the plan as lines for a person."""
        begins = f"version {self.first}" if self.first else "the model"
        groups = f"{self.num_groups:,} groups, {self.num_rollouts:,} rollouts"
        lines = [
            f"{shown_path(Path(self.run_dir))}: {self.num_batches:,} batches of {shown_path(Path(self.run))} "
            f"({groups}), from {begins} to version {self.last}"
        ]
        for batch, lost in sorted(self.left_out.items()):
            lines.append(
                f"batch {batch}, version {batch + 1}: without {plural(lost.get('rollouts', 0), 'rollout')}, "
                f"{plural(lost.get('groups', 0), 'whole group')}"
            )
        same = [] if self.left_out else ["no setting is changed: the same weights come out"]
        lines += [f"changed: {line}" for line in self.changed] or same
        return "\n".join(lines)


class Replay:
    """A replay of a run's batches into a folder with a new run. The command makes it, shows `plan`, and calls `prepare`
    and then `train`.

    The constructor checks everything: ConfigError if the replay cannot be done as asked.
    """

    def __init__(
        self,
        source: OpenRun,
        into: Path,
        *,
        sets: Sequence[str] = (),
        first: int = 0,
        last: int | None = None,
        without: Sequence[str] = (),
        scorer: str = "",
    ) -> None:
        """`without`: rollouts and groups to leave out; `feedback` for all whose judged reward has changed. `scorer`:
        the version of the reward without whose verdict a rollout is left out; see `scored_otherwise`."""
        self._source = source
        self._folder = RunFolder(into.resolve())
        self._recorded = read_recorded(Log(source.transport))
        placed = derive_config(source, self._folder, sets)
        begun = begun_config(source, self._folder, placed, has_versions=True)
        if last is None and begun is not None:
            last = (begun.run.imported_versions or (0, None))[1]  # a live run may have more steps by now
        last = check_versions(source.run_id, self._recorded, first, last)
        if first == last:
            raise ConfigError(
                f"{source.run_id}: versions {first} to {last}: no batch lies between, expected --from below --to"
            )
        self.config = self._configure(sets, first, last)
        check_begun_with(begun, self.config, self._folder)
        self._extent: Extent = measure(source.transport, first, last)
        self._left_out = self._find_left_out(without, scorer) if without or scorer else None
        if begun is not None:
            check_records(self._folder, self.config, self._said_of_left_out())

    @property
    def plan(self) -> Plan:
        """Return the plan of the replay."""
        extent = self._extent
        return Plan(
            run=str(self._source.folder.path),
            run_dir=str(self._folder.path),
            first=extent.first,
            last=extent.last,
            num_batches=extent.last - extent.first,
            num_groups=extent.num_groups,
            num_rollouts=extent.num_rollouts,
            changed=self._changed(),
            left_out={} if self._left_out is None else {k: dict(v) for k, v in self._left_out.batches.items()},
        )

    def _find_left_out(self, without: Sequence[str], scorer: str) -> LeftOut:
        names = [name for name in without if name != FEEDBACK]
        log, extent = Log(self._source.transport), self._extent
        if FEEDBACK in without:
            taints = read_taints(log, self._source.config)
            names += [taint.rollout_id for taint in taints if taint.batch_sequence < extent.last]
        if not names and not scorer:
            raise ConfigError(
                f"{self._source.run_id}: no batch holds anything that people judge otherwise now; nothing to leave out"
            )
        left_out = find_left_out(
            log,
            names,
            last=extent.last,
            min_siblings=self.config.buffer.min_siblings,
            foreign=extent.foreign,
            also=scored_otherwise(log, scorer)[0] if scorer else (),
            first=extent.first,
        )
        if (earliest := min(left_out.batches)) < extent.first:
            raise ConfigError(
                f"batch {earliest} holds some of what is left out, and lies before version {extent.first} that the "
                f"replay begins with; expected --from of at most {earliest}"
            )
        return left_out

    def _changed(self) -> tuple[str, ...]:
        """Return the changed settings. The settings that each trainer of these batches had are compared with the new
        ones; the run's other settings are compared in their current form."""
        now = self._source.config
        lines = [line for line in differences(self._source, self.config) if not _trained_by(line)]
        versions = range(self._extent.first + 1, self._extent.last + 1)
        for epoch in sorted({self._recorded.epoch_of(version) for version in versions}):
            then = settings_of(self._recorded.anchors.get(epoch), now)
            lines += [line for line in changed_settings(then, self.config) if _trained_by(line)]
        return tuple(sorted(set(lines)))

    # ------------------------------------------------------------------------------------------ the settings

    def _configure(self, sets: Sequence[str], first: int, last: int) -> RunConfig:
        fixed = [f"run.imported_versions=[{first}, {last}]", "verifier.count=0"]
        ended = read_control(self._source.transport).ended
        if ended is not None and ended.batches is not None and self._source.config.run.steps is None:
            fixed.append(f"run.steps={ended.batches}")  # rates depend on it; the feeder gave it to the trainers
        config = derive_config(self._source, self._folder, [*sets, *fixed])
        keys = changed_keys(self._source, config, sets)
        if refused := sorted(key for key in keys if not may_change(key)):
            raise ConfigError(
                f"{', '.join(refused)}: a replay trains what was recorded, which this cannot change any more; expected "
                f"settings of {', '.join(CHANGEABLE)}, but not {' or '.join(FIXED)}. "
                + (
                    "`rftstream rescore` scores with another reward"
                    if any(".reward" in key for key in refused)
                    else "Start a new run for others"
                )
            )
        if first and config.trainer.backend != self._source.config.trainer.backend:
            raise ConfigError(
                f"trainer.backend: version {first} is a state of {self._source.config.trainer.backend!r}, which "
                f"{config.trainer.backend!r} cannot go on from; replay from version 0"
            )
        if config.steps is not None and config.steps <= first:
            raise ConfigError(
                f"run.steps: got {config.steps}, expected more than the {first} versions that it begins with"
            )
        config = plan(config, Purpose.build).config
        # report errors in them before anything is copied
        if any(key.startswith(("trainer.backend", "backends.")) for key in keys):
            config.build_part("backend", config.trainer.backend)
        if any(key.startswith("algorithms.") or ".algorithm" in key for key in keys):
            build_algorithm(config)
        return config

    # ------------------------------------------------------------------------------------------ carrying it out

    def prepare(self, say: Say, report: Report = lambda version, last, different: None) -> None:
        """Prepare the new run for training. After a crash, a second call continues where the first one stopped."""
        folder, config = self._folder, self.config

        def import_into(transport: Transport) -> BatchImport:
            return BatchImport(
                self._source.transport,
                transport,
                folder.run_id,
                say,
                extent=self._extent,
                recorded=self._recorded,
                checkpoints=CheckpointStore(open_store(config, folder)),
                fill=lambda to: self._fill(to, say, report),
                rewards_kept=config.run.stop_reward_over,
                left_out=self._left_out,
            )

        changed = (*self.plan.changed, *self._said_of_left_out())
        make_from(self._source, folder, config, import_into, changed=changed)

    def _said_of_left_out(self) -> tuple[str, ...]:
        lost = self.plan.left_out.values()
        return (f"batches whole -> without {sum(one.get('rollouts', 0) for one in lost)} rollouts",) if lost else ()

    def train(self, *, progress: str = "auto", stream: TextIO | None = None) -> RunResult:
        """Train the new run as `rftstream resume` does. If it has ended, return its result."""
        return resume_if_incomplete(self._folder.path, progress=progress, stream=stream)

    def _fill(self, folder: Path, say: Say, report: Report) -> None:
        """Write the state of the first version. The state may have to be trained again from an older checkpoint."""
        found = save_state(self._source, self._recorded, self._extent.first, folder, report)
        if not found.complete:
            raise ConfigError(found.to_text())
        if not found.equal:
            say(f"version {self._extent.first} is not quite what was recorded: {found.to_text()}")


def may_change(key: str, changeable: Sequence[str] = CHANGEABLE) -> bool:
    """Return whether a replay may change this setting."""
    if OF_TASKSET.match(key):
        return True
    return key not in FIXED and any(key == one or key.startswith(f"{one}.") for one in changeable)


def _trained_by(line: str) -> bool:
    return line.startswith(TRAINED_BY) or OF_TASKSET.match(line) is not None
