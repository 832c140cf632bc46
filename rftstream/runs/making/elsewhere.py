"""Settings of a run as its log has them, for a host that does not see the run folder and so has run files of its own.

Where these say otherwise, a run of 3,000 steps would end at once on a host whose file says 250."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rftstream.config.loader import from_toml, replace, to_toml
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import Claim
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ConfigError
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.runs.making.scoring_settings import is_of_a_reward, is_of_an_environment
from rftstream.runs.manifest import changed_in_text
from rftstream.runs.observer import Observer
from rftstream.service.control_view import ControlView
from rftstream.transport.base import Transport

_COMPARED = ("run.", "stages.", "sampling.", "feeder.", "buffer.", "trainer.", "algorithms.", "retention.")
_OF_A_HOST = ("run.name", "run.folder", "run.resume", "trainer.device", "trainer.colocate", "trainer.threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnLog:
    """The settings of a run according to its log. `settings_on_log` makes it."""

    settings: str
    """Those that the newest trainer wrote at its start, else those that the run began with, as TOML; "" if there are
    none yet."""
    version: int
    """The version in force."""
    trainer_epoch: int
    """Epoch of the newest trainer that has written a step; 0 before the first."""
    finished: bool


def settings_on_log(transport: Transport) -> OnLog:
    """Read the settings of a run from its log."""
    with closing(Observer(transport, whole=True, topics=("steps", "control"))) as observer:
        observer.catch_up()
        manifest, curve = observer.control.manifest, observer.curve
        return OnLog(
            settings=curve.settings or ("" if manifest is None else manifest.config),
            version=curve.version,
            trainer_epoch=curve.trainer_epoch,
            finished=observer.control.finished is not None,
        )


def _steps_in(text: str, config: RunConfig) -> int | None:
    """Return the steps that settings of the log say; those of `config` if the settings cannot be read."""
    found = _parsed(text) if text else None
    return config.steps if found is None else found.steps


@lru_cache(maxsize=2)
def _parsed(text: str) -> RunConfig | None:
    """Return settings of the log; None if they cannot be read. A progress view asks several times a second."""
    with suppress(ConfigError):
        return from_toml(text)
    return None


def steps_of(
    run: OpenRun, control: ControlView, resumes: Sequence[StepRecord], current: StepRecord | None
) -> int | None:
    """Return the version at which a run ends. A host without the run folder has but its own run files, and a trainer on
    another host goes by its own. Of `resumes` those may be missing that a glance at a long run passes over, also the
    start of the trainer of `current`."""
    manifest = control.manifest
    if manifest is None or (run.folder.exists() and not _trains_elsewhere(control)):
        return run.config.steps
    newest = resumes[-1] if resumes else None
    if current is None or current.name.trainer_epoch == 1:
        text = manifest.config
    elif newest is not None and newest.config and newest.name.trainer_epoch == current.name.trainer_epoch:
        text = newest.config
    else:
        text = settings_on_log(run.transport).settings
    return _steps_in(text, run.config)


def steps_followed(config: RunConfig, control: ControlView, settings: str) -> int | None:
    """Return the version at which a run ends that is supervised here. `settings`: those that its newest trainer wrote;
    if it is on another host, it goes by these."""
    return _steps_in(settings, config) if _trains_elsewhere(control) else config.steps


def _trains_elsewhere(control: ControlView) -> bool:
    claim = control.claims.get(RoleName.trainer)
    return claim is not None and claim.host not in ("", socket.gethostname())  # "": known by its steps alone


def way_on(folder: str) -> str:
    """Return the commands that go on with a run on this host."""
    if RunFolder(Path(folder)).exists():
        return f"`rftstream resume {folder}`"
    return "`rftstream resume` of its run files, or `rftstream workers` of them with the roles that are missing,"


def check_resumed(transport: Transport, config: RunConfig, run_id: str, sets: Sequence[str]) -> RunConfig | None:
    """Check, where a run is resumed from run files alone, that these do not change it: what changes is given by
    `--set`. Return the settings of the log (None: it has none that can be read). ConfigError, with the differences, if
    they do."""
    given = tuple(f"{one.partition('=')[0].strip()}." for one in sets)
    text = settings_on_log(transport).settings
    lines = [*_differences(text, config), *_other_store(text, config)]
    lines = [line for line in lines if not f"{line.partition(' ')[0]}.".startswith(given)]
    if lines:
        raise ConfigError(
            f"{run_id}: its log says other settings than the run files on this host, which has no config.toml of it: "
            f"{'; '.join(lines)}; give each by --set SECTION.KEY=VALUE, as it was or as it shall be"
        )
    with suppress(ConfigError):
        return replace(from_toml(text), base=config.base) if text else None
    return None


def check_end(transport: Transport, config: RunConfig, run_id: str) -> list[str]:
    """Return what a worker's run files say otherwise than the run's log. ConfigError if the run would end by it."""
    found = settings_on_log(transport)
    text, version = found.settings, found.version
    steps = _steps_in(text, config)
    if config.steps is not None and version >= config.steps and (steps is None or steps > version):
        raise ConfigError(
            f"{run_id}: run.steps: got {config.steps:,} from the run files on this host, but the run is at version "
            f"{version:,} of {'no end' if steps is None else format(steps, ',')}, and would end by it; mend the files"
        )
    return _differences(text, config)


class FilesHere:
    """The run files of a worker whose host does not see the run folder, compared with the run's log. What scores by
    another reward than the run, or plays another environment, waits for a trainer with that, since its share of the
    rollouts would have other rewards. `say`: gets the line that says what is waited for."""

    def __init__(
        self, role: str, transport: Transport, config: RunConfig, run_id: str, say: Callable[[str], None]
    ) -> None:
        self._role = role
        self._transport = transport
        self._config = config
        self._run_id = run_id
        self._say = say
        self._otherwise = ""
        self._looked_at: dict[TopicPartition, int] = {}
        self._trainer_epoch = 0
        """Epoch of the newest trainer whose settings were compared."""

    def differences(self) -> list[str] | None:
        """Return what the files say otherwise than the log, where the role goes by them; None while no trainer has
        begun with the rewards that they name. ConfigError if the run would end by them."""
        if self._role in (RoleName.feeder, RoleName.trainer):
            return check_end(self._transport, self._config, self._run_id)
        self._look()
        return None if self._otherwise else []

    def are_outdated(self, claims: Mapping[str, Claim]) -> bool:
        """Return whether a trainer has begun since with other rewards than the files name. `claims`: those in force.
        The log is read only after the claim of another trainer."""
        claim = claims.get(RoleName.trainer)
        if claim is not None and claim.epoch > self._trainer_epoch:
            self._look()
        return bool(self._otherwise)

    def refuse(self) -> None:
        """ConfigError, with the differences, if no trainer has begun with the rewards that the files name."""
        if self._otherwise:
            raise ConfigError(
                f"{self._otherwise}; mend the files, or change the run where it was made, by `rftstream resume FILES "
                "--set SECTION.KEY=VALUE`, and start this worker again"
            )

    def _look(self) -> None:
        """Compare the files with the log, if it has grown since."""
        if self._role not in (RoleName.explorer, RoleName.verifier, RoleName.evaluator):
            return
        admin = self._transport.admin
        if (ends := {**admin.end_offsets("steps"), **admin.end_offsets("control")}) == self._looked_at:
            return
        found = settings_on_log(self._transport)
        self._looked_at, self._trainer_epoch = ends, found.trainer_epoch
        said, self._otherwise = self._otherwise, "" if found.finished else self._scores_otherwise(found.settings)
        if self._otherwise and self._otherwise != said:
            self._say(
                f"{self._otherwise}; this {self._role} waits until a trainer has begun with that: change the run where "
                "it was made, by `rftstream resume FILES --set SECTION.KEY=VALUE`; if the run is right, mend the "
                "files, and they are read again"
            )

    def _scores_otherwise(self, settings: str) -> str:
        """Return how the worker would score or play otherwise than its run; "" if it would not."""
        lines = [line for line in _differences(settings, self._config) if self._is_followed(line)]
        if not lines:
            return ""
        do = "play" if self._role == RoleName.explorer else "score"
        return f"{self._run_id}: the run files on this host {do} otherwise than the run: {'; '.join(lines)}"

    def _is_followed(self, line: str) -> bool:
        """Return whether the role goes by a setting. An explorer scores nothing, and a verifier plays nothing."""
        scores = self._role != RoleName.explorer and is_of_a_reward(line)
        return scores or (self._role != RoleName.verifier and is_of_an_environment(line, self._config))


class TrainersElsewhere:
    """Tells what a trainer of another host does otherwise than the settings here say. `known`: settings on the log of
    which it says nothing."""

    def __init__(self, config: RunConfig, known: str) -> None:
        self._config = config
        self._known = known
        self._differs = False

    def news(self, settings: str) -> list[str]:
        """Return the differences to the settings that the newest trainer wrote, once for each trainer."""
        if settings == self._known:
            return []
        self._known = settings
        lines, differed = _of_training(changed_in_text(to_toml(self._config), settings), self._config), self._differs
        self._differs = bool(lines)
        if differed and not lines:
            return ["changed: the trainer works by the settings of this host again"]
        return [f"changed: {line} (so say the run files of the host that trains)" for line in lines]


def _differences(text: str, config: RunConfig) -> list[str]:
    return _of_training(changed_in_text(text, to_toml(config)) if text else (), config)


def _other_store(text: str, config: RunConfig) -> list[str]:
    """Return the line about another object store, in which a trainer would find none of the run's checkpoints."""
    lines = changed_in_text(text, to_toml(config)) if text else ()
    return [line for line in lines if line.startswith("weights.store ")]


def _of_training(lines: Sequence[str], config: RunConfig) -> list[str]:
    """Return the lines about settings that the hosts of a run must share. The trainer itself counts the steps of
    demonstrations alone."""
    counted = ("run.steps ",) if config.demonstrations_alone else ()
    own = (line for line in lines if not line.startswith((*_OF_A_HOST, *counted)))
    return [
        line for line in own if line.startswith(_COMPARED) or is_of_a_reward(line) or is_of_an_environment(line, config)
    ]
