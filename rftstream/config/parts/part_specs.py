"""What others may know of a part before it is imported: one record for each kind of part.

The table of a kind holds such a record for each built-in part. A part of a user's own declares the same by attributes
of its class, with the names of the fields. What it does not declare is as in the built-in part that it inherits from,
or has the default. `registry.spec` finds both.

Not here is what depends on a part's settings (an algorithm's `needs`, `loss_kinds`, `needs_spread`), and what a part
can be asked to do (a backend's `renew_reference`): its object says the one, and its class has a method for the other.

To add a capability: a field with a default here, its value in the table where it differs, and whoever asks for it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

ARCHITECTURE = "transformers.models.{kind}.modeling_{kind}"
"""Stands for the module of transformers that the run's model needs."""

Location = Literal["path", "folder or name", "name"]
"""The kinds of locations that can stand behind the colon of a taskset's source."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part as its table declares it."""

    kind: ClassVar[str]
    """The kind of part, as `registry.KINDS` has it."""
    is_inherited: ClassVar[bool] = True
    """Whether a user's class that inherits from a built-in part has what that one declares."""

    path: str
    """Place of the part: `module:Class`."""
    _: KW_ONLY
    preload: tuple[str, ...] = ()
    """Modules that are imported, beside its own, before a worker with this built-in part is forked: it imports them
    when it is built, and that takes seconds."""


@dataclass(frozen=True, slots=True)
class TransportSpec(PartSpec):
    """Declared properties of a transport, for code that does not import it."""

    kind = "transport"
    is_inherited = False  # a user's own is built as `Class(run, section)`, whatever it inherits from

    is_shared: bool = True
    """Whether processes can share its log. One that they cannot is for tests."""
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
    """Whether it loads the model's weights from the model folder."""
    takes_weights: bool = True
    """Whether anybody may give it weights. One that asks a server samples by those that the server has."""
    sleeps: bool = False
    """Whether it can give its device's memory free in the middle of requests: its class has `sleep` and `wake`."""
    update_setting: str = ""
    """The setting by which its server is given the trained weights, if it has one."""
    reads_shared: bool = False
    """Whether processes of its engine read weights where they are followed: they then lie in memory that these can
    open, and `load` is given SharedTensors."""
    is_estimated: bool = False
    """Whether `check` estimates its memory: it holds a model in torch, and its Config has `batch_size`."""
    takes_images: bool = False
    """Whether its model may be one that is shown images: its class takes `images`, an ImageCache, and its requests say
    where images stand."""
    constrains: bool = False
    """Whether it can constrain tokens to a form, such as a JSON schema: its requests may have a `constraint`."""


@dataclass(frozen=True, slots=True)
class BackendSpec(PartSpec):
    """Declared properties of a backend, for code that does not import it."""

    kind = "backend"

    loads_model: bool = False
    """Whether it loads the model's weights from the model folder."""
    needs_peft: bool = False
    """Whether it trains adapters (`model.lora`) with the package peft."""
    leaves_device: bool = False
    """Whether it can give its device's memory free between batches: its class has `leave_device`. If it trains in
    several processes it cannot."""
    processes_setting: str = ""
    """The setting that says in how many processes it trains, 1 by default, if it has one."""
    trains_classifiers: bool = False
    """Whether it can train a classifier with one output in the place of a policy."""
    is_estimated: bool = False
    """Whether `check` estimates its memory: it trains in torch, and its Config has the settings of the backend
    `torch`."""
    takes_images: bool = False
    """Whether its model may be one that is shown images: its class takes `images`, an ImageCache, and rows say where
    images stand."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec(PartSpec):
    """Declared properties of an algorithm, for code that does not import it."""

    kind = "algorithm"

    compares_siblings: bool = False
    """Whether all its advantages are 0 in groups of one."""
    greedy_baseline: bool = False
    """Whether the first sibling of each group is sampled at temperature 0."""
    needs_teacher: bool = False
    """Whether it learns from a teacher's logprobs, which a reward has to ask for."""
    replaces_groups: bool = False
    """Whether it is meant to be used with `buffer.zero_variance = "replace"`."""
    steps_setting: str = ""
    """The setting by which it learns from rewards of steps, `off` unless it does, if it has one."""
    trains_classifier: bool = False
    """Whether what it trains is no policy but a classifier with one output, such as a reward model."""
    max_tokens_setting: str = ""
    """The setting of its Config that should equal `sampling.max_tokens`, if it has one."""


@dataclass(frozen=True, slots=True)
class RewardSpec(PartSpec):
    """Declared properties of a reward, for code that does not import it."""

    kind = "reward"

    asks_teacher: bool = False
    """Whether it adds a teacher's logprobs to the verdict."""
    takes_given: bool = False
    """Whether it is the reward that the environment or agent gave, so that one has to be given."""
    steps_setting: str = ""
    """The setting by which it gives rewards of steps too, if it has one."""
    runs_programs: bool = False
    """Whether it runs what the policy wrote, in a sandbox: on this machine unless its setting `sandbox_url` is set."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec(PartSpec):
    """Declared properties of an environment, for code that does not import it."""

    kind = "environment"
    is_inherited = False  # a user's own may go on where the one that it inherits from ends

    has_one_turn: bool = False
    """Whether every rollout ends with the first completion."""
    is_immediate: bool = False
    """Whether its methods are plain functions that never block: they are then called in the sampling thread."""
    gives_reward: bool = True
    """Whether a reply of it may have a reward."""
    path_settings: tuple[str, ...] = ()
    """Its settings that are paths, relative to the run file: keys with dots between them, * for any key. Those of a
    user's own environment are left as they stand."""
    is_agent: bool = False
    """Whether it drives itself by model calls: the explorer's gateway serves it, and no turn loop."""


@dataclass(frozen=True, slots=True)
class TasksetSpec(PartSpec):
    """Declared properties of a taskset, for code that does not import it."""

    kind = "taskset"

    location: Location = "name"
    """Kind of location that stands behind the colon of its source. Paths and folders are relative to the run file."""
    has_rows: bool = False
    """Whether `open_rows` of its class opens the rows of a location for others; so demonstrations can be in it, too."""
    chooses_rows: bool = False
    """Whether its Config says which rows of a location are meant, as `subset` and `split` do."""
    grows: bool = False
    """Whether problems join it while the run goes on; it may have none when it is opened."""


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


@dataclass(frozen=True, slots=True)
class TrackerSpec(PartSpec):
    """Declared properties of a tracker, for code that does not import it. Run files name trackers by their sections, so
    all are built in."""

    kind = "tracker"

    package: str = ""
    """The package that it needs; an extra of the tracker's name brings it."""
    is_service: bool = True
    """Whether it is behind a network: built as `Class(setting, run)`, it keeps `TrackingService` and gets a thread of
    its own. One that is not is built as `Class(folder)`."""
    folder: str = ""
    """The folder in the run folder that it writes to, if there is one; `{setting}` stands for its setting."""
