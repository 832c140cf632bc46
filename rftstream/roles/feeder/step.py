"""The feeder: admits groups of tasks at the pace that the log allows, and makes the run.

Its cursor (number of groups, progress in each taskset) is the metadata of its position on `steps`, and is committed in
the transaction that admits the tasks. The feeder has no other state. With task-side operators, each such transaction
also has a Drawn on `control`, which counts the skipped problems by reason. With more tasksets than a position's
metadata can hold, the transaction has a Drawn, too, and only the Drawn holds the progress in each taskset.

All draws of a transaction use the facts that the step has at that time; `seen` of its tasks identifies the facts. A
transaction ends with a group. Problems that were skipped after that group are drawn again, with newer facts. A Drawn
without tasks is written only if no group was admitted at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rftstream import metrics
from rftstream.clock import Clock
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages, demonstration_passes
from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Drawn, Request, RunManifest, TasksEnded
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.problems import NewProblem, RejectedProblem
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.summaries import OutcomesSummary, StepsSummary, Summary
from rftstream.contracts.tasks import Problem, RolloutIds, Task
from rftstream.contracts.versions import StepRecord
from rftstream.data.demonstrations.split import trained_numbers
from rftstream.data.operators.base import Draw
from rftstream.data.operators.pipeline import TaskPipeline
from rftstream.data.tasksets.files import JsonlTaskset
from rftstream.errors import ConfigError, PositionsReset
from rftstream.roles.feeder import FEEDER
from rftstream.roles.feeder.admission import Admission, SkipWatch, VersionInForce
from rftstream.roles.feeder.cursor import FeederCursor
from rftstream.roles.feeder.draws import Draws, Source, check_some, growing_of
from rftstream.roles.feeder.retries import Retries
from rftstream.service.records.problem_records import PROBLEMS, ProblemReader, read_problems
from rftstream.service.records.summaries import begin_with_summary
from rftstream.service.role import Log, Publish, Received, SingleStep, SingleTransaction
from rftstream.transport.base import MAX_METADATA_BYTES, Position

log = logging.getLogger(__name__)

STEPS = TopicPartition("steps", 0)
MAX_TASKS_A_TRANSACTION = 512
MAX_DRAWS_A_TRANSACTION = 4096
"""Most problems drawn for one transaction, since operators may skip all of them."""


class FeederStep(SingleStep):
    """The step of the feeder: it makes the run, and admits groups of tasks. `workers/feeder.py` makes it, and
    SingleService calls it in this order:

    - `recover` reads `control`, `outcomes` and `steps`, and takes the cursor from the committed position.
    - `absorb` counts outcomes and versions, which determine how many groups may be admitted.
    - `advance` returns the manifest of a new run first, then transactions of tasks with the new cursor, and last the
      record that there are no more tasks. While the step is paused, no group is admitted. Draining ends the tasks.
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
        pipeline: TaskPipeline | None = None,
    ) -> None:
        """`log_` is the run's log, which is not read before `recover`. `keep` moves a problem's images to a place that
        every host can read. `pipeline` has the task-side operators."""
        self._keep = keep
        self._pipeline = pipeline or TaskPipeline({}, config.run.seed)
        self._config = config
        self._sources = sources
        self._growing = growing_of(sources, ProblemReader(log_.transport).get)
        """The growing tasksets. False if there are none; `problems` is not read then."""
        self._draws = Draws(
            sources,
            self._pipeline,
            run_seed=config.run.seed,
            group_size=config.feeder.group_size,
            context=context,
        )
        self._make_manifest = make_manifest
        self._check_same_run = check_same_run
        self._clock = clock
        self._partitions = config.transport.partitions
        self._paused = False
        self._draining = False
        self._has_unchecked = any(isinstance(source.taskset, JsonlTaskset) for source in sources.values())
        """Whether large files may have unchecked rows. They are checked while tasks are admitted."""
        self._reset(log_)

    def _reset(self, log_: Log) -> None:
        self._in_force = VersionInForce()
        stages = Stages.of(self._config) if self._config.stages else None
        self._admission = Admission(
            self._config.feeder.groups_per_batch, self._config.feeder.max_staleness, stages=stages
        )
        metrics.MAX_STALENESS.set(self._config.feeder.max_staleness)
        self._cursor = FeederCursor(0, dict.fromkeys(self._sources, 0), dict.fromkeys(self._sources, 0))
        """The place of the next draw, after the tasks that are on the log."""
        self._growing.fresh()
        self._steps_position = 0
        self._manifest: RunManifest | None = None
        self._pending_manifest: RunManifest | None = None
        self._ended = False
        self._facts = self._pipeline.new_facts()
        """Facts of the run; empty without operators."""
        size = sum(len(source.taskset) for source in self._sources.values() if source.weight > 0)
        self._watch = SkipWatch(max(self._config.buffer.max_refill, size), self._config.feeder.groups_per_batch)
        self._retries = Retries(log_)
        self._num_demonstrations = 0

    # ------------------------------------------------------------------------------------------ reading

    def check(self, manifest: RunManifest) -> None:
        """Check that the run has these problems, model and settings."""
        self._check_same_run(manifest)

    def recover(self, log_: Log, claim: Claim) -> Mapping[TopicPartition, int]:
        """Restore the feeder's progress, and check that the run is the same."""
        self._reset(log_)
        if self._config.demonstrations_alone:
            records = log_.read("experts", bodies=False)
            self._num_demonstrations = sum(not codec.is_foreign(record) for record in records)
        newest: Drawn | None = None
        for received in log_.messages("control"):
            self._absorb_control(received)
            if isinstance(received.message, Drawn):
                newest = received.message
        self._check_manifest()
        committed = log_.committed(FEEDER.name)
        if STEPS in committed and committed[STEPS].metadata:
            there = FeederCursor.of_json(committed[STEPS].metadata, newest)
            there.drawn, there.left_out = self._cursor.drawn | there.drawn, self._cursor.left_out | there.left_out
            self._cursor = there
        elif _were_admitted(log_):
            raise PositionsReset(
                f"{STEPS}: the feeder's position has no metadata, expected its cursor, since tasks were admitted; "
                "somebody has reset the positions of the feeder's group, and what was drawn cannot be told any more: "
                f'begin a new run from what was trained, with model.init_from = "{self._config.run.name}"'
            )
        positions: dict[TopicPartition, int] = {}
        for topic in ("outcomes", "steps"):
            needs_all = topic == "outcomes" and bool(self._pipeline)  # operators use the outcome of each problem
            beginning = begin_with_summary(log_, topic, whole=needs_all)
            positions.update(beginning.positions)
            for summary in beginning.received():
                self.absorb(summary)
            for received in log_.messages(topic, start=beginning.positions):
                self.absorb(received)
                positions[received.record.place] = received.record.offset + 1
        self._steps_position = positions[STEPS]
        if self._growing:
            positions.update(log_.transport.admin.begin_offsets(PROBLEMS.topic))
            for record, message in read_problems(log_):
                self._growing.absorb(message, record.offset)
                positions[record.place] = record.offset + 1
        return positions

    def absorb(self, received: Received) -> None:
        """Count a version or an outcome; apply requests on `control`."""
        match received.message:
            case Summary(steps=StepsSummary() as steps):
                self._in_force.begin(steps)
            case Summary(outcomes=OutcomesSummary() as outcomes):
                self._admission.begin(outcomes)
            case StepRecord() as step:
                self._in_force.absorb(step)
                self._steps_position = received.record.offset + 1
            case GroupOutcome() as outcome:
                self._admission.absorb(outcome)
                self._retries.decided(outcome)
                if self._pipeline:
                    self._facts.absorb(outcome)
            case NewProblem() | RejectedProblem() as message:
                self._growing.absorb(message, received.record.offset)
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

    def _check_manifest(self) -> None:
        """Make the manifest of a new run. For an existing run, check that it is the same."""
        if self._manifest is None:
            self._pending_manifest = self._make_manifest()
        else:
            self._check_same_run(self._manifest)

    # ------------------------------------------------------------------------------------------ writing

    def advance(self) -> SingleTransaction | None:
        """Return the run's manifest, the tasks that may be admitted now, or the record that there are no more tasks."""
        if self._pending_manifest is not None:
            return SingleTransaction((Publish("control", 0, self._pending_manifest),), then=self._run_made)
        self._has_unchecked = self._has_unchecked and check_some(self._sources)
        if self._paused or self._ended or self._config.run.imported_from is not None:
            return None
        if self._config.demonstrations_alone:
            return self._end(self._demonstrations_alone(), self._cursor)
        if self._draining:
            return self._end(TasksEnded(admitted=self._cursor.admitted, reason="draining"), self._cursor)
        cursor = self._cursor.copy()
        wanted = self._admission.wanted(self._in_force, self._config.run.steps, cursor.admitted)
        if wanted == 0:
            return None
        begin = cursor.num_drawn
        undecided = cursor.admitted - self._facts.num_groups
        if not self._draws.left(cursor) or self._watch.may_draw(
            cursor, self._facts.seen + self._growing.end, undecided
        ):
            end = begin + MAX_DRAWS_A_TRANSACTION
        else:
            end = begin
        tasks: list[Task] = []
        answered: list[bytes] = []
        after_group = cursor
        while wanted and len(tasks) < MAX_TASKS_A_TRANSACTION:
            group = self._retried_group(cursor, answered) or self._next_group(cursor, end)
            if group is None:
                break
            tasks.extend(group)
            wanted -= 1
            after_group = cursor.copy() if self._pipeline else cursor
        if tasks:
            cursor = after_group
        elif not answered and (not self._pipeline or cursor.num_drawn == begin):
            ended = TasksEnded(admitted=cursor.admitted, reason="taskset")
            return self._end(ended, cursor) if self._draws.is_over(cursor) else None
        outputs = [Publish("tasks", task.ids.sequence % self._partitions, task) for task in tasks]
        outputs += [Publish("control", 0, None, key=key) for key in answered]
        whole = not cursor.outgrows(MAX_METADATA_BYTES)
        has_record = bool(self._pipeline) or not whole
        if has_record:
            drawn = cursor.to_record(self._facts.seen, alone=not tasks, problems_end=self._growing.known_end)
            outputs.append(Publish("control", 0, drawn))
        position = Position(self._steps_position, cursor.to_json(whole=whole))
        then = partial(self._move_to, cursor, tasks, answered, alone=has_record and not tasks)
        return SingleTransaction(tuple(outputs), {STEPS: position}, then)

    def _retried_group(self, cursor: FeederCursor, answered: list[bytes]) -> list[Task] | None:
        """Return the tasks of the next group to be put back; None if there is none. Keys of finished requests are added
        to `answered`."""
        while (retry := self._retries.next(self._clock.now(), answered)) is not None:
            result = self._draws.put_back(cursor, self._facts, retry.group)
            if result is not None:
                return self._tasks(cursor, result.draw, retry.stored)
            log.warning("%s: cannot be put back: the tasksets have no such problem, or it is too long", retry.group)
        return None

    def _next_group(self, cursor: FeederCursor, end: int) -> list[Task] | None:
        """Return the next group's tasks, and move the cursor. None if there is no group. `end` is as for
        `Draws.next`."""
        result = self._draws.next(cursor, self._facts, end)
        return None if result is None else self._tasks(cursor, result.draw)

    def _tasks(self, cursor: FeederCursor, draw: Draw, stored: Mapping[int, str] | None = None) -> list[Task]:
        source = self._sources[draw.taskset]
        problem = self._keep(draw.problem)
        min_version = self._admission.min_version(self._in_force, cursor.admitted)
        now = self._clock.now()
        tasks = []
        for sibling in range(draw.group_size):
            ids = RolloutIds.of(
                draw.group_id,
                taskset=draw.taskset,
                sibling=sibling,
                group_size=draw.group_size,
                sequence=cursor.admitted,
                min_version=min_version,
            )
            tasks.append(
                Task(
                    ids=ids,
                    problem=problem,
                    sampling=source.sampling_of(draw.sampling, sibling),
                    seed=derive_seed(self._config.run.seed, ids.rollout_id),
                    environment=source.environment,
                    stored_rollout=(stored or {}).get(sibling),
                    created_at=now,
                    seen=self._facts.seen if self._pipeline else None,
                    problems_end=self._growing.known_end,
                )
            )
        cursor.admitted += 1
        return tasks

    def _demonstrations_alone(self) -> TasksEnded:
        """Return the record that there are no tasks, with the number of batches that the present demonstrations
        make, or that the run takes if its passes have no end."""
        section = self._config.experts
        assert section is not None, "config checks that there is something to learn from"
        count = len(trained_numbers(self._num_demonstrations, section.held_out))
        if not count:
            raise ConfigError(
                f"experts: {self._num_demonstrations:,} demonstrations with {section.held_out} of them held out leave "
                "none, expected some to learn from"
            )
        passes = demonstration_passes(self._config)
        batches = self._config.run.steps if passes is None else -(-count * passes // section.per_batch)
        return TasksEnded(admitted=0, reason="experts", experts=self._num_demonstrations, batches=batches)

    def _end(self, ended: TasksEnded, cursor: FeederCursor) -> SingleTransaction:
        then = partial(self._move_to, cursor, (), (), ended=True)
        return SingleTransaction((Publish("control", 0, ended),), then=then)

    def _run_made(self) -> None:
        self._manifest, self._pending_manifest = self._pending_manifest, None

    def _move_to(
        self,
        cursor: FeederCursor,
        tasks: Sequence[Task],
        answered: Sequence[bytes],
        *,
        alone: bool = False,
        ended: bool = False,
    ) -> None:
        """Move to the cursor of a transaction that is on the log, with its tasks and the keys of its requests. `alone`
        means that the transaction records skipped problems and has no group."""
        self._watch.committed(cursor.num_drawn - self._cursor.num_drawn if alone else None)
        self._cursor, self._ended = cursor, self._ended or ended
        for task in tasks:
            self._retries.admitted(task.ids.group_id)
        for key in answered:
            self._retries.taken_back(key)
        metrics.ADMITTED.set(cursor.admitted)
        for name, taskset in self._growing.tasksets.items():
            metrics.set_named(metrics.PROBLEMS_JOINED, len(taskset), name)
        if self._pipeline:
            metrics.DRAWN.set(cursor.num_drawn)
            for (operator, action), count in cursor.counts.by_operator().items():
                metrics.set_named(metrics.OPERATOR_PROBLEMS, count, operator, action)

    # ------------------------------------------------------------------------------------------ the rest

    def idle_s(self) -> float:
        """Return 0 while there are rows to check."""
        return 0.0 if self._has_unchecked else super().idle_s()

    def paused(self, paused: bool) -> None:
        """Admit no group while `paused`."""
        self._paused = paused

    def draining(self) -> None:
        """End the tasks with the next transaction."""
        self._draining = True

    def health(self) -> Mapping[str, object]:
        """Return the number of admitted, rejected and left-out groups."""
        return {
            "admitted": self._cursor.admitted,
            "rejected": self._admission.rejected,
            "left_out": sum(self._cursor.left_out.values()),
            **({"skipped": self._cursor.counts.num_skipped} if self._pipeline else {}),
            **self._growing_health(),
            "retries": len(self._retries),
            "version": self._in_force.name.version,
        }

    def _growing_health(self) -> Mapping[str, object]:
        """Return how many problems have joined, and the tasksets for whose next problem the feeder waits."""
        if not self._growing:
            return {}
        joined = sum(map(len, self._growing.tasksets.values()))
        waits = not self._ended and not self._draining and not self._draws.left(self._cursor)
        return {"problems_joined": joined, "waits_for_problems": self._draws.growing if waits else []}


def _were_admitted(log_: Log) -> bool:
    """Return whether a feeder of this run has written tasks. Offsets alone do not tell, since aborted transactions and
    records of other writers use offsets, too."""
    begins = log_.transport.admin.begin_offsets("tasks")
    return any(begins.values()) or any(message is not None for _, message in log_.in_force("tasks"))
