"""Rewards: functions from a finished rollout to a number with named parts, run where they can do no harm.

A reward is `module:function` or a built-in name. It is called in a child process of the verifier (scorer.py), so
that it may hang, crash or eat memory without taking anything with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """What a reward sees of a rollout."""

    completion: str
    """The text of the last assistant turn."""
    answer: str | None
    prompt: str
    """The last user message."""
    messages: tuple[dict[str, Any], ...]
    """The whole conversation, problem and completion, as {role, content}."""
    info: Mapping[str, Any]
    """What else the taskset had for the problem."""
    data_source: str
    num_tokens: int
    truncated: bool
    num_prompt_messages: int = 1
    """So many of `messages` are the problem; the rest is what policy and environment said."""
    token_data: bytes = b""
    """The sampled tokens, int32, little-endian; `completion_ids` reads them."""

    @property
    def completion_ids(self) -> list[int]:
        """The sampled tokens of all turns."""
        return [number for (number,) in struct.iter_unpack("<i", self.token_data)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Built as `Class(config: Class.Config)`; for a plain function a wrapper is made by `rewards.functions`.

    One that scores several rollouts at once has `batched = True` and, beside the call, `score_all(items)`, which
    returns for each item a Score, a number, None where it does not apply, or the exception that says why there is
    none."""

    version: str
    """Changes whenever the same input could get another score."""

    def __call__(self, item: RewardInput) -> Score | float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    request_id: str
    taskset: str
    """Which reward: the scorer holds one per taskset (and evaluation)."""
    item: RewardInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReply:
    request_id: str
    score: Score | None
    """None when it could not be computed; then `reason` is timeout, error or missing_checker."""
    scorer: str
    scorer_version: str
    reason: str | None = None
    detail: str = ""


class Scorer(Protocol):
    """Scores many requests at once, without blocking the loop that uses it."""

    def submit(self, request: ScoreRequest) -> None: ...

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """What finished; waits up to `wait_s` for the first."""

    @property
    def num_active(self) -> int: ...

    def close(self) -> None: ...
