"""What the stages of a run say of each of its batches, written out; and an algorithm for pairs without a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rftstream.algorithms.base import Denominators, MicroBatch, TrainingRow, training_row
from rftstream.config.sections import RunConfig
from rftstream.contracts.batches import Experience, LossKind

PAIRS = f"{__name__}:LikelierThanTheOther"
EXPLORES = {"grpo": True, "rloo": True, "mix": True, "chord": True, "sft": False, PAIRS: False}
TAKES = {
    "grpo": None,
    "rloo": None,
    "mix": LossKind.sft,
    "chord": LossKind.sft,
    "sft": LossKind.sft,
    PAIRS: LossKind.dpo,
}


class LikelierThanTheOther:
    """DPO asks for a reference, which the fake backend has not."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    needs: frozenset[str] = frozenset()
    loss_kinds = frozenset({LossKind.dpo})

    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(
        self, batch: Sequence[Experience], reference_logprobs: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[TrainingRow, ...], dict[str, float]]:
        pairs = [one for one in batch if one.loss_kind is LossKind.dpo]
        rows = [training_row(segment, 1.0 if one.pair == "chosen" else -1.0, 1.0, number // 2)
                for number, one in enumerate(pairs) for segment in one.segments]  # fmt: skip
        return tuple(rows), {"num_pairs": len(pairs) / 2}

    def loss(self, policy_logprobs_BT: Any, rows: MicroBatch, denominators: Denominators) -> tuple[Any, dict[str, Any]]:
        raise NotImplementedError("the fake backend asks for none")

    def held_out(self, rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], reference: Any) -> dict[str, float]:
        return {"held_out_loss": -float(sum(one.sum() for one in logprobs))}

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        return dict(means)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a batch is made of."""

    explores: bool = True
    kind: LossKind | None = None
    ratio: float = 0.0
    alone: int = 0

    def num_demonstrations(self, num_groups: int, group_size: int) -> int:
        if self.kind is None:
            return 0
        return math.ceil(self.ratio * num_groups * group_size) if self.explores else self.alone


def batches_of(config: RunConfig) -> list[Made]:
    """Of each version, and of the empty batch that may end them; of a run without stages none."""
    made = []
    for stage in config.stages:
        name = stage.algorithm or config.trainer.algorithm
        assert isinstance(name, str)
        experts = config.experts
        ratio = stage.experts_ratio or (experts.ratio if experts else 0.0)
        alone = stage.experts_per_batch or (experts.per_batch if experts else 0)
        made += [Made(explores=EXPLORES[name], kind=TAKES[name], ratio=ratio, alone=alone)] * stage.steps
    return [*made, Made(explores=False)] if made else []
