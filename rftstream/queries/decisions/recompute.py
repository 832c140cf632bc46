"""Recomputes every decision of the operators from the log, and compares it with the recorded one.

Task side: the problems are drawn again in the feeder's order, each with the facts that its Task names (or the Drawn
message without a group). Experience side: each group is judged again with the facts that its outcome names, and the
result is compared with its batch. Topics are read in the order in which the flow writes them, so this also works for a
live run. Later decisions are left for the next call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, repeat

from rftstream.config.data_pipelines.pipelines import operator_places
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.batches import Experience
from rftstream.contracts.control import Drawn, Trimmed
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling, Task
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.data.operators.base import Draw
from rftstream.data.operators.pipeline import ExperiencePipeline, TaskPipeline
from rftstream.data.operators.problems import all_problems
from rftstream.data.tasksets.open import grows
from rftstream.errors import ContractError
from rftstream.models.folders.folder import prepare_model
from rftstream.models.spec import ModelSpec
from rftstream.queries.decisions.recomputation import Growth, Recomputation, shown
from rftstream.queries.decisions.recompute_reuse import ReuseAgain
from rftstream.queries.people.feedback import judged_rewards
from rftstream.roles.buffer.experiences import experience_of
from rftstream.roles.buffer.groups import Group, Sibling, sibling_of
from rftstream.roles.buffer.operators import GroupOperators
from rftstream.roles.buffer.people.judged_rewards import JudgedBodies
from rftstream.roles.buffer.reuse import offers_of
from rftstream.roles.feeder.cursor import FeederCursor
from rftstream.roles.feeder.draws import Draws, growing_of, open_sources, tasksets_of
from rftstream.roles.trainer.recorded_batches import foreign_places
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control
from rftstream.service.records.problem_records import ProblemReader, read_problems
from rftstream.service.role import Log
from rftstream.transport.base import Transport

MAX_TRIES = 5

MAX_DRAWS_OF_A_GROUP = 1 << 20
"""Problems that are drawn again in search of one group."""

HELD_BYTES = 1 << 28
"""Bytes of rollout bodies that are kept in memory. The others are read again when they are needed."""


def recompute(transport: Transport, config: RunConfig, spec: ModelSpec) -> Recomputation:
    """Recompute every decision of the operators. `config` is the run's; `spec` is its model, for the tokens of prompts.
    ConfigError if a taskset or an operator cannot be opened.

    Tasks are kept as digests. Memory grows by about a kilobyte per rollout. If a trainer deletes records meanwhile,
    everything is read again.
    """
    for _ in range(MAX_TRIES):
        said = read_control(transport).deleted
        found = _recompute(transport, config, spec, said)
        if found.fine or read_control(transport).deleted == said:
            break
    return found


def _recompute(transport: Transport, config: RunConfig, spec: ModelSpec, said: Trimmed) -> Recomputation:
    found = Recomputation()
    experience_side = ExperiencePipeline.of(config)
    has_operators = any(place.side == "task" for place in operator_places(config))
    has_tasks_side = has_operators or any(grows(section.source) for section in config.tasksets.values())
    log = Log(transport)
    admitted = _read_admitted(log) if has_tasks_side else {}
    drawn = [message for _, message in log.in_force("control") if isinstance(message, Drawn)]
    told = [message.message for message in log.messages("outcomes") if message.message is not None]
    outcomes = [message for message in told if isinstance(message, GroupOutcome)]
    if has_tasks_side or (experience_side and experience_side.is_declared):
        found.num_unknown = said.sequence
    if has_tasks_side:
        sources, context = open_sources(config, spec)
        tasks_side = TaskPipeline.of(config, all_problems(config, tasksets_of(sources)))
        draws = Draws(
            sources, tasks_side, run_seed=config.run.seed, group_size=config.feeder.group_size, context=context
        )
        growth = Growth(growing_of(sources, ProblemReader(transport).get), list(read_problems(log)), found)
        _TaskSide(draws, growth, admitted, drawn, outcomes, said, found).check()
    if experience_side.is_declared and experience_side:
        reuse = ReuseAgain(log, config, experience_side, spec, found)
        reuse.choose(told)
        _ExperienceSide(log, config, experience_side, outcomes, said, found, reuse).check()
    return found


def recompute_run(run: OpenRun) -> Recomputation:
    """Recompute the decisions of an open run, with the settings in its folder. ConfigError if its model is not here."""
    spec = prepare_model(run.config.model, run.folder.model, run.config.run.seed)
    return recompute(run.transport, run.config, spec)


# --------------------------------------------------------------------------------------------- task side


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A group, taken from its first readable Task."""

    ids: RolloutIds
    seen: int | None
    problems_end: int | None
    problem: bytes
    sampling: bytes


def _read_admitted(log: Log) -> dict[int, _Admitted]:
    """Return the groups on `tasks` by sequence."""
    found: dict[int, _Admitted] = {}
    for _, task in log.in_force("tasks"):
        if isinstance(task, Task) and task.ids.sequence not in found:
            found[task.ids.sequence] = _Admitted(
                task.ids, task.seen, task.problems_end, _digest(task.problem), _digest(task.sampling)
            )
    return found


_IDS = RolloutIds.of("a/0/0/0", taskset="a")


def _digest(what: Problem | Sampling) -> bytes:
    """Return a digest of the problem as on the log. Images count only by their places, since the feeder copies them."""
    problem, sampling = Problem(messages=()), Sampling()
    if isinstance(what, Sampling):
        sampling = what
    else:
        problem = replace(what, messages=tuple(replace(message, media=()) for message in what.messages))
    return blake2b(codec.encode(Task(ids=_IDS, problem=problem, sampling=sampling, seed=0)), digest_size=16).digest()


class _TaskSide:
    """Draws a run's problems again."""

    def __init__(
        self,
        draws: Draws,
        growth: Growth,
        admitted: Mapping[int, _Admitted],
        drawn: Sequence[Drawn],
        outcomes: Sequence[GroupOutcome],
        said: Trimmed,
        found: Recomputation,
    ) -> None:
        self._draws = draws
        self._growth = growth
        self._admitted = admitted
        self._alone = sorted((one for one in drawn if one.alone), key=lambda one: sum(one.drawn.values()))
        self._newest = max(drawn, key=lambda one: (one.admitted, sum(one.drawn.values())), default=None)
        self._outcomes = outcomes
        self._deleted = said.sequence
        self._found = found
        self._facts = draws.pipeline.new_facts()
        self._num_folded = 0
        zeros = dict.fromkeys(draws.sources, 0)
        self._cursor = FeederCursor(0, dict(zeros), dict(zeros))

    def check(self) -> None:
        """Compare every admitted or skipped problem."""
        if not self._pass_deleted():
            return
        sequence = self._cursor.admitted
        while sequence in self._admitted:
            if not (self._check_alone(sequence) and self._check_group(self._admitted[sequence])):
                return
            sequence += 1
        if any(other > sequence for other in self._admitted):
            self._found.differs(f"tasks: no group {sequence}, but later ones; what follows is not computed again")
        elif self._check_alone(sequence):
            self._check_counts()

    def _pass_deleted(self) -> bool:
        """Move the cursor past the groups whose tasks are deleted. Return whether it could be found."""
        if not self._deleted:
            return True
        if self._growth:  # their tasks recorded which problems were available
            self._found.num_unknown = max(self._admitted, default=self._deleted - 1) + 1
            return False
        groups = {outcome.sequence: outcome.group_id for outcome in self._outcomes if not outcome.late}
        bare = self._draws.without_operators()
        for sequence in range(self._deleted):
            group_id = groups.get(sequence)
            if group_id is None:
                return False
            if group_id.endswith("/0"):
                result = bare.next(self._cursor, self._facts, 0)
                while result is not None and result.draw.group_id != group_id:
                    result = bare.next(self._cursor, self._facts, 0)
                    if self._cursor.num_drawn > MAX_DRAWS_OF_A_GROUP * (sequence + 1):
                        return False
                if result is None:
                    return False
            self._cursor.admitted += 1
        return True

    def _fold(self, where: str, seen: int | None) -> bool:
        """Extend the facts to `seen` records of `outcomes`. Return whether that was possible."""
        if seen is None and not self._draws.pipeline:
            return True
        if seen is None or not self._num_folded <= seen <= len(self._outcomes):
            self._found.differs(f"{where}: seen = {seen}, expected {self._num_folded} to {len(self._outcomes)}")
            return False
        while self._num_folded < seen:
            self._facts.absorb(self._outcomes[self._num_folded])
            self._num_folded += 1
        return True

    def _check_alone(self, sequence: int) -> bool:
        """Compare the skipped problems that have no group after them."""
        for alone in [one for one in self._alone if one.admitted == sequence]:
            end, begin = sum(alone.drawn.values()), self._cursor.num_drawn
            where = f"control: drawn/{end}"
            if end < begin and self._deleted:
                continue  # too little is known about that time
            if not (self._fold(where, alone.seen) and self._growth.grow(where, alone.problems_end)):
                return False
            result = self._draws.next(self._cursor, self._facts, end)
            self._found.num_draws += self._cursor.num_drawn - begin
            if result is not None or self._cursor.num_drawn != end:
                admitted = "nothing more" if result is None else result.draw.group_id
                self._found.differs(f"{where}: all skipped, computed again {admitted} at {self._cursor.num_drawn}")
                return False
            if not self._deleted:
                self._compare_counts(where, alone)
        return True

    def _check_group(self, group: _Admitted) -> bool:
        """Compare a group, and the problems skipped before it. Return whether the next one can be computed."""
        where = f"tasks: {group.ids.group_id}"
        if not (self._fold(where, group.seen) and self._growth.grow(where, group.problems_end)):
            return False
        begin = self._cursor.num_drawn
        if group.ids.group_id.endswith("/0"):
            result = self._draws.next(self._cursor, self._facts, begin + MAX_DRAWS_OF_A_GROUP)
        else:
            result = self._draws.put_back(self._cursor, self._facts, group.ids.group_id)
        self._found.num_draws += max(1, self._cursor.num_drawn - begin)
        if result is None or result.draw.group_id != group.ids.group_id:
            found = "nothing" if result is None else result.draw.group_id
            self._found.differs(f"{where}: admitted, computed again {found}; what follows is not computed again")
            return False
        self._cursor.admitted += 1
        self._compare(where, group, result.draw)
        return True

    def _compare(self, where: str, group: _Admitted, draw: Draw) -> None:
        """Compare the operators' changes of a draw. Other fields depend on the run file, which may have changed."""
        source = self._draws.sources[draw.taskset]
        if _digest(draw.problem) != group.problem:
            self._found.differs(f"{where}: its problem, computed again another one")
        sampling = source.sampling_of(draw.sampling, group.ids.sibling)
        if draw.sampling != source.sampling and _digest(sampling) != group.sampling:
            self._found.differs(f"{where}: its sampling, computed again {shown(sampling)}")
        if draw.group_size != self._draws.group_size:
            self._found.expect(where, "group_size", group.ids.group_size, draw.group_size)

    def _check_counts(self) -> None:
        """Compare the newest counts, if they belong to the newest group that was read."""
        newest = self._newest
        if newest is not None and newest.admitted == self._cursor.admitted and not self._deleted:
            self._compare_counts("control: drawn", newest)

    def _compare_counts(self, where: str, said: Drawn) -> None:
        mine = self._cursor.to_record(said.seen, alone=said.alone)
        for name in ("drawn", "left_out", "skipped", "changed", "put_back"):
            self._found.expect(where, name, getattr(said, name), getattr(mine, name))


# --------------------------------------------------------------------------------------------- experience side

_Trained = tuple[float | None, dict[str, float | None], tuple[tuple[str, float], ...], float | None, bytes]
"""Reward, rewards of roles, terms, the verdict's reward, and a digest of the loss masks."""


def _trained(experience: Experience) -> _Trained:
    masks = b"".join(segment.loss_mask.data for segment in experience.segments)
    terms = tuple(sorted(experience.terms.items()))
    digest = blake2b(masks, digest_size=16).digest()
    return experience.reward, experience.roles, terms, experience.verified_reward, digest


class _ExperienceSide:
    """Judges a run's groups again."""

    def __init__(
        self,
        log: Log,
        config: RunConfig,
        pipeline: ExperiencePipeline,
        outcomes: Sequence[GroupOutcome],
        said: Trimmed,
        found: Recomputation,
        reuse: ReuseAgain,
    ) -> None:
        self._reuse = reuse
        self._log = log
        self._imported = config.run.imported_from is not None
        self._min_siblings = config.buffer.min_siblings
        self._outcomes = outcomes
        self._said = said
        self._found = found
        self._rewards = judged_rewards(log, config)
        self._bodies = JudgedBodies(log.transport, HELD_BYTES, self._rewards)
        self._operators = GroupOperators(pipeline, self._bodies)

    def check(self) -> None:
        """Compare every group that operators decided about, and its content in its batch."""
        siblings = self._siblings()
        num_folded = 0
        trained: dict[str, _Trained] = {}
        asked = [outcome for outcome in self._outcomes if outcome.seen is not None and not outcome.late]
        for outcome in sorted(asked, key=lambda one: one.seen or 0):
            seen = outcome.seen or 0
            if seen > len(self._outcomes):
                self._found.differs(f"outcomes: {outcome.group_id}: seen = {seen}, of {len(self._outcomes)}")
                continue
            while num_folded < seen:
                self._operators.learn(self._outcomes[num_folded])
                num_folded += 1
            group = _group_of(outcome, siblings)
            if group is None:
                if outcome.sequence >= self._said.sequence:
                    self._found.differs(f"outcomes: {outcome.group_id}: names rollouts that verified does not have")
                continue
            self._rewards.apply(group)
            self._judge(outcome, group)
            self._rewards.forget(group)
            for sibling in group.kept if outcome.result is GroupResult.batched else ():
                verified = self._bodies.get(*sibling.place_offset)
                trained[sibling.summary.rollout_id] = _trained(
                    experience_of(verified, 0, 0, position=0, result=group.result)
                )
            for sibling in group.siblings.values():
                self._bodies.forget(*sibling.place_offset)
        self._compare_batches(trained)

    def _siblings(self) -> dict[str, list[Sibling]]:
        """Return the records of each rollout. There are several if another writer copied one."""
        found: dict[str, list[Sibling]] = {}
        for record in self._log.read("verified"):
            verified = _verified(record)
            if verified is not None:
                if verified.verdict is not None:
                    self._bodies.hold(record.place, record.offset, verified, len(record.value or b""))
                sibling = sibling_of(verified, record.place, record.offset)
                found.setdefault(verified.ids.rollout_id, []).append(sibling)
        return found

    def _judge(self, outcome: GroupOutcome, group: Group) -> None:
        where = f"outcomes: {outcome.group_id}"
        filtered = self._operators.judge_at(group, min(self._min_siblings, group.size), outcome.version)
        result = group.result
        assert result is not None, "there are operators"
        self._found.num_groups += 1
        self._found.expect(where, "seen", outcome.seen, result.seen)
        said = outcome.reason if outcome.result is GroupResult.filtered else None
        self._found.expect(where, "filtered", said, filtered)
        self._found.expect(where, "decisions", outcome.decisions, result.decisions)
        self._found.expect(where, "rollouts", outcome.rollouts, group.summaries)
        self._found.expect(where, "parts", outcome.parts, group.part_means)
        self._found.expect(where, "priority", outcome.priority, result.priority)
        oldest, batch = group.oldest_version, outcome.batch_sequence
        if outcome.offers and (self._imported or oldest is None):  # its age counts from the batch that was next
            oldest = outcome.offers[0].since
        offered = offers_of(group, result, oldest, 0 if batch is None else batch)
        for name in ("offers", "masks", "offsets"):
            self._found.expect(where, name, getattr(outcome, name), offered.get(name, ()))

    def _compare_batches(self, trained: Mapping[str, _Trained]) -> None:
        differing: list[tuple[Record, str]] = []
        for record, experience in self._log.in_force("batches"):
            if not isinstance(experience, Experience):
                continue
            if experience.use:
                is_equal = self._reuse.check_body(experience, self._said)
            elif experience.ids.rollout_id in trained:
                is_equal = _trained(experience) == trained[experience.ids.rollout_id]
            else:
                continue
            self._found.num_rollouts += 1
            if not is_equal:
                differing.append((record, experience.ids.rollout_id))
        if not differing:
            return
        begins = [begin for _, begin in sorted(self._log.transport.admin.begin_offsets("batches").items())]
        kept = self._said.offsets.get("batches") or tuple(begins)
        starts = [max(pair) for pair in zip(begins, kept, strict=True)]
        foreign = foreign_places(self._log.transport, starts, self._said.version)
        for record, rollout_id in differing:
            if (record.place, record.offset) not in foreign:
                self._found.differs(f"{record}: {rollout_id}: reward, terms or masks, computed again others")


def _verified(record: Record) -> VerifiedRollout | None:
    """Return a record of `verified` as the buffer reads it; None for one that the buffer skips."""
    if record.value is None or codec.is_foreign(record):
        return None
    try:
        message = codec.from_record(record)
    except ContractError as error:
        ids = codec.ids_from_headers(record)
        if ids is None:
            return None
        return VerifiedRollout(
            ids=ids, rollout=None, verdict=None, reason=UnscorableReason.undecodable, detail=str(error)
        )
    return message if isinstance(message, VerifiedRollout) else None


def _group_of(outcome: GroupOutcome, siblings: Mapping[str, Sequence[Sibling]]) -> Group | None:
    """Return the group as the buffer had it; None if a part of it is no longer on the log. If a rollout has two
    records, the buffer used the one that the outcome names, if it names one."""
    present: list[Sibling] = []
    for summary, offset in zip(outcome.rollouts, chain(outcome.offsets, repeat(None)), strict=False):
        records = siblings.get(summary.rollout_id)
        if not records:
            return None
        present.append(next((record for record in records if record.offset == offset), records[0]))
    return Group(
        outcome.group_id,
        outcome.taskset,
        outcome.sequence,
        outcome.group_size,
        first_at=0.0,
        first_offset=0,
        place=TopicPartition("verified", 0),
        siblings={sibling.sibling: sibling for sibling in present},
    )
