"""Rewards: functions from a finished rollout to a number with named parts, run where they can do no harm.

A reward is `module:function` or a built-in name. It is called in a child process of the verifier (scorer.py), so
that it may hang, crash or eat memory without taking anything with it.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """Built as `Class(config: Class.Config)`; for a plain function a wrapper is made by `rewards.resolve`."""

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
