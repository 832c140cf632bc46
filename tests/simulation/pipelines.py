"""Random pipelines: operators that answer by facts and seeds in every way there is, built-in ones among them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any
from zlib import crc32

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.batches import LossKind
from rftstream.contracts.ids import unit_interval
from rftstream.data.operators.base import KEEP, Change, Draw, Mask, Reject, ScoredGroup, Shape, Skip, TokenSpan
from rftstream.data.operators.facts import Facts

BY_FACTS = ("Moody", "Picky", "solve_rate")
"""Operators whose answers depend on what was decided before, which is a matter of time."""


def mood(seed: int, *facts: Any) -> float:
    """Return a number from 0 to below 1 that nobody can tell before: other facts, another number."""
    return unit_interval(seed ^ (crc32(repr(facts).encode()) << 31)) if facts else unit_interval(seed)


class Lucky:
    """Skips and changes problems by its seed alone."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        skip: float = 0.3
        change: float = 0.3

    def __init__(self, config: Config) -> None:
        self._config = config

    def facts(self, draw: Draw, facts: Facts) -> tuple[Any, ...]:
        return ()

    def decide(self, draw: Draw, facts: Facts, seed: int) -> Any:
        luck = mood(seed, *self.facts(draw, facts))
        if luck < self._config.skip:
            return Skip(f"unlucky {seed % 3}")
        if luck < self._config.skip + self._config.change:
            sampling = replace(draw.sampling, max_tokens=8 + seed % 5) if seed % 2 else None
            return Change(group_size=1 + seed % 4, sampling=sampling)
        return KEEP


class Moody(Lucky):
    """By all that facts say, too."""

    def facts(self, draw: Draw, facts: Facts) -> tuple[Any, ...]:
        mine, all_of_it = facts.problem(draw.taskset, draw.index), facts.taskset(draw.taskset)
        return facts.seen, facts.num_groups, mine.num_groups, mine.mean(), all_of_it.recent()


class Clumsy:
    """Raises and answers nonsense now and then; of either side."""

    def decide(self, what: Any, facts: Facts, seed: int) -> Any:
        luck = mood(seed)
        if luck < 0.08:
            raise ValueError("clumsy")
        return "nonsense" if luck < 0.15 else KEEP


class ClumsyLate(Clumsy):
    side = "experience"


class Choosy:
    """Rejects, masks and shapes by its seed alone."""

    side = "experience"

    def facts(self, group: ScoredGroup, facts: Facts) -> tuple[Any, ...]:
        return ()

    def decide(self, group: ScoredGroup, facts: Facts, seed: int) -> Any:
        luck, first = mood(seed, *self.facts(group, facts)), group.rollouts[0].sibling
        if luck < 0.15:
            return Reject(f"whim {seed % 3}")
        if luck < 0.3:
            return Reject("the first", (first,))
        if luck < 0.5:
            return Mask({first: (TokenSpan(0, 0, 1 + seed % 2),)}, "the beginning")
        if luck < 0.8:
            return Shape({one.sibling: one.reward * 0.25 + seed % 7 for one in group.rollouts}, "bonus")
        return KEEP


class Picky(Choosy):
    """By all that facts say, too."""

    def facts(self, group: ScoredGroup, facts: Facts) -> tuple[Any, ...]:
        return facts.seen, facts.num_groups, facts.taskset(group.taskset).mean()


def with_pipelines(config: RunConfig, random: Random) -> RunConfig:
    """Return the config with operators, drawn from what `random` has come to: a new setting changes no seed."""
    values = loader.to_dict(config)
    own = Random(f"pipelines {random.getstate()}")
    here = f"{__name__}:"
    kinds: list[dict[str, Any]] = [
        {"op": f"{here}Lucky", "skip": own.choice([0.1, 0.5]), "change": own.choice([0.0, 0.4])},
        {"op": f"{here}Clumsy"}, {"op": "length", "min_characters": 4}, {"op": "regex", "skip": "1", "field": "answer"},
        {"op": f"{here}Choosy"}, {"op": f"{here}ClumsyLate"}, {"op": "zero_variance"},
        {"op": "truncated", "action": own.choice(["reject", "mask"])},
        {"op": "repetition", "ngram": 2, "max_share": 0.5, "action": "mask"},
    ]  # fmt: skip
    if config.policies["fake"]["mean_tokens"] > config.sampling.max_tokens:  # else all would be rejected, without end
        kinds = [one | {"action": "mask"} if one["op"] == "truncated" else one for one in kinds]
    if own.random() < 0.7:
        kinds += 2 * [
            {"op": f"{here}Moody", "skip": own.choice([0.2, 0.6])}, {"op": f"{here}Picky"},
            {"op": "solve_rate", "keep": [0.2, 0.9], "explore": 0.5, "last_group": own.random() < 0.5},
        ]  # fmt: skip
    if config.feeder.group_size == 1 or config.policies["fake"]["fail_share"]:
        kinds = [one for one in kinds if one["op"] != "zero_variance"]  # else next to nothing would be left
    values["pipeline"] = [own.choice(kinds) for _ in range(own.randint(1, 4))]
    for section in values["tasksets"].values():
        if section.get("passes"):
            section["passes"] = own.choice([1, 3])  # so that many are skipped and enough is left
        section["pipeline"] = [own.choice(kinds) for _ in range(own.choice([0, 0, 1, 2]))]
    _draw_reuse(config, values, Random(f"reuse {random.getstate()}"))
    values["buffer"]["max_refill"] = 100_000
    if values["buffer"].get("group_deadline_s") and values["buffer"]["zero_variance"] == "replace":
        # Where many groups come late with one sibling, all are rejected, and others are admitted that come late, too.
        values["buffer"]["group_deadline_s"] = 30.0
    values["verifier"]["max_dead_share"] = 1.0  # a run that rejects most groups draws so many that 200 in a row may die
    return loader.from_dict(values)


def _draw_reuse(config: RunConfig, values: dict[str, Any], own: Random) -> None:
    """Let half of the runs have groups once more. From numbers of its own: what else a seed means stays as it was."""
    if own.random() < 0.5:
        return
    kinds: list[dict[str, Any]] = [_replay(own)]
    if own.random() < 0.5:
        by = own.choice(["difficulty", "spread", "advantage"])
        kinds.insert(0, {"op": "priority", "by": by, "floor": own.choice([0.0, 0.1])})
    if _can_imitate(config):
        limits = {key: value for key, value in _replay(own).items() if key not in ("decay", "flat_too")}
        kinds.append({**limits, "op": "hindsight", "per_group": own.randint(1, 2), "right_from": 0.9})
    for kind in kinds:
        sections = [values, *values["tasksets"].values()]
        pipeline = sections[own.randrange(len(sections)) if own.random() < 0.3 else 0]["pipeline"]
        pipeline.insert(own.randint(0, len(pipeline)), kind)


def _replay(own: Random) -> dict[str, Any]:
    return {
        "op": "replay",
        "per_batch": own.randint(1, 4),
        "max_uses": own.randint(1, 4),
        "cool_down": own.choice([0, 0, 1, 2]),
        "max_staleness": own.choice([2, 8, 50]),
        "decay": own.choice([0.5, 1.0]),
        "flat_too": own.random() < 0.85,
        "max_held": own.choice([3, 1024]),
    }


def _can_imitate(config: RunConfig) -> bool:
    """Whether some batches may have demonstrations beside rollouts."""
    stages = Stages.of(config)
    if stages.named:
        takes = any(stage.takes_rollouts and stage.kind is LossKind.sft for stage in stages.all)
    else:
        takes = config.trainer.algorithm in ("mix", "chord")
    return takes and config.buffer.zero_variance == "keep"


def uses_facts(config: RunConfig) -> bool:
    """Whether any operator answers by what was decided before, or is heard by the versions that sampled."""
    tables = [*config.pipeline, *(table for section in config.tasksets.values() for table in section.pipeline)]
    names = {table["op"].rpartition(":")[2] for table in tables}
    by_versions = config.feeder.max_staleness > 0 and names & {"replay", "hindsight"}
    return bool(names & set(BY_FACTS)) or bool(by_versions)
