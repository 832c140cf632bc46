"""Previews the effect of a pipeline's operators on problems of its tasksets, and on the groups that a run recorded.

Nothing is written, sampled or scored. Operators see problems as in the first pass of a taskset. They see groups as the
buffer saw them: with the siblings of their outcome, and with the facts of that moment. So the run's own operators
decide as they did in the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from rftstream.config.data_pipelines.pipelines import has_operators
from rftstream.config.sections import RunConfig
from rftstream.contracts.ids import derive_seed
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.operators.base import Draw, ScoredGroup, ScoredRollout
from rftstream.data.operators.counts import PipelineCounts, draws, name_apart
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import ExperiencePipeline, TaskPipeline
from rftstream.data.operators.problems import all_problems
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import grows, open_taskset, order
from rftstream.errors import ConfigError
from rftstream.queries.formatting import columns, plural
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.explorer.attempt import oldest_version
from rftstream.service.role import Log
from rftstream.transport.base import Transport

SHOWN_CHARACTERS = 72


@dataclass(slots=True, kw_only=True)
class Preview:
    """The result of a preview. `preview` makes it; a command prints it."""

    tasks: dict[str, PipelineCounts]
    """Taskset -> counts of the problems that were previewed."""
    sizes: dict[str, int]
    """Taskset -> its problems."""
    groups: dict[str, PipelineCounts] = field(default_factory=dict)
    """Taskset -> counts of the recorded groups that were previewed."""
    seen: int = 0
    """Number of records of `outcomes` in the facts of the task side."""
    num_recorded: int = 0
    """Groups of the run with an outcome and enough rewards."""
    num_same: int = 0
    """Previewed groups with the same result as in the run."""
    recorded: Counter[str] = field(default_factory=Counter)
    """Recorded result of these groups in the run (batched, filtered, ...) -> groups."""
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Return the operators' errors, with the problem or group."""
        all_counts = (*self.tasks.values(), *self.groups.values())
        return list(dict.fromkeys(text for counts in all_counts for text in counts.failures))

    def to_json(self) -> dict[str, Any]:
        """Return the preview as a dict for JSON."""
        return {
            "tasks": {name: {"of": self.sizes[name], **_side_to_json(counts)} for name, counts in self.tasks.items()},
            "groups": {name: _side_to_json(counts) for name, counts in self.groups.items()},
            "seen": self.seen,
            "recorded_groups": self.num_recorded,
            "recorded_results": dict(self.recorded),
            "same_as_recorded": self.num_same,
            "failures": self.failures,
            "notes": self.notes,
        }

    def to_text(self) -> str:
        """Return the preview as text for people."""
        return "\n".join(_text(self))


def preview(config: RunConfig, transport: Transport | None, *, num: int) -> Preview:
    """Apply the operators of a config to up to `num` problems of each taskset and, with the log of a run, to its newest
    `num` groups. ConfigError if there are no operators, or if one cannot be built."""
    if not has_operators(config) and config.buffer.zero_variance == "keep":
        raise ConfigError("pipeline: found no operators, expected [[pipeline]] or [[tasksets.NAME.pipeline]]")
    found = Preview(tasks={}, sizes={})
    tasksets = {name: open_taskset(name, section, config) for name, section in config.tasksets.items()}
    task_side, experience_side = TaskPipeline.of(config, all_problems(config, tasksets)), ExperiencePipeline.of(config)
    name_apart(task_side.operators)
    name_apart(experience_side.operators)
    facts = task_side.new_facts()
    if transport is not None:
        for outcome in _outcomes(transport):
            facts.absorb(outcome)
        found.seen = facts.seen
    if task_side:
        _preview_tasks(found, task_side, config, tasksets, facts, num)
    if experience_side and transport is not None:
        _preview_groups(found, experience_side, config, transport, num)
    elif experience_side:
        found.notes.append("operators for groups need groups: give --run RUN to see what they do to recorded ones")
    return found


# --------------------------------------------------------------------------------------------- task side


def _preview_tasks(
    found: Preview,
    pipeline: TaskPipeline,
    config: RunConfig,
    tasksets: Mapping[str, Taskset],
    facts: Facts,
    num: int,
) -> None:
    for name, operators in pipeline.operators.items():
        if not operators:
            continue
        taskset = tasksets[name]
        if grows(config.tasksets[name].source):
            found.notes.append(f"{name}: its problems join while a run goes on, so there are none to look at")
            continue
        found.sizes[name] = len(taskset)
        counts = found.tasks[name] = PipelineCounts(operators)
        for draw in draws(config, name, taskset, list(_first_numbers(config, name, taskset, num))):
            counts.task(pipeline.decide(draw, facts), _draw_example(draw))


def _first_numbers(config: RunConfig, name: str, taskset: Taskset, num: int) -> Iterator[int]:
    """Yield the numbers of the problems that the feeder would draw first."""
    size = len(taskset)
    if not config.tasksets[name].shuffle:
        yield from range(min(num, size))
        return
    place = order(size, 0, derive_seed(config.run.seed, "order", name))
    yield from (place(position) for position in range(min(num, size)))


def _draw_example(draw: Draw) -> dict[str, Any]:
    messages = draw.problem.messages
    text = messages[-1].content if messages else ""
    return {"problem": f"{draw.taskset}/{draw.index}", "text": _cut(text), "answer": _cut(draw.problem.answer or "")}


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARACTERS else f"{flat[: SHOWN_CHARACTERS - 3]}..."


# --------------------------------------------------------------------------------------------- experience side


def _outcomes(transport: Transport) -> Iterator[GroupOutcome]:
    for received in Log(transport).messages("outcomes"):
        if isinstance(received.message, GroupOutcome):
            yield received.message


@dataclass(frozen=True, slots=True)
class _RecordedGroup:
    """A group to preview, with the place of its outcome."""

    seen: int
    """Number of records of `outcomes` in the facts that the buffer used."""
    number: int
    """Number of the group's record on `outcomes`."""
    outcome: GroupOutcome


def _preview_groups(
    found: Preview, pipeline: ExperiencePipeline, config: RunConfig, transport: Transport, num: int
) -> None:
    groups = _newest_groups(found, transport, config.buffer.min_siblings, num)
    places = _places(transport, groups)
    bodies = Bodies(transport, 0)
    facts, outcomes = Facts(), _outcomes(transport)
    for one in sorted(groups, key=lambda group: (group.seen, group.number)):
        while facts.seen < one.seen and (outcome := next(outcomes, None)) is not None:
            facts.absorb(outcome)
        outcome = one.outcome
        operators = pipeline.operators.get(outcome.taskset, ())
        counts = found.groups.setdefault(outcome.taskset, PipelineCounts(operators))
        group = _scored_group(outcome, places, bodies)
        if group is None:
            found.notes.append(f"{outcome.group_id}: its rollouts are gone from the log; left out")
            continue
        result = pipeline.decide(group, facts, min(config.buffer.min_siblings, group.size))
        counts.experience(result, _group_example(group))
        found.recorded[str(outcome.result)] += 1
        found.num_same += result.decisions == outcome.decisions


def _newest_groups(found: Preview, transport: Transport, min_siblings: int, num: int) -> list[_RecordedGroup]:
    groups: list[_RecordedGroup] = []
    has_parts = False
    for number, outcome in enumerate(_outcomes(transport)):
        if outcome.late:
            continue
        scored = sum(rollout.reward is not None for rollout in outcome.rollouts)
        if scored < max(1, min(min_siblings, outcome.group_size or len(outcome.rollouts))):
            continue
        has_parts = has_parts or bool(outcome.parts)
        found.num_recorded += 1
        groups.append(_RecordedGroup(number if outcome.seen is None else outcome.seen, number, outcome))
        if len(groups) >= 2 * num:
            groups = groups[-num:]
    if groups and not has_parts:
        found.notes.append("the outcomes of this run say no named parts, so facts know rewards alone")
    return groups[-num:]


def _places(transport: Transport, groups: Sequence[_RecordedGroup]) -> dict[str, tuple[TopicPartition, int]]:
    """Return the places of these groups' rollouts on `verified`."""
    wanted = {rollout.rollout_id for group in groups for rollout in group.outcome.rollouts}
    found: dict[str, tuple[TopicPartition, int]] = {}
    for record in Log(transport).read("verified", bodies=False):
        name = (record.header("rollout_id") or b"").decode()
        if name in wanted:
            found.setdefault(name, (record.place, record.offset))  # a twin changes nothing
    return found


def _scored_group(
    outcome: GroupOutcome, places: Mapping[str, tuple[TopicPartition, int]], bodies: Bodies
) -> ScoredGroup | None:
    rollouts = []
    for rollout in outcome.rollouts:
        if rollout.reward is None:
            continue
        if rollout.rollout_id not in places:
            return None
        load = cache(partial(bodies.get, *places[rollout.rollout_id]))
        rollouts.append(
            ScoredRollout(
                sibling=int(rollout.rollout_id.rpartition("/")[2]),
                reward=rollout.reward,
                num_tokens=rollout.num_tokens,
                truncated=rollout.status is RolloutStatus.truncated,
                load=load,
                oldest_version=None if outcome.version is None else _oldest_version(load()),
            )
        )
    return ScoredGroup(
        group_id=outcome.group_id,
        taskset=outcome.taskset,
        sequence=outcome.sequence,
        size=outcome.group_size or len(outcome.rollouts),
        rollouts=tuple(rollouts),
        version=outcome.version,
    )


def _oldest_version(verified: VerifiedRollout) -> int | None:
    return oldest_version(verified.rollout.segments) if verified.rollout is not None else None


def _group_example(group: ScoredGroup) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "rewards": [rollout.reward for rollout in group.rollouts],
        "tokens": [rollout.num_tokens for rollout in group.rollouts],
    }


# --------------------------------------------------------------------------------------------- for people


def _side_to_json(counts: PipelineCounts) -> dict[str, Any]:
    return {"in": counts.num_in, "out": counts.num_out, "operators": [count.to_json() for count in counts.counts]}


def _text(found: Preview) -> Iterator[str]:
    for name, counts in found.tasks.items():
        size = found.sizes[name]
        sample = "all" if counts.num_in == size else f"the first {counts.num_in:,} of"
        yield f"tasksets.{name}: {sample} {plural(size, 'problem')}, {counts.num_out:,} stay"
        yield from _operators(counts)
    if found.groups:
        results = ", ".join(f"{result} {count:,}" for result, count in sorted(found.recorded.items()))
        looked = sum(counts.num_in for counts in found.groups.values())
        yield (
            f"{looked:,} of {plural(found.num_recorded, 'recorded group')} (in the run: {results}); to "
            f"{found.num_same:,} the same is done as in the run"
        )
    for name, counts in found.groups.items():
        yield f"groups of {name}: {counts.num_in:,}, {counts.num_out:,} stay"
        yield from _operators(counts)
    for failure in found.failures:
        yield f"failed: {failure}"
    for note in found.notes:
        yield f"note: {note}"


def _operators(counts: PipelineCounts) -> Iterator[str]:
    rows: list[tuple[object, ...]] = [("operator", "", "in", "out", "done")]
    for count in counts.counts:
        rows.append((count.label, count.where, f"{count.num_in:,}", f"{count.num_out:,}", ""))
        for (action, reason), effect in count.effects.items():
            rows.append((f"  {action}{': ' if reason else ''}{reason}", "", "", "", f"{effect.count:,}"))
    yield from columns(rows, left=2, indent="  ")
    for count in counts.counts:
        for (action, reason), effect in count.effects.items():
            yield f"  {count.label}, {action}{f' ({reason})' if reason else ''}, for example:"
            yield from (f"    {example_text(example)}" for example in effect.examples)
    if counts.num_in and not counts.num_out:
        yield "  nothing is left"


def example_text(example: Mapping[str, Any]) -> str:
    """Return an example as a line for people."""
    if "group" in example:
        rewards = " ".join(f"{reward:g}" for reward in example["rewards"])
        siblings = f"  siblings {' '.join(map(str, example['siblings']))}" if example.get("siblings") else ""
        return f"{example['group']}  rewards {rewards}{siblings}"
    answer = f"  answer {example['answer']!r}" if example["answer"] else ""
    return f"{example['problem']}  {example['text']!r}{answer}"
