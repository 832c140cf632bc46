"""The feeder: admits groups of tasks, as the log allows, and makes the run.

Its cursor (how many groups, how far in each taskset) travels as metadata with its position on `steps`, in the
transaction that admits the tasks; nothing else is remembered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Request, RunManifest, TasksEnded
from rftstream.contracts.ids import derive_seed, group_id, rollout_id
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling, Task
from rftstream.contracts.versions import StepRecord
from rftstream.data.demonstrations.split import trained_numbers
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import mix, order
from rftstream.errors import ConfigError, ContractError
from rftstream.models.rendering import Renderer
from rftstream.roles.feeder import FEEDER
from rftstream.roles.feeder.admission import Admission, VersionInForce
from rftstream.roles.feeder.retries import Retries
from rftstream.service.role import Log, Publish, Received, SingleTransaction
from rftstream.service.step_defaults import SingleStepDefaults
from rftstream.transport.base import Position

log = logging.getLogger(__name__)

STEPS = TopicPartition("steps", 0)
MAX_TASKS_A_TRANSACTION = 512


@dataclass(slots=True)
class Source:
    """A taskset of the run."""

    taskset: Taskset
    weight: float
    sampling: Sampling
    environment: str
    too_long: str
    shuffle: bool
    passes: int | None
    renderer: Renderer
    greedy_baseline: bool = False
    """The first sibling of each group is sampled at temperature 0, for algorithms that compare with it."""

    def sampling_of(self, sibling: int) -> Sampling:
        """Return how a sibling of a group is sampled."""
        return replace(self.sampling, temperature=0.0) if self.greedy_baseline and sibling == 0 else self.sampling

    @property
    def size(self) -> int | None:
        """Problems in all passes; None without end."""
        return None if self.passes is None else self.passes * len(self.taskset)


class FeederStep(SingleStepDefaults):
    """The step of the feeder: it makes the run, and admits groups of tasks. `workers/feeder.py` makes it; SingleService
    calls it, in this order:

    - `recover` reads `control`, `outcomes` and `steps`, and takes the cursor from the committed position.
    - `absorb` counts outcomes and versions, which decide how many groups may be admitted.
    - `advance` returns the manifest of a new run first, then transactions of tasks with the cursor after them, and at
      last the word that there are no more. Nothing is admitted while the step is paused; draining ends the tasks.
    - `committed` makes that cursor its own.
    """

    def __init__(
        self,
        *,
        log_: Log,
        config: RunConfig,
        sources: Mapping[str, Source],
        context: int | None,
        make_manifest: Callable[[], RunManifest],
        check_same_run: Callable[[RunManifest], None],
        clock: Clock,
        keep: Callable[[Problem], Problem] = lambda problem: problem,
    ) -> None:
        """`log_`: the run's log, of which nothing is known before `recover`. `keep` puts a problem's images where every
        host can read them."""
        self._keep = keep
        self._config = config
        self._sources = sources
        self._context = context
        self._make_manifest = make_manifest
        self._check_same_run = check_same_run
        self._clock = clock
        self._partitions = config.transport.partitions
        self._paused = False
        self._draining = False
        self._reset(log_)

    def _reset(self, log_: Log) -> None:
        self._in_force = VersionInForce()
        stages = Stages.of(self._config) if self._config.stages else None
        self._admission = Admission(
            self._config.feeder.groups_per_batch, self._config.feeder.max_staleness, stages=stages
        )
        metrics.MAX_STALENESS.set(self._config.feeder.max_staleness)
        self._drawn: dict[str, int] = dict.fromkeys(self._sources, 0)
        """Problems taken from each taskset, left-out ones included."""
        self._left_out: dict[str, int] = dict.fromkeys(self._sources, 0)
        self._steps_position = 0
        self._manifest: RunManifest | None = None
        self._pending_manifest: RunManifest | None = None
        self._ended = False
        self._pending: _Cursor | None = None
        self._retries = Retries(log_)
        self._num_demonstrations = 0

    # ------------------------------------------------------------------------------------------ reading

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Read how far the feeder has come, and check that the run is the same."""
        self._reset(log_)
        if self._config.demonstrations_alone:
            records = log_.read("experts", bodies=False)
            self._num_demonstrations = sum(not codec.is_foreign(record) for record in records)
        for received in log_.messages("control"):
            self._absorb_control(received)
        self._check_manifest()
        committed = log_.committed(FEEDER.name)
        if STEPS in committed and committed[STEPS].metadata:
            self._restore(json.loads(committed[STEPS].metadata))
        positions: dict[TopicPartition, int] = {}
        for topic in ("outcomes", "steps"):
            positions.update(log_.transport.admin.begin_offsets(topic))
            for received in log_.messages(topic):
                self.absorb(received)
                positions[received.record.place] = received.record.offset + 1
        return positions

    def absorb(self, received: Received) -> None:
        """Count a version or an outcome; note what is asked for on `control`."""
        match received.message:
            case StepRecord() as step:
                self._in_force.absorb(step)
                self._steps_position = received.record.offset + 1
            case GroupOutcome() as outcome:
                self._admission.absorb(outcome)
                self._retries.decided(outcome)
            case _:
                self._absorb_control(received)

    def _absorb_control(self, received: Received) -> None:
        match received.message:
            case RunManifest() as manifest:
                self._manifest = manifest
            case TasksEnded():
                self._ended = True
            case None if received.record.key == b"end":
                self._ended = False
            case Request() as request:
                self._retries.asked(request, received.record.key or b"")
            case None:
                self._retries.taken_back(received.record.key or b"")

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Raise the error: without an outcome nobody can say how many groups there are."""
        raise error

    def _check_manifest(self) -> None:
        """Make the manifest of a new run; check that a run that goes on is the same."""
        if self._manifest is None:
            self._pending_manifest = self._make_manifest()
        else:
            self._check_same_run(self._manifest)

    # ------------------------------------------------------------------------------------------ writing

    def advance(self) -> SingleTransaction | None:
        """Return the run's manifest, the tasks that may be admitted now, or the word that there are no more."""
        if self._pending_manifest is not None:
            return SingleTransaction((Publish("control", 0, self._pending_manifest),))
        if self._paused or self._ended or self._config.run.imported_from is not None:
            return None
        if self._config.demonstrations_alone:
            return SingleTransaction((Publish("control", 0, self._demonstrations_alone()),))
        if self._draining:
            return self._end("draining")
        wanted = self._admission.wanted(self._in_force, self._config.run.steps)
        if wanted == 0:
            return None
        cursor = _Cursor(self._admission.admitted, dict(self._drawn), dict(self._left_out))
        tasks: list[Task] = []
        answered: list[bytes] = []
        while wanted and len(tasks) < MAX_TASKS_A_TRANSACTION:
            group = self._retried_group(cursor, answered) or self._next_group(cursor)
            if group is None:
                break
            tasks.extend(group)
            wanted -= 1
        if not tasks and not answered:
            return self._end("taskset", cursor)
        self._pending = cursor
        outputs = [Publish("tasks", task.ids.sequence % self._partitions, task) for task in tasks]
        outputs += [Publish("control", 0, None, key=key) for key in answered]
        return SingleTransaction(tuple(outputs), {STEPS: Position(self._steps_position, cursor.to_json())})

    def _retried_group(self, cursor: _Cursor, answered: list[bytes]) -> list[Task] | None:
        """Return the tasks of the next group that is put back; None if none is asked for. Keys of requests that are
        done go to `answered`."""
        while (retry := self._retries.next(self._clock.now(), answered)) is not None:
            source = self._sources.get(retry.taskset)
            problem = None
            if source is not None and retry.index < len(source.taskset):
                problem = self._fitting(source, retry.taskset, retry.index)
            if source is None or problem is None:
                log.warning("%s: cannot be put back: the tasksets have no such problem, or it is too long", retry.group)
                continue
            return self._tasks(cursor, retry.taskset, source, retry.group, problem, retry.stored)
        return None

    def _next_group(self, cursor: _Cursor) -> list[Task] | None:
        """Return the next group's tasks, and move the cursor; None when every taskset is at its end."""
        while True:
            left = {
                name: source.weight
                for name, source in self._sources.items()
                if source.weight > 0 and (source.size is None or cursor.drawn[name] < source.size)
            }
            if not left:
                return None
            name = mix(left, cursor.drawn)
            ordinal = cursor.drawn[name]
            cursor.drawn[name] += 1
            source = self._sources[name]
            taskset_pass, index = divmod(ordinal, len(source.taskset))
            if source.shuffle:
                seed = derive_seed(self._config.run.seed, "order", name)
                index = order(len(source.taskset), taskset_pass, seed)(index)
            problem = self._fitting(source, name, index)
            if problem is None:
                cursor.left_out[name] += 1
                if cursor.left_out[name] >= len(source.taskset) and cursor.left_out[name] == cursor.drawn[name]:
                    raise ConfigError(f"tasksets.{name}: every prompt is longer than the context")
                continue
            group = group_id(name, taskset_pass, index, 0)
            return self._tasks(cursor, name, source, group, problem)

    def _tasks(
        self,
        cursor: _Cursor,
        name: str,
        source: Source,
        group: str,
        problem: Problem,
        stored: Mapping[int, str] | None = None,
    ) -> list[Task]:
        problem = self._keep(problem)
        min_version = replace(self._admission, admitted=cursor.admitted).min_version(self._in_force)
        size = self._config.feeder.group_size
        now = self._clock.now()
        tasks = []
        for sibling in range(size):
            rollout = rollout_id(group, sibling)
            ids = RolloutIds(
                rollout_id=rollout,
                group_id=group,
                taskset=name,
                sibling=sibling,
                group_size=size,
                sequence=cursor.admitted,
                min_version=min_version,
            )
            seed = derive_seed(self._config.run.seed, rollout)
            tasks.append(
                Task(
                    ids=ids,
                    problem=problem,
                    sampling=source.sampling_of(sibling),
                    seed=seed,
                    environment=source.environment,
                    stored_rollout=(stored or {}).get(sibling),
                    created_at=now,
                )
            )
        cursor.admitted += 1
        return tasks

    def _fitting(self, source: Source, name: str, index: int) -> Problem | None:
        """Return the problem if its prompt leaves room for a completion, else as `too_long` says. None: it is left
        out."""
        problem = source.taskset.problem(index)
        if self._context is None:
            return problem
        try:
            length = len(source.renderer.render(problem.messages, problem.tools))
        except ConfigError as error:
            raise ConfigError(f"tasksets.{name}: problem {index}: {error}") from None
        if length < self._context:
            return problem
        if source.too_long == "error":
            raise ConfigError(
                f"tasksets.{name}: problem {index} has a prompt of {length} tokens, expected fewer than the context "
                f"of {self._context}; shorten it, raise model.context, or set too_long to 'skip' or 'truncate'"
            )
        return problem if source.too_long == "truncate" else None

    def _demonstrations_alone(self) -> TasksEnded:
        """Return the word that there are no tasks, and how many batches the demonstrations make that there are now."""
        section = self._config.experts
        assert section is not None, "config checks that there is something to learn from"
        count = len(trained_numbers(self._num_demonstrations, section.held_out))
        if not count:
            raise ConfigError(
                f"experts: {self._num_demonstrations:,} demonstrations with {section.held_out} of them held out leave "
                "none, expected some to learn from"
            )
        batches = -(-count * (section.passes or 1) // section.per_batch)
        return TasksEnded(admitted=0, reason="experts", experts=self._num_demonstrations, batches=batches)

    def _end(self, reason: str, cursor: _Cursor | None = None) -> SingleTransaction:
        self._pending = cursor
        return SingleTransaction((Publish("control", 0, TasksEnded(admitted=self._admission.admitted, reason=reason)),))

    def committed(self, transaction: SingleTransaction) -> None:
        """Make the cursor of that transaction its own."""
        if self._pending_manifest is not None:
            self._manifest, self._pending_manifest = self._pending_manifest, None
            return
        if self._pending is not None:
            self._restore(json.loads(self._pending.to_json()))
            self._pending = None
        for output in transaction.outputs:
            match output.message:
                case TasksEnded():
                    self._ended = True
                case Task() as task:
                    self._retries.admitted(task.ids.group_id)
                case None:
                    self._retries.taken_back(output.key or b"")
        metrics.ADMITTED.set(self._admission.admitted)

    def _restore(self, cursor: Mapping[str, object]) -> None:
        parsed = _Cursor(**cursor)  # type: ignore[arg-type]  # written by to_json
        self._admission.admitted = parsed.admitted
        self._drawn.update(parsed.drawn)
        self._left_out.update(parsed.left_out)

    # ------------------------------------------------------------------------------------------ the rest

    def paused(self, paused: bool) -> None:
        """Admit nothing while `paused`."""
        self._paused = paused

    def draining(self) -> None:
        """End the tasks with the next transaction."""
        self._draining = True

    def health(self) -> Mapping[str, object]:
        """Return how many groups were admitted, rejected and left out."""
        return {
            "admitted": self._admission.admitted,
            "rejected": self._admission.rejected,
            "left_out": sum(self._left_out.values()),
            "retries": len(self._retries),
            "version": self._in_force.name.version,
        }


@dataclass(slots=True)
class _Cursor:
    admitted: int
    drawn: dict[str, int]
    left_out: dict[str, int]

    def to_json(self) -> str:
        return json.dumps(
            {"admitted": self.admitted, "drawn": self.drawn, "left_out": self.left_out}, separators=(",", ":")
        )
