"""Trains the recorded batches again and compares the results with the recorded ones. Nothing is written to the run."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rftstream.backends.base import Update
from rftstream.backends.numerics import computed_with, formulas_of, shares_prefixes, why_not_equal
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.versions import StepRecord, VersionName
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.models.vision.image_tokens import image_cache
from rftstream.replay.recorded import Recorded, next_batch, read_recorded, settings_of
from rftstream.roles.trainer.assembly import Batch
from rftstream.roles.trainer.progress import TrainerProgress
from rftstream.roles.trainer.recorded_batches import RecordedBatches
from rftstream.roles.trainer.schedule import rate_at
from rftstream.roles.trainer.training import Training, build_training
from rftstream.runs.folder import OpenRun
from rftstream.service.role import Log
from rftstream.weights.checkpoints import CheckpointStore
from rftstream.weights.snapshot import state_digest
from rftstream.weights.stores.media import MediaStore

Report = Callable[[int, int, int], None]
"""Function that is called after each batch with the version that the batch made, the last version of the replay, and
the number of versions that differ so far."""

NUM_KEPT = 100
"""Most differences that a report holds in full. Further ones are counted by version."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that the replay computed differently from what was recorded. `replay` collects them in a
    `ReplayReport`."""

    version: int
    batch: int | None
    """The batch that makes the version; None for the state that the replay starts from."""
    what: str
    """"weights", "metric NAME", "skipped", "batch", or "record"."""
    recorded: str
    replayed: str

    def to_text(self) -> str:
        """Return the difference as one line."""
        where = f"version {self.version}" + (f" (batch {self.batch})" if self.batch is not None else "")
        return f"{where}: {self.what}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """The findings of a replay. `replay` makes it, adds differences through `differs`, and returns it to the
    command."""

    run: str
    first: int
    """The first requested version."""
    last: int
    """The last requested version."""
    start: int
    """The version that the replay began with, at most `first`."""
    checkpoint: str | None
    """Trainer epoch and version of the checkpoint that the replay began with, as "epoch/version"; None if it began with
    the model."""
    num_batches: int = 0
    """Batches that were trained again."""
    num_digests: int = 0
    """Recorded digests of weights that were compared."""
    num_metrics: int = 0
    """Recorded metrics that were compared."""
    differences: list[Difference] = field(default_factory=list)
    """The first `NUM_KEPT` differences, in order of versions."""
    different_versions: set[int] = field(default_factory=set)
    """All versions that differ."""
    complete: bool = True
    """False if a batch could not be read. The versions after it were not trained then."""
    not_promised: list[str] = field(default_factory=list)
    """Reasons why equality bit for bit cannot be expected on this machine."""
    wall_s: float = 0.0
    """Seconds that the replay took."""

    @property
    def equal(self) -> bool:
        """Return whether everything that was compared is equal bit for bit."""
        return not self.different_versions

    def differs(self, version: int, batch: int | None, what: str, recorded: str, replayed: str) -> None:
        """Note a difference."""
        self.different_versions.add(version)
        if len(self.differences) < NUM_KEPT:
            self.differences.append(Difference(version, batch, what, recorded, replayed))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON, with the number of different versions in place of their list."""
        values = {name: value for name, value in asdict(self).items() if name != "different_versions"}
        return {**values, "num_different_versions": len(self.different_versions), "equal": self.equal}

    def to_text(self) -> str:
        """Return the report as lines for people."""
        origin = f"checkpoint {self.checkpoint}" if self.checkpoint else "the model"
        trained = f"{self.num_batches:,} batches from version {self.start} ({origin})"
        lines = [f"{self.run}: trained {trained} again in {self.wall_s:.1f} s"]
        compared = f"{self.num_digests:,} digests of weights and {self.num_metrics:,} metrics"
        if self.equal:
            lines.append(f"equal bit for bit, versions {self.start} to {self.last}: {compared}")
        else:
            lines.append(f"FIRST DIFFERENCE at {self.differences[0].to_text()}")
            lines += [
                f"  also {difference.to_text()}"
                for difference in self.differences[1:]
                if difference.version == self.differences[0].version
            ][:8]
            num_versions = self.num_batches + 1
            lines.append(f"{len(self.different_versions):,} of {num_versions:,} versions differ; compared {compared}")
        if not self.complete:
            lines.append(f"stopped there: versions up to {self.last} stand on a batch that cannot be read as it was")
        lines += [f"equality is not promised: {reason}" for reason in self.not_promised]
        return "\n".join(lines)


def replay(
    run: OpenRun,
    *,
    first: int = 0,
    last: int | None = None,
    device: str | None = None,
    report: Report = lambda version, last, different: None,
) -> ReplayReport:
    """Train versions `first` to `last` (default: the newest) again, from the newest checkpoint at or before `first`.

    ConfigError if there are no such versions, or no state to begin with.
    """
    recorded = read_recorded(Log(run.transport))
    last = check_versions(run.run_id, recorded, first, last)
    return _train_again(run, recorded, first, last, device, report)


def save_state(run: OpenRun, recorded: Recorded, version: int, folder: Path, report: Report) -> ReplayReport:
    """Write the content of a checkpoint of the version into `folder`, by training again from the newest checkpoint at
    or before it."""
    return _train_again(run, recorded, version, version, None, report, save=folder)


def check_versions(run_id: str, recorded: Recorded, first: int, last: int | None) -> int:
    """Return the last requested version, the newest if `last` is None. ConfigError if there are no such versions."""
    last = recorded.version if last is None else last
    if not recorded.anchors:
        raise ConfigError(f"{run_id}: no trainer has recorded anything yet, expected steps; wait for the first")
    if not 0 <= first <= last <= recorded.version:
        raise ConfigError(
            f"{run_id}: versions {first} to {last}: expected 0 <= --from <= --to <= {recorded.version}, the newest "
            "version in force"
        )
    return last


def check_has_program(run: OpenRun, recorded: Recorded, first: int, last: int) -> None:
    """Raise ConfigError if a joined loop has made one of these versions: only its user has the program."""
    joined: dict[int, bool] = {}
    for version in range(max(first, 1), last + 1):
        epoch = recorded.epoch_of(version)
        if epoch not in joined:
            backend = settings_of(recorded.anchors.get(epoch), run.config).trainer.backend
            joined[epoch] = registry.find_spec(BackendSpec, backend).is_joined
        if joined[epoch]:
            before = f"; `--to {version - 1}` replays the versions before" if version > 1 else ""
            raise ConfigError(
                f"{run.run_id}: version {version} was made by a joined loop, expected a backend: the log has the batch "
                f"that it was trained on, but only the loop's user has the program that trained it{before}. `rftstream "
                "weights verify` checks all weights by their digests, and `replay --into` with another trainer.backend "
                "trains the recorded batches in another run"
            )


def _train_again(
    run: OpenRun,
    recorded: Recorded,
    first: int,
    last: int,
    device: str | None,
    report: Report,
    save: Path | None = None,
) -> ReplayReport:
    began = time.monotonic()
    check_has_program(run, recorded, first + 1, last)
    with closing(_RecordedBackends(run, recorded, device)) as backends:
        again = _begin(run, recorded, backends, first)
        checkpoint = again.checkpoint
        found = ReplayReport(
            run=run.run_id,
            first=first,
            last=last,
            start=again.progress.version,
            checkpoint=f"{checkpoint.trainer_epoch}/{checkpoint.version}" if checkpoint else None,
        )
        again.go_on(found, report)
        found.not_promised = backends.why_not_equal()
        if save is not None:
            again.save(save)
    found.wall_s = round(time.monotonic() - began, 3)
    return found


@dataclass(eq=False, slots=True)
class _Again:
    """Trains recorded batches, each under the settings that its trainer had. `_begin` makes it; `_train_again` calls
    `go_on` and perhaps `save`."""

    run: OpenRun
    recorded: Recorded
    backends: _RecordedBackends
    in_use: _BackendInUse
    """The backend, which holds the state that training continues from."""
    progress: TrainerProgress
    """Progress of the training in that state."""
    checkpoint: VersionName | None
    """The checkpoint of the starting state; None for the model."""

    def go_on(self, found: ReplayReport, report: Report) -> None:
        """Train up to the last version and compare each version with its record."""
        progress = self.progress
        self._compare_weights(progress.version, None, found)
        with closing(RecordedBatches(self.run.transport, progress.positions, progress.version)) as batches:
            for version in range(progress.version + 1, found.last + 1):
                batch, why = next_batch(batches)
                if batch is None:
                    found.differs(version, version - 1, "batch", "trained", why)
                    found.complete = False
                    return
                self.in_use = self.backends.use(version)
                self._step(version, batch, found)
                report(version, found.last, len(found.different_versions))

    def save(self, folder: Path) -> None:
        """Write the backend's state into `folder`, in the form of a checkpoint."""
        self.in_use.training.backend.save(folder)

    def _step(self, version: int, batch: Batch, found: ReplayReport) -> None:
        record = self.recorded.steps.get(version)
        stages = Stages.of(self.in_use.config)
        training = self.in_use.training.at(stages.at(version - 1))
        lr = rate_at(stages, version - 1)
        update, values = self._update(training, batch, lr, skip=record is not None and record.skipped)
        found.num_batches += 1
        if record is None:
            found.differs(version, batch.sequence, "record", "none on steps that can be read", "a step")
            return
        if record.skipped != update.skipped:
            found.differs(version, batch.sequence, "skipped", str(record.skipped), str(update.skipped))
        self._compare_metrics(record, values, found)
        self._compare_weights(version, batch.sequence, found)

    def _update(self, training: Training, batch: Batch, lr: float, *, skip: bool) -> tuple[Update, dict[str, float]]:
        """Train a batch. With `skip` (the recorded step skipped the batch) the weights stay unchanged, whatever the
        update gives now."""
        if not skip:
            update, values, _ = training.update(batch, lr)
            return update, values
        with tempfile.TemporaryDirectory(prefix="rftstream-") as scratch:
            training.backend.save(Path(scratch))
            update, values, _ = training.update(batch, lr)
            if not update.skipped:
                training.backend.load(Path(scratch))
        return update, values

    def _compare_weights(self, version: int, batch: int | None, found: ReplayReport) -> None:
        digests = self.recorded.digests(version)
        if not digests:
            return
        replayed = state_digest(self.in_use.training.backend.served_tensors())
        for _, recorded in digests:
            found.num_digests += 1
            if recorded != replayed:
                found.differs(version, batch, "weights", recorded, replayed)

    def _compare_metrics(self, record: StepRecord, values: Mapping[str, float], found: ReplayReport) -> None:
        """Compare the metrics that both steps have. `training.update` returns none that depend on the clock."""
        for name in sorted(record.metrics.keys() & values.keys()):
            recorded, replayed = record.metrics[name], values[name]
            found.num_metrics += 1
            if recorded != replayed and not (math.isnan(recorded) and math.isnan(replayed)):
                version, batch = record.name.version, record.batch_sequence
                found.differs(version, batch, f"metric {name}", repr(recorded), repr(replayed))


@dataclass(frozen=True, slots=True)
class _BackendInUse:
    """The open backend, with its settings. `_RecordedBackends.use` makes it."""

    config: RunConfig
    training: Training


class _RecordedBackends:
    """Opens one backend at a time, with the settings of a version's trainer. `_train_again` makes it, calls `use` for
    each version, then `why_not_equal` and `close`."""

    def __init__(self, run: OpenRun, recorded: Recorded, device: str | None) -> None:
        self._run = run
        self._recorded = recorded
        self._device = device
        self._in_use: _BackendInUse | None = None
        self._said: dict[str, Mapping[str, str]] = {}
        """Libraries, device and threads that the replayed trainers recorded, each distinct record once, by its repr."""
        self._here: dict[str, str] = {}

    def use(self, version: int) -> _BackendInUse:
        """Return a backend with the settings of the trainer that made the version. It continues from the state of the
        backend before."""
        anchor = self._recorded.anchors.get(self._recorded.epoch_of(version))
        config = settings_of(anchor, self._run.config)
        check_has_program(self._run, self._recorded, version, version)
        said = anchor.computed_with if anchor is not None else {}
        config = with_prefixes_of(config, said)
        self._said[repr(sorted(said.items()))] = said
        old = self._in_use
        if old is not None and _trains_alike(old.config, config):
            self._in_use = _BackendInUse(config, _as_recorded(old.training, said))
            return self._in_use
        settings = config.trainer
        device = self._device or settings.device
        spec = prepare_model(
            config.model, self._run.folder.model, config.run.seed, device=device, threads=settings.threads
        )
        images = image_cache(spec.folder, MediaStore(self._run.store()).get)
        self._in_use = new = _BackendInUse(config, _as_recorded(build_training(config, spec, images), said))
        with tempfile.TemporaryDirectory(prefix="rftstream-") as scratch:
            if old is not None:  # a resumed trainer reads this state from its checkpoint
                old.training.backend.save(Path(scratch))
                old.training.backend.close()
            new.training.backend.open()
            if old is not None:
                new.training.backend.load(Path(scratch))
        self._here = computed_with(device, settings.threads)
        return new

    def why_not_equal(self) -> list[str]:
        """Return the reasons why equality bit for bit cannot be expected on this machine; none if it can."""
        # the replay uses the recorded numbers of threads, so the last trainer's number says nothing about the others
        here = {name: value for name, value in self._here.items() if name != "threads"}
        return why_not_equal(list(self._said.values()), here)

    def close(self) -> None:
        """Close the backend, if one is open."""
        if self._in_use is not None:
            self._in_use.training.backend.close()


def _begin(run: OpenRun, recorded: Recorded, backends: _RecordedBackends, first: int) -> _Again:
    """Open a backend with the newest good checkpoint in force at or before `first`, or with the model if there is
    none. ConfigError if batches that are needed were deleted."""
    checkpoints = CheckpointStore(run.store())
    begins = [offset for _, offset in sorted(run.transport.admin.begin_offsets("batches").items())]

    def usable(name: VersionName) -> bool:
        return name.version <= first and recorded.in_force(name)

    with tempfile.TemporaryDirectory(prefix="rftstream-") as scratch:
        found = checkpoints.newest(usable, folder=Path(scratch))
        if found is None or _deleted(TrainerProgress.from_state(found[1]).positions, begins):
            if any(begins):
                raise ConfigError(_earliest(run, recorded, checkpoints, begins, first))
            return _Again(run, recorded, backends, backends.use(1), TrainerProgress(positions=tuple(begins)), None)
        name, state = found
        in_use = backends.use(name.version + 1)
        in_use.training.backend.load(Path(scratch))
    return _Again(run, recorded, backends, in_use, TrainerProgress.from_state(state), name)


def _earliest(run: OpenRun, recorded: Recorded, checkpoints: CheckpointStore, begins: list[int], first: int) -> str:
    """Return the error text for a start whose batches are deleted."""
    versions = []
    for name in checkpoints.names():
        if recorded.in_force(name):
            state = checkpoints.newest(lambda one, name=name: one == name)  # type: ignore[misc]
            if state is not None and not _deleted(TrainerProgress.from_state(state[1]).positions, begins):
                versions.append(name.version)
    advice = f"replay with --from {min(versions)}" if versions else "there is no checkpoint that it could begin with"
    return f"{run.run_id}: the batches before {begins} are deleted, expected those after version {first}; {advice}"


def _as_recorded(training: Training, said: Mapping[str, str]) -> Training:
    """Return the training with mini-batches cut as by the trainer that recorded `said`."""
    return replace(training, stratified=formulas_of(said) != "1")


def with_prefixes_of(config: RunConfig, said: Mapping[str, str]) -> RunConfig:
    """Return the config with `share_prefixes` off if the trainer that recorded `said` did not know the setting."""
    name, tables = config.trainer.backend, config.backends
    if shares_prefixes(said) or not hasattr(config.build_part("backend", name)[1], "share_prefixes"):
        return config
    return replace(config, backends={**tables, name: {**tables.get(name, {}), "share_prefixes": False}})


def _deleted(positions: tuple[int, ...], begins: list[int]) -> bool:
    return any(position < begin for position, begin in zip(positions, begins, strict=True))


def _trains_alike(one: RunConfig, other: RunConfig) -> bool:
    """Return whether a backend and an algorithm built by one config also serve for the other. Learning rates and
    intervals do not matter, since they are read again for each batch."""
    one_trains, other_trains = (
        (config.trainer, config.stages, config.algorithms, config.backends, config.algorithms_named())
        for config in (one, other)
    )
    return one_trains == other_trains
