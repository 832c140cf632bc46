"""Rewards: functions from a finished rollout to a number with named parts, run where they can do no harm.

A reward is `module:function` or a built-in name. It is called in a child process of the verifier (scorer.py), so
that it may hang, crash or eat memory without taking anything with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.contracts.arrays import Array
from rftstream.contracts.tasks import Problem
from rftstream.errors import RewardError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegment:
    """The tokens of a segment, as bytes, little-endian: few rewards look at them."""

    token_data: bytes
    """int32 [T]."""
    mask_data: bytes
    """uint8 [T]: 1 where the policy sampled it."""
    logprob_data: bytes
    """float32 [T]: logprobs by the policy that sampled the tokens."""

    @property
    def token_ids(self) -> np.ndarray:
        """The ids as an array, int32 [T]."""
        import numpy as np

        return np.frombuffer(self.token_data, "<i4")

    @property
    def loss_mask(self) -> np.ndarray:
        """The loss mask as an array, a copy."""
        import numpy as np

        return np.frombuffer(self.mask_data, "u1").copy()

    @property
    def behavior_logprobs(self) -> np.ndarray:
        """The logprobs as an array, float32 [T]."""
        import numpy as np

        return np.frombuffer(self.logprob_data, "<f4")


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
    """How many of `messages` are the problem; the rest is what policy and environment said."""
    segments: tuple[TokenSegment, ...] = ()
    """Prompt and completion as the policy saw them."""

    @property
    def completion_ids(self) -> list[int]:
        """The sampled tokens of all turns."""
        return [int(one) for segment in self.segments for one in segment.token_ids[segment.loss_mask != 0]]


def problem_input(problem: Problem) -> RewardInput:
    """Return what a reward sees of a problem without a completion."""
    asked = [message for message in problem.messages if message.role == "user"]
    return RewardInput(
        completion="",
        answer=problem.answer,
        prompt=asked[-1].content if asked else "",
        messages=tuple({"role": message.role, "content": message.content} for message in problem.messages),
        info=problem.info,
        data_source=problem.data_source,
        num_tokens=0,
        truncated=False,
        num_prompt_messages=len(problem.messages),
    )


def needed_answer(item: RewardInput, reward: str) -> str:
    """Return the answer of the problem. RewardError, which names `reward`, if there is none."""
    if item.answer is None:
        raise RewardError(f"{reward}: the problem has no answer; name its column in the taskset's columns")
    return item.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward makes of a rollout: the number that is trained on, its parts, and what was measured on the way."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    additions: Mapping[str, Array] = field(default_factory=dict)
    """Finite arrays for the algorithm; with one element per token: of all segments, one after the other."""


class Reward(Protocol):
    """Built as `Class(config: Class.Config)`; for a plain function a wrapper is made by `rewards.functions`.

    One that scores several rollouts at once has `batched = True` and, beside the call, `score_all(items)`, which
    returns for each item a Score, a number, None where it does not apply, or the exception that says why there is
    none. Costly preparation (a model) belongs into `open()`, which a scorer calls before the first item and
    `rftstream check` does not. One that needs something of the problem has `check(item)`, which raises RewardError
    where it is missing, whatever the completion will be; `rftstream check` calls it. With `takes_base = True` it is
    built with `base=`, the folder of the run file, too."""

    version: str
    """Changes whenever the same input could get another score."""

    def __call__(self, item: RewardInput) -> Score | float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A rollout to be scored. The verifier and the evaluator submit it to a scorer."""

    request_id: str
    taskset: str
    """Name of the taskset or evaluation whose reward is meant."""
    item: RewardInput
    rollout_id: str = ""
    """Id of the rollout in the log; empty: its request_id."""
    group_id: str = ""
    """Group of the rollout: rollouts of one problem may hang together; empty: it is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReply:
    """The answer to a ScoreRequest: a score, or the reason why there is none."""

    request_id: str
    score: Score | None
    """The score; None when it could not be computed, and then `reason` is timeout, error or missing_checker."""
    scorer: str
    scorer_version: str
    reason: str | None = None
    detail: str = ""
    tries: int = 1
    """How often it was tried; 0 if it was given up without a try, as all others hung."""


class Scorer(Protocol):
    """Scores many requests at once, without blocking the loop that uses it."""

    def submit(self, request: ScoreRequest) -> None:
        """Take a request. The reply comes from a later `poll`."""

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """Return what has finished; wait up to `wait_s` seconds for the first."""

    @property
    def num_active(self) -> int:
        """How many requests were submitted and have no reply yet."""

    def close(self) -> None:
        """End all children. Requests without a reply get none."""
