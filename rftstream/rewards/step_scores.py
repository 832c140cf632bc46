"""A process reward model: a classifier's outputs at the end of each step, over exactly the tokens of the rollout.

Its tokenizer must be that of the run's model, since its outputs are assigned to tokens. Shapes: T tokens of a segment,
S steps of it, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rftstream.errors import RewardError
from rftstream.models.classifiers import ClassifierFolder
from rftstream.models.spec import ModelSpec
from rftstream.models.tokenizer import open_tokenizer
from rftstream.rewards.base import RewardInput
from rftstream.rewards.classifier import StepClassifier
from rftstream.rewards.event_loop import caught
from rftstream.rewards.steps import find_step_ends

Marked = tuple[np.ndarray, np.ndarray]
"""Steps of a segment: the positions where steps end, bool [T], and the model's outputs there, float32 [S, L]."""


class StepScores:
    """Scores the steps of rollouts. `rewards.reward_model` makes it, and calls it for many rollouts at a time."""

    def __init__(self, folder: ClassifierFolder, model: StepClassifier, *, separator: str, limit: int | None) -> None:
        spec = ModelSpec(name=folder.folder.name, folder=folder.folder, dtype="float32", context=None)
        self._tokenizer = open_tokenizer(spec)
        self._model, self._separator, self._limit = model, separator, limit

    def of_items(self, items: Sequence[RewardInput]) -> list[list[Marked] | BaseException]:
        """Return for each rollout the result for each of its segments, or the error."""
        ends: list[list[np.ndarray] | BaseException] = [caught(self._ends, item) for item in items]
        wanted = [
            (place, number)
            for place, found in enumerate(ends)
            if not isinstance(found, BaseException)
            for number, ends_T in enumerate(found)
            if ends_T.any()
        ]
        texts = [items[place].segments[number].token_ids for place, number in wanted]
        read = dict(zip(wanted, self._model.logits(texts) if texts else [], strict=True))
        return [
            found
            if isinstance(found, BaseException)
            else [
                (ends_T, read[place, number][ends_T] if (place, number) in read else np.zeros((0, 1), np.float32))
                for number, ends_T in enumerate(found)
            ]
            for place, found in enumerate(ends)
        ]

    def _ends(self, item: RewardInput) -> list[np.ndarray]:
        """Return where the steps of each segment end. RewardError if the rollout cannot be read."""
        for segment in item.segments:
            count = len(segment.token_ids)
            if self._limit is not None and count > self._limit:
                raise RewardError(
                    f"reward_model: a segment has {count:,} tokens, expected at most {self._limit:,}, which the model "
                    "reads; steps are never cut"
                )
            if count and int(segment.token_ids.max()) >= self._tokenizer.size:
                raise RewardError(
                    f"reward_model: knows {self._tokenizer.size} tokens, got token {int(segment.token_ids.max())}; "
                    "rewards of steps need the tokenizer of the run's model"
                )
        said = "".join(self._decode(segment.token_ids[segment.loss_mask != 0].tolist()) for segment in item.segments)
        if item.completion.strip() not in said:
            raise RewardError(
                f"reward_model: reads the tokens as {said[-80:]!r}, expected {item.completion.strip()[-80:]!r} in it; "
                "rewards of steps need the tokenizer of the run's model"
            )
        found = [
            find_step_ends(segment.token_ids, segment.loss_mask, self._separator, self._decode)
            for segment in item.segments
        ]
        if not any(ends_T.any() for ends_T in found):
            raise RewardError("reward_model: the rollout has no sampled token, expected at least one step")
        return found

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in token_ids])
