"""Messages about a run as a whole: claims, the state that the run should have, and requests. Topic `control`."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from rftstream.contracts.message_spec import Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.versions import VersionName

_Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
"""A number in a map. The schema says its range; decoding has never checked it, and still reads whatever is on a log."""


@message("run_manifest", version=2, topic="control", key=lambda manifest: "manifest")
class RunManifest(Message):
    """The facts that are fixed for the whole run; the feeder's first record. `control`, key `manifest`."""

    run: str
    """Name of the run."""
    created_at: float
    """When the feeder first started."""
    config: str
    """The resolved config as TOML, secrets left out."""
    digests: dict[str, str]
    """model, tokenizer, chat_template, config, and `taskset.<name>` for each."""
    partitions: NonNegativeInt
    """Partitions of tasks, rollouts, partials and verified; fixed for the run."""
    shares: NonNegativeInt
    """Shares of `batches`; fixed for the run."""
    seed: NonNegativeInt
    """The run's seed; all others derive from it."""
    rftstream_version: str
    """Version of rftstream that created the run."""
    changed: tuple[str, ...] = ()
    """Settings in which a run differs from the run whose records it was made of, each as `key before -> after`."""


@message("claim", topic="control", key=lambda claim: f"claim/{claim.role}")
class Claim(Message):
    """A process's claim to a single role. `control`, key `claim/<role>`. The claim with the highest epoch is in
    force."""

    role: str
    """feeder, buffer, trainer or evaluator."""
    epoch: NonNegativeInt
    """Dense from 1, per role."""
    host: str
    """Host that the process runs on."""
    pid: NonNegativeInt
    """Process id there."""
    process: str
    """Name of the process in the logs."""
    claimed_at: float
    """When it took the role."""


class DesiredState(StrEnum):
    """The states that a run can be asked to be in."""

    running = "running"
    """Work goes on."""
    paused = "paused"
    """No admission, no steps; work in flight finishes."""
    draining = "draining"
    """No admission; what is admitted is finished, then the run ends."""


@message("run_state", topic="control", key=lambda state: "state")
class RunState(Message):
    """The state that the run was last asked to be in. `control`, key `state`."""

    state: DesiredState
    """The desired state."""
    by: str
    """Name of the person or process that asked for the state."""
    reason: str = ""
    """Why, for people."""
    since: float = 0.0
    """When it was asked for."""


@message("tasks_ended", version=2, topic="control", key=lambda end: "end")
class TasksEnded(Message):
    """The feeder admits no more. `control`, key `end`."""

    admitted: NonNegativeInt
    """Groups admitted in all."""
    reason: str
    """taskset, steps, draining, experts."""
    experts: NonNegativeInt = 0
    """Number of demonstrations of a run without tasks; each pass takes those that are trained on."""
    batches: NonNegativeInt | None = None
    """Number of batches that all passes of a run without tasks make."""


def _drawn_key(drawn: Drawn) -> str:
    return f"drawn/{sum(drawn.drawn.values())}" if drawn.alone else "drawn"


@message("drawn", version=2, topic="control", key=_drawn_key)
class Drawn(Message):
    """How far the feeder has drawn from the tasksets, and what operators of the task side said to it. Written by runs
    that have such operators, with each transaction of tasks, and alone where all that was drawn was skipped.

    `control`, key `drawn`, or `drawn/<number of problems drawn>` if it is alone, so that none of these is compacted
    away: a group's Task says by which facts the problems before it were skipped, and these have no group after them.
    For the tasksets together: problems drawn = admitted - put back + left out + skipped."""

    seen: NonNegativeInt
    """Operators decided by the facts in this many records of `outcomes`, the first ones."""
    admitted: NonNegativeInt
    """Groups admitted in all, those of this transaction included."""
    drawn: dict[str, _Count]
    """Taskset -> problems taken from it."""
    left_out: dict[str, _Count] = field(default_factory=dict)
    """Taskset -> problems left out since they were too long for the context."""
    skipped: dict[str, dict[str, dict[str, _Count]]] = field(default_factory=dict)
    """Taskset -> operator -> reason -> problems that the operator skipped."""
    changed: dict[str, dict[str, _Count]] = field(default_factory=dict)
    """Taskset -> operator -> problems that the operator changed."""
    put_back: NonNegativeInt = 0
    """Groups among the admitted ones that were not drawn, but put back."""
    alone: bool = False
    """Whether no group was admitted with it."""
    problems_end: NonNegativeInt | None = None
    """Growing tasksets had the problems below this offset of `problems`; None: the run has no growing taskset."""


@message("run_finished", topic="control", key=lambda finished: "finished")
class RunFinished(Message):
    """The run is over. `control`, key `finished`; a tombstone takes it back."""

    reason: str
    """steps, hours, reward, taskset, drained, no_signal, ..."""
    name: VersionName
    """The last version."""
    finished_at: float
    """When the last step was done."""
    exit_code: NonNegativeInt = 0
    """Exit code of the workers."""


class RequestKind(StrEnum):
    """The kinds of requests."""

    evaluate = "evaluate"
    """Evaluate a version now."""
    retry_dead = "retry_dead"
    """Put a dead group back as a new attempt."""


@message("request", version=2, topic="control", key=lambda request: f"request/{request.request_id}")
class Request(Message):
    """Something to be done once. `control`, key `request/<id>`."""

    request_id: str
    """A request with the same id is the same request."""
    kind: RequestKind
    """Kind of work that is requested."""
    arguments: dict[str, Any]
    """Arguments of this kind of request; plain values only."""
    expires_at: float
    """Time after which the request is not done any more."""
    by: str = ""
    """Name of the person or process that made the request; empty in version 1."""


@message("dataset_exported", topic="control", key=lambda exported: f"exported/{exported.export_id}")
class DatasetExported(Message):
    """Rollouts that left the run as a data set. `control`, key `exported/<id>`."""

    export_id: str
    """Derived from the folder, the rows and the time."""
    digest: str
    """`sha256:<hex>` of all rows."""
    form: str
    """sft, pairs, openai, atif or parquet."""
    filters: dict[str, Any]
    """The conditions that the rollouts met; plain values only."""
    through: tuple[_Count, ...]
    """The first offset of `verified`, per partition, that was not looked at."""
    num_rows: NonNegativeInt
    """Number of rows."""
    folder: str
    """Folder that was written, by its absolute path on the host of `by`."""
    by: str
    """Name of the person or process that took them."""
    exported_at: float = 0.0
    """When they were taken."""


@message("trimmed", topic="control", key=lambda trimmed: "trimmed")
class Trimmed(Message):
    """The record of all deletions of the run so far, written before they happen. `control`, key `trimmed`; the newest
    record covers all of them.

    Everything named here counts as gone from here on, whether it is still there or not: a process that was away may
    delete it at any time."""

    name: VersionName
    """The version of the newest checkpoint when this was written."""
    checkpoints: tuple[VersionName, ...]
    """The checkpoints that are kept; any other that is older than `name` is gone."""
    offsets: dict[str, tuple[_Count, ...]] = field(default_factory=dict)
    """Topic -> the first offset that is kept, per partition. Topics that are not named are whole."""
    version: NonNegativeInt = 0
    """The earliest version that training can go on from; batches below it are gone."""
    sequence: NonNegativeInt = 0
    """All groups below this number are done: each has its outcome, its siblings have been seen, its batch was trained.
    Records of `tasks`, `rollouts` and `verified` that are gone belong to these."""
    groups: dict[str, _Count] = field(default_factory=dict)
    """Number of groups below `sequence` by result: trained, expired, filtered, dead."""
    rollouts: dict[str, _Count] = field(default_factory=dict)
    """Number of the rollouts of those groups by result, likewise."""
    trimmed_at: float = 0.0
    """When this was written."""
