"""Draws: the choice of the next problem, and the decision of the task-side operators about it.

Draws depend only on the tasksets, the run's seed, the cursor and the facts. So the feeder and the recomputation of its
decisions share this code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rftstream.algorithms.requirements import has_greedy_sibling
from rftstream.config.loader import sampling_for
from rftstream.config.sections import RunConfig, name_of_part
from rftstream.contracts.ids import derive_seed, group_id, split_group_id
from rftstream.contracts.tasks import Problem, Sampling
from rftstream.data.operators.base import Draw
from rftstream.data.operators.facts import Facts
from rftstream.data.operators.pipeline import TaskPipeline, TaskResult
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.files import JsonlTaskset
from rftstream.data.tasksets.growing import FetchProblem, GrowingTasksets
from rftstream.data.tasksets.open import grows, mix, open_taskset, order
from rftstream.errors import ConfigError
from rftstream.models.rendering import Renderer, open_renderer, own_renderers
from rftstream.models.spec import ModelSpec
from rftstream.roles.feeder.cursor import FeederCursor
from rftstream.roles.feeder.growth import GrowthWalk


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
    """Whether the first sibling of each group is sampled at temperature 0, for algorithms that compare with it."""
    grows: bool = False
    """Whether problems join the taskset while the run goes on, so that it never ends."""

    def sampling_of(self, sampling: Sampling, sibling: int) -> Sampling:
        """Return the sampling settings of a sibling, given those of its group."""
        return replace(sampling, temperature=0.0) if self.greedy_baseline and sibling == 0 else sampling

    def draw(self, group: str, problem: Problem, group_size: int) -> Draw:
        """Return a problem of the taskset in the form that operators see first. `group` is the id that its group would
        have."""
        name, taskset_pass, index, _ = split_group_id(group) or (group, 0, 0, 0)
        return Draw(
            group_id=group,
            taskset=name,
            taskset_pass=taskset_pass,
            index=index,
            problem=problem,
            sampling=self.sampling,
            group_size=group_size,
        )

    @property
    def size(self) -> int | None:
        """Number of problems in all passes; None if there is no end."""
        return None if self.passes is None else self.passes * len(self.taskset)


def open_sources(config: RunConfig, spec: ModelSpec) -> tuple[dict[str, Source], int | None]:
    """Return the tasksets of a run, and the longest prompt + completion in tokens. The latter comes from the run file,
    or else from the model's config. ConfigErrors name the section."""
    renderer = open_renderer(spec)
    own = own_renderers(spec, config.tasksets)
    greedy = has_greedy_sibling(config)
    sources = {
        name: Source(
            taskset=open_taskset(name, section, config),
            weight=section.weight,
            sampling=sampling_for(config, section.sampling, where=f"tasksets.{name}.sampling"),
            environment=name_of_part(section.environment, f"tasksets.{name}.environment"),
            too_long=section.too_long,
            shuffle=section.shuffle,
            passes=section.passes,
            renderer=own.get(name, renderer),
            greedy_baseline=greedy,
            grows=grows(section.source),
        )
        for name, section in config.tasksets.items()
    }
    return sources, spec.context if spec.context is not None else renderer.context


def check_some(sources: Mapping[str, Source]) -> bool:
    """Check some unchecked rows of large files. Return whether unchecked rows are left. ConfigError with the section's
    name for a row that is not a problem."""
    has_more = False
    for name, source in sources.items():
        if isinstance(source.taskset, JsonlTaskset):
            try:
                has_more = source.taskset.check_some() or has_more
            except ConfigError as error:
                raise ConfigError(f"tasksets.{name}: {error}") from error
    return has_more


def tasksets_of(sources: Mapping[str, Source]) -> dict[str, Taskset]:
    """Return the tasksets behind the sources."""
    return {name: source.taskset for name, source in sources.items()}


def growing_of(sources: Mapping[str, Source], fetch: FetchProblem) -> GrowingTasksets:
    """Return the growing tasksets. `fetch` reads a problem again by its offset on `problems`."""
    return GrowingTasksets(tasksets_of(sources), fetch)


class Draws:
    """Draws problems from the tasksets, and asks the operators about each. The feeder's step makes one and calls `next`
    or `put_back` for each group; both move the cursor. The recomputation of a run does the same with its own
    cursors."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        pipeline: TaskPipeline,
        *,
        run_seed: int,
        group_size: int,
        context: int | None,
    ) -> None:
        """`group_size` is the number of rollouts of a problem that no operator changes. `context` is the longest prompt
        + completion in tokens; None if unknown."""
        self.sources = sources
        self.pipeline = pipeline
        self._seed = run_seed
        self.group_size = group_size
        self._context = context

    def without_operators(self) -> Draws:
        """Return the same draws without operators, so that no problem is skipped."""
        none = TaskPipeline({}, self._seed)
        return Draws(self.sources, none, run_seed=self._seed, group_size=self.group_size, context=self._context)

    def left(self, cursor: FeederCursor) -> dict[str, float]:
        """Return the weights of the tasksets that have a problem to draw now."""
        return {
            name: source.weight
            for name, source in self.sources.items()
            if source.weight > 0
            and (
                _walk(cursor, name).has_next(len(source.taskset), source.passes)
                if source.grows
                else source.size is None or cursor.drawn[name] < source.size
            )
        }

    @property
    def growing(self) -> list[str]:
        """Return the tasksets that may have more problems later."""
        return [name for name, source in self.sources.items() if source.grows and source.weight > 0]

    def is_over(self, cursor: FeederCursor) -> bool:
        """Return whether there is no problem to draw, now or later."""
        return not self.growing and not self.left(cursor)

    def next(self, cursor: FeederCursor, facts: Facts, end: int) -> TaskResult | None:
        """Return the next draw that becomes a group, and move the cursor behind it. None if every taskset has ended, or
        if operators have skipped all problems below the number `end`."""
        while not self.pipeline or cursor.num_drawn < end:
            left = self.left(cursor)
            if not left:
                return None
            name = self._choose(cursor, left)
            source = self.sources[name]
            taskset_pass, index = self._place(cursor, name)
            cursor.drawn[name] += 1
            group = group_id(name, taskset_pass, index, 0)
            result = self.pipeline.decide(source.draw(group, source.taskset.problem(index), self.group_size), facts)
            if result.skipped is not None:
                cursor.counts.skip(name, *result.skipped)
                continue
            problem = self._fitting(source, name, index, result.draw.problem)
            if problem is None:
                cursor.left_out[name] += 1
                all_there = cursor.left_out[name] >= len(source.taskset) and not source.grows
                if all_there and cursor.left_out[name] == cursor.drawn[name]:
                    raise ConfigError(f"tasksets.{name}: every prompt is longer than the context")
                continue
            cursor.counts.change(name, result.changed)
            return result
        return None

    def _choose(self, cursor: FeederCursor, left: Mapping[str, float]) -> str:
        """Return the taskset of the next draw, by the weights of the tasksets that have a problem. A growing taskset
        without a problem loses its turn for good."""
        counts = {name: cursor.drawn[name] + _walk(cursor, name).waived for name in left}
        chosen = mix(left, counts)
        for name in self.growing:
            if name not in left:
                share = self.sources[name].weight / left[chosen]
                walk = cursor.walks.setdefault(name, GrowthWalk())
                walk.waived = max(walk.waived, int((counts[chosen] + 0.5) * share - 0.5) - cursor.drawn[name])
        return chosen

    def _place(self, cursor: FeederCursor, name: str) -> tuple[int, int]:
        """Return pass and index of the next problem of a taskset."""
        source = self.sources[name]
        if source.grows:
            walk = cursor.walks.setdefault(name, GrowthWalk())
            return walk.next(len(source.taskset), source.passes)
        taskset_pass, index = divmod(cursor.drawn[name], len(source.taskset))
        if source.shuffle:
            seed = derive_seed(self._seed, "order", name)
            index = order(len(source.taskset), taskset_pass, seed)(index)
        return taskset_pass, index

    def put_back(self, cursor: FeederCursor, facts: Facts, group: str) -> TaskResult | None:
        """Return the draw of a group that is put back, and count it. Operators cannot skip it. None if the tasksets
        have no such problem, or if it is too long."""
        name, _, index, _ = split_group_id(group) or ("", 0, 0, 0)
        source = self.sources.get(name)
        if source is None or index >= len(source.taskset):
            return None
        problem = self._fitting(source, name, index, source.taskset.problem(index))
        if problem is None:
            return None
        result = self.pipeline.decide(source.draw(group, problem, self.group_size), facts, put_back=True)
        cursor.counts.put_back += 1
        cursor.counts.change(name, result.changed)
        return result

    def _fitting(self, source: Source, name: str, index: int, problem: Problem) -> Problem | None:
        """Return the problem if its prompt leaves room for a completion; otherwise apply `too_long`. None if the
        problem is left out."""
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


def _walk(cursor: FeederCursor, name: str) -> GrowthWalk:
    return cursor.walks.get(name) or GrowthWalk()
