"""The properties that a part declares, which others may read before the part is imported. Each kind of part has one
class.

The table of a kind holds such a record for each built-in part. A user's own part declares the same properties by
attributes of its class, with the names of the fields. A property that it does not declare has the value of the built-in
part that it inherits from, or the default. `registry.spec` returns the record of both.

Two things are not here. Properties that depend on a part's settings (an algorithm's `needs`, `loss_kinds`,
`needs_spread`) are attributes of its object. Optional operations (a backend's `renew_reference`) are methods of its
class.

To add a capability: add a field with a default here, set its value in the tables where it differs, and read it where it
matters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

ARCHITECTURE = "transformers.models.{kind}.modeling_{kind}"
"""Stands for the module of transformers that the run's model needs."""

Location = Literal["path", "folder or name", "name"]
"""The kinds of locations that can stand behind the colon of a taskset's source."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """The declaration of a part in its table."""

    kind: ClassVar[str]
    """The kind of part, as `registry.KINDS` has it."""
    is_inherited: ClassVar[bool] = True
    """Whether a user's class that inherits from a built-in part also inherits the declaration of that part."""

    path: str
    """Place of the part: `module:Class`."""
    _: KW_ONLY
    preload: tuple[str, ...] = ()
    """Modules that are imported before a worker with this built-in part is forked, beside the part's own module. They
    are those that the part imports when it is built, which takes seconds."""


@dataclass(frozen=True, slots=True)
class TransportSpec(PartSpec):
    """Declared properties of a transport, for code that does not import it."""

    kind = "transport"
    is_inherited = False  # a user's own class is built as `Class(run, section)`, whatever it inherits from

    is_shared: bool = True
    """Whether several processes can share the log. A log that they cannot share is for tests."""
    in_run_folder: bool = False
    """Whether the log lies in the run folder, so that this host alone has it. It is built as `Class(folder, create=)`
    with the folder of the log; `transport.servers` and `transport.options` mean nothing to it."""
    takes_create: bool = False
    """Whether its class takes `create`, which says whether the log may be made or has to be there."""


@dataclass(frozen=True, slots=True)
class PolicySpec(PartSpec):
    """Declared properties of a policy, for code that does not import it."""

    kind = "policy"

    loads_model: bool = False
    """Whether it loads the model's weights from the model folder. Its class may have `doubt_about(model)`, which says
    for `check` why it will be slow."""
    takes_weights: bool = True
    """Whether others may give it weights. A policy that asks a server samples with the server's weights."""
    sleeps: bool = False
    """Whether it can free its device's memory in the middle of requests: its class has `sleep` and `wake`."""
    update_setting: str = ""
    """The setting by which its server gets the trained weights, if it has one."""
    reads_shared: bool = False
    """Whether processes of its engine read the weights themselves. The weights then lie in memory that these processes
    can open, and `load` gets SharedTensors."""
    is_estimated: bool = False
    """Whether `check` estimates its memory: it holds a model in torch, and its Config has `batch_size`."""
    takes_images: bool = False
    """Whether its model may take images: its class takes `images`, an ImageCache, and its requests say where images
    stand."""
    records: tuple[str, ...] = ()
    """Kinds of values that it can record beside tokens, by their names in `Segment.beside`: its class takes `records`,
    the kinds that are wished for."""
    lists_sets: bool = False
    """Whether it records the sets that `top_p` and `min_p` leave only where `top_k` bounds them."""
    constrains: bool = False
    """Whether it can constrain tokens to a form, such as a JSON schema: its requests may have a `constraint`."""
    says_load: bool = False
    """Whether it says how busy its engine is: its class has `engine_load`."""
    is_joined: bool = False
    """Whether a loop outside of the role does its work: its class takes `desk` and `max_concurrent`."""


@dataclass(frozen=True, slots=True)
class BackendSpec(PartSpec):
    """Declared properties of a backend, for code that does not import it."""

    kind = "backend"

    loads_model: bool = False
    """Whether it loads the model's weights from the model folder."""
    needs_peft: bool = False
    """Whether it trains adapters (`model.lora`) with the package peft."""
    quantizes: bool = False
    """Whether it can hold the weights beside adapters in four bits (`model.quantize`)."""
    leaves_device: bool = False
    """Whether it can free its device's memory between batches: its class has `leave_device`. A backend of several
    processes cannot."""
    forces_experts: bool = False
    """Whether it can force the experts of a mixture that the sampler recorded (`trainer.routing`)."""
    processes_setting: str = ""
    """The setting for the number of training processes, 1 by default, if there is such a setting."""
    trains_classifiers: bool = False
    """Whether it can train a classifier with one output instead of a policy."""
    is_estimated: bool = False
    """Whether `check` estimates its memory: it trains in torch, and its Config has the settings of the backend
    `torch`."""
    takes_images: bool = False
    """Whether its model may take images: its class takes `images`, an ImageCache, and rows say where images stand."""
    is_joined: bool = False
    """Whether a loop outside of the role trains, so that `run` starts no trainer: its class takes `desk`."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec(PartSpec):
    """Declared properties of an algorithm, for code that does not import it."""

    kind = "algorithm"

    compares_siblings: bool = False
    """Whether all its advantages are 0 in groups of one."""
    greedy_baseline: bool = False
    """Whether the first sibling of each group is sampled at temperature 0."""
    needs_teacher: bool = False
    """Whether it learns from a teacher's logprobs. A reward has to ask the teacher for them."""
    replaces_groups: bool = False
    """Whether it is meant to be used with `buffer.zero_variance = "replace"`."""
    steps_setting: str = ""
    """The setting that turns on learning from rewards of steps, `off` by default, if there is such a setting."""
    trains_classifier: bool = False
    """Whether it trains a classifier with one output, such as a reward model, and no policy."""
    max_tokens_setting: str = ""
    """The setting of its Config that should equal `sampling.max_tokens`, if it has one."""


@dataclass(frozen=True, slots=True)
class RewardSpec(PartSpec):
    """Declared properties of a reward, for code that does not import it."""

    kind = "reward"

    asks_teacher: bool = False
    """Whether it adds a teacher's logprobs to the verdict."""
    takes_given: bool = False
    """Whether it uses the reward of the environment or agent, which then has to give one."""
    steps_setting: str = ""
    """The setting that makes it give rewards of steps too, if there is such a setting."""
    runs_programs: bool = False
    """Whether it runs programs of the policy in a sandbox, on this machine unless its setting `sandbox_url` is set."""
    asks_server: bool = False
    """Whether each score costs a call of a model server."""
    group: bool = False
    """Whether it compares siblings: it is called once for all rollouts of a group."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec(PartSpec):
    """Declared properties of an environment, for code that does not import it."""

    kind = "environment"
    is_inherited = False  # a user's own environment may continue where the built-in one ends

    has_one_turn: bool = False
    """Whether every rollout ends with the first completion."""
    is_immediate: bool = False
    """Whether its methods are plain functions that never block: they are then called in the sampling thread."""
    gives_reward: bool = True
    """Whether its replies may have rewards."""
    path_settings: tuple[str, ...] = ()
    """Its settings that are paths relative to the run file, as dotted keys with * for any key. Paths of a user's own
    environment are left unchanged."""
    code_settings: tuple[str, ...] = ()
    """Its settings that name code of the user's, such as `module:Thing`: it is part of the environment's version."""
    host_settings: tuple[str, ...] = ()
    """Its settings that say where it runs, and no reward: they are no part of its version."""
    revision: str = "1"
    """Raised by hand when a built-in environment does something else than before."""
    is_agent: bool = False
    """Whether it is an agent that makes model calls itself. The explorer's gateway serves it, and there is no turn
    loop."""


@dataclass(frozen=True, slots=True)
class TasksetSpec(PartSpec):
    """Declared properties of a taskset, for code that does not import it."""

    kind = "taskset"

    location: Location = "name"
    """Kind of location behind the colon of its source. Paths and folders are relative to the run file."""
    has_rows: bool = False
    """Whether others can open the rows of a location by `open_rows` of its class, so that demonstrations can have this
    source."""
    chooses_rows: bool = False
    """Whether its Config selects rows of a location, as `subset` and `split` do."""
    grows: bool = False
    """Whether problems join it during the run. It may be empty when it is opened."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Environment of its problems where the section names none: `name`, and settings."""
    named_by: str = ""
    """The setting of the environment's `options`, as a dotted key, that the source's location is. The environment then
    gets the options of the source, save for `size`."""
    reward: str = ""
    """Reward of its problems where the section names none."""
    location_name: str = "NAME"
    """Word for the location in lists."""
    package: str = ""
    """Package that it needs, as it is imported."""
    pip: str = ""
    """Names that pip installs it by."""

    @property
    def venv(self) -> str:
        """Return the folder below `venvs/` beside the run file that may have an interpreter for a hosted environment;
        empty for others."""
        return str(self.environment.get("target", ""))

    @property
    def install(self) -> str:
        """Return the line that installs the package."""
        place = f"venvs/{self.venv}"
        own = f"python -m venv {place} && {place}/bin/" if self.venv else ""
        return f"{own}pip install {self.pip}"

    def options_of(self, location: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the environment that a source with this location has."""
        found: dict[str, Any] = copy.deepcopy(dict(self.environment.get("options", {})))
        _put(found, options)
        *outer, last = self.named_by.split(".")
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = location
        return found

    def environment_of(self, location: str, settings: Mapping[str, Any]) -> str | dict[str, Any]:
        """Return the `environment` of a section with a source like this. `settings`: the section's `options`."""
        name = str(self.environment["name"])
        if not self.named_by:
            return name
        given = {key: value for key, value in settings.items() if key != "size"}
        own = given.pop("options", {})
        return {**self.environment, **given, "options": self.options_of(location, own)}


def _put(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values into a dict, tables within tables."""
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _put(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


@dataclass(frozen=True, slots=True)
class OperatorSpec(PartSpec):
    """Declared properties of an operator, for code that does not import it."""

    kind = "operator"

    side: Literal["task", "experience"] = "task"
    """Side on which the operator works: on problems before they are tasks (feeder), or on groups before they are
    experience (buffer)."""
    by_version: bool = False
    """Whether its answer depends on the trainer's version at which a group is trained. While a group waits for a batch,
    the operators of its taskset are then asked again at each version."""
    by_problem: bool = False
    """Whether its answer depends on the problem alone, whatever the run has learned: `check` leaves out what it
    skips."""


@dataclass(frozen=True, slots=True)
class TrackerSpec(PartSpec):
    """Declared properties of a tracker, for code that does not import it. Run files name trackers by their sections, so
    all are built in."""

    kind = "tracker"

    package: str = ""
    """The package that it needs; an extra of the tracker's name brings it."""
    is_service: bool = True
    """Whether it is behind a network. Such a tracker is built as `Class(setting, run)`, keeps `TrackingService` and
    gets its own thread. Others are built as `Class(folder)`."""
    folder: str = ""
    """The folder in the run folder that it writes to, if there is one; `{setting}` stands for its setting."""
