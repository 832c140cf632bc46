"""The stages of a run: the data of each batch, and the algorithm that trains it.

Both are functions of the version alone (batch k is trained at version k). So every role can compute them from the run
file and the version. A run without [[stages]] is one stage without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rftstream.config.parts import registry
from rftstream.config.role_sections import StageSection, TrainerSection
from rftstream.config.sections import DemonstrationsSection, RunConfig, name_of_part
from rftstream.contracts.batches import LossKind
from rftstream.errors import ConfigError

OF_TRAINER = ("lr", "lr_schedule", "warmup_steps", "min_lr_share", "minibatches", "updates_per_batch")
"""Settings of [trainer] that a stage may override."""
FROM_DEMONSTRATIONS = frozenset({LossKind.sft, LossKind.dpo})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the run that trains with one algorithm, from one version to another."""

    number: int = 0
    """Number of the stage, from 0."""
    name: str = ""
    first: int = 0
    """The version at which the stage's first batch is trained."""
    steps: int | None = None
    """Number of its batches; None: as many as there are."""
    where: str = "trainer.algorithm"
    """Key of the run file that names the stage's algorithm."""
    trainer: TrainerSection
    """The trainer's settings in this stage."""
    own_reference: bool = False
    """Whether the reference, if the algorithm has one, becomes the policy at the stage's beginning."""
    takes_rollouts: bool = True
    kind: LossKind | None = None
    """Kind of the demonstrations that the stage takes. None: it takes none, or, in a run without stages, those of the
    algorithm."""
    demonstration_ratio: float = 0.0
    """Demonstrations beside the rollouts of a batch, as a share of the number of rollouts."""
    demonstrations_per_batch: int = 0
    """Demonstrations or pairs in a batch without rollouts."""

    @property
    def end(self) -> int | None:
        """The version after its last batch."""
        return None if self.steps is None else self.first + self.steps

    def to_text(self) -> str:
        """Return the stage's name and its versions, for people."""
        last = "" if self.end is None else f" to {self.end:,}"
        return f"{self.name}, versions {self.first:,}{last}"


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a run, in order; there is at least one. Every role makes them from the config, and looks up stages
    by version."""

    all: tuple[Stage, ...]
    named: bool
    """Whether the run file has stages. Without them, the run is one stage."""

    @staticmethod
    def of(config: RunConfig) -> Stages:
        """Make the stages of a run. ConfigError if an algorithm cannot be found, or takes both chats and pairs."""
        demonstrations = config.experts or DemonstrationsSection()
        common = Stage(
            trainer=config.trainer,
            steps=config.run.steps,
            takes_rollouts=not config.without_tasks,
            demonstration_ratio=demonstrations.ratio if config.experts is not None else 0.0,
            demonstrations_per_batch=demonstrations.per_batch,
        )
        if not config.stages:
            return Stages((common,), named=False)
        firsts = accumulate((stage.steps for stage in config.stages), initial=0)
        return Stages(
            tuple(
                _stage(config, number, one, first, common)
                for (number, one), first in zip(enumerate(config.stages), firsts, strict=False)
            ),
            named=True,
        )

    @staticmethod
    def recorded(config: RunConfig) -> Stages:
        """Return the single stage of a reader whose batches are already recorded."""
        return Stages((Stage(trainer=config.trainer),), named=False)

    @property
    def steps(self) -> int | None:
        """Batches of the whole run; None: as many as there are."""
        return self.all[-1].end

    @property
    def always_explores(self) -> bool:
        """Whether every stage takes rollouts."""
        return all(stage.takes_rollouts for stage in self.all)

    def at(self, version: int) -> Stage:
        """Return the stage of the batch that is trained at `version`. Beyond the end, return the last stage."""
        return next((stage for stage in self.all if stage.end is None or version < stage.end), self.all[-1])

    def batches_of_rollouts(self, first: int, end: int) -> int:
        """Return how many of the batches `first` ... `end - 1` take rollouts."""
        if not self.named:
            return end - first
        return sum(
            max(0, min(end, stage.end or end) - max(first, stage.first)) for stage in self.all if stage.takes_rollouts
        )

    def batch_of_rollouts(self, first: int, number: int) -> int:
        """Return the batch with this number, from 0, among the batches from `first` on that take rollouts. If there are
        fewer, return the end of the run."""
        if not self.named:
            return first + number
        for stage in self.all:
            if stage.takes_rollouts and stage.end is not None:
                begin = max(first, stage.first)
                if number < max(0, stage.end - begin):
                    return begin + number
                number -= max(0, stage.end - begin)
        return self.steps or 0


def _stage(config: RunConfig, number: int, section: StageSection, first: int, common: Stage) -> Stage:
    where = f"stages.{number}.algorithm" if section.algorithm is not None else "trainer.algorithm"
    name = name_of_part(config.algorithms_named()[where], where)
    kinds = loss_kinds(name, where)
    if len(from_demonstrations := kinds & FROM_DEMONSTRATIONS) > 1:
        raise ConfigError(f"{where}: {name!r} learns from chats and from pairs, expected one of them in a stage")
    own = {key: value for key in OF_TRAINER if (value := getattr(section, key)) is not None}
    return replace(
        common,
        number=number,
        name=section.name or name,
        first=first,
        steps=section.steps,
        where=where,
        trainer=replace(config.trainer, **own),
        takes_rollouts=LossKind.rl in kinds,
        kind=next(iter(from_demonstrations), None),
        own_reference=number > 0 and section.reference == "stage",
        demonstration_ratio=common.demonstration_ratio if section.experts_ratio is None else section.experts_ratio,
        demonstrations_per_batch=section.experts_per_batch or common.demonstrations_per_batch,
    )


def stage_line(config: RunConfig, version: int) -> str | None:
    """Return the stage of a run at this version, as `2 of 3, grpo, versions 20 to 60`, without looking up any part."""
    first = 0
    for number, section in enumerate(config.stages):
        end = first + section.steps
        if version < end or number + 1 == len(config.stages):
            name = section.name or name_of_part(section.algorithm or config.trainer.algorithm, "stages")
            return f"{number + 1} of {len(config.stages)}, {name}, versions {first:,} to {end:,}"
        first = end
    return None


def loss_kinds(algorithm: str, where: str) -> frozenset[LossKind]:
    """Return the losses of an algorithm: the kinds of data that it learns from."""
    part = registry.resolve("algorithm", algorithm, where=where)
    return frozenset(map(LossKind, getattr(part, "loss_kinds", (LossKind.rl,))))


def taken_kinds(config: RunConfig) -> frozenset[LossKind]:
    """Return the kinds of data that the run learns from, over all its stages."""
    places = [stage.where for stage in Stages.of(config).all]
    named = config.algorithms_named()
    kinds: Sequence[frozenset[LossKind]] = [loss_kinds(name_of_part(named[place], place), place) for place in places]
    return frozenset().union(*kinds)


def demonstration_passes(config: RunConfig) -> int | None:
    """Return how often each demonstration is taken. None: as often as the run needs."""
    if config.experts is None:
        return None
    once = config.demonstrations_alone and config.run.steps is None
    return config.experts.passes or (1 if once else None)
