"""Rewards: functions from a finished rollout to a number with named parts.

A reward is `module:function` or a built-in name. The verifier calls it in a child process (scorer.py), so that it may
hang, crash or use up memory without harming anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rftstream.contracts.arrays import Array, Octets
from rftstream.contracts.tasks import Media, Problem
from rftstream.errors import RewardError
from rftstream.rewards.answers.thoughts import without_reasoning

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegment:
    """The tokens of a segment, as little-endian bytes. They become arrays on demand, since few rewards read them."""

    token_data: Octets
    """int32 [T]."""
    mask_data: Octets
    """uint8 [T]: 1 where the policy sampled the token."""
    logprob_data: Octets
    """float32 [T]: logprobs under the policy that sampled the tokens."""
    role: str = ""
    """Role that the policy played in it, in an episode of several agents."""

    @property
    def token_ids(self) -> np.ndarray:
        """Return the ids as an array, int32 [T]."""
        import numpy as np

        return np.frombuffer(self.token_data, "<i4")

    @property
    def loss_mask(self) -> np.ndarray:
        """Return the loss mask as an array, uint8 [T]. It is a copy, which the caller may change."""
        import numpy as np

        return np.frombuffer(self.mask_data, "u1").copy()

    @property
    def behavior_logprobs(self) -> np.ndarray:
        """Return the logprobs as an array, float32 [T]."""
        import numpy as np

        return np.frombuffer(self.logprob_data, "<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """A rollout as a reward sees it. The verifier and the evaluator make it; a scorer passes it to the reward."""

    completion: str
    """The text of the last assistant turn. Rewards that look for an answer read `conclusion` instead."""
    answer: str | None
    prompt: str
    """The last user message."""
    messages: tuple[dict[str, Any], ...]
    """The whole conversation, problem and completion, as {role, content}, with `tool_calls` if there are any: `{"id",
    "type": "function", "function": {"name", "arguments"}}`. The arguments are a map, or the model's text if that is no
    JSON object."""
    info: Mapping[str, Any]
    """Further columns of the problem in the taskset."""
    data_source: str
    num_tokens: int
    truncated: bool
    num_prompt_messages: int = 1
    """Number of `messages` that belong to the problem; policy and environment wrote the others."""
    segments: tuple[TokenSegment, ...] = ()
    """Prompt and completion as the policy saw them."""
    environment_reward: float | None = None
    """Reward from the environment or agent, as the sum over all turns. None if they gave none, which is not a reward of
    0."""
    environment_parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of that reward, summed over turns."""
    environment_error: str | None = None
    """Fault of the given reward, for example that it is not finite."""
    environment_roles: Mapping[str, float | None] = field(default_factory=dict)
    """That reward for each role, in an episode of several agents; None for a role that is not trained."""
    environment_version: str = ""
    """Digest of the environment's settings and code, as the explorer that played it had them. Empty: not known."""
    roles: tuple[str, ...] = ()
    """The roles of the rollout, in the order in which they spoke first; empty without several agents."""
    reasoning: str = ""
    """The reasoning at the beginning of the completion, without its marks; empty if there is none."""

    @property
    def conclusion(self) -> str:
        """Return the text that may contain an answer: the completion without the reasoning at its beginning. If the
        prompt opened the reasoning, no mark in the completion shows that. Empty if the reasoning is not closed."""
        return without_reasoning(self.completion, self.reasoning)

    @property
    def completion_ids(self) -> list[int]:
        """Return the sampled tokens of all turns."""
        return [one for segment in self.segments for one in segment.token_ids[segment.loss_mask != 0].tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGroup:
    """The rollouts of one group as a reward with `group = True` sees them: those that have a completion, in order."""

    siblings: tuple[RewardInput, ...]
    numbers: tuple[int, ...]
    """Number of each sibling in its group, from 0."""
    absent: Mapping[int, str] = field(default_factory=dict)
    """Number of each other sibling -> why it is not here: failed, skipped, oversized, undecodable, `late` (it did not
    come within `verifier.group_timeout_s`) or `gated` (a gate of the taskset's reward is closed for it)."""
    rewards: tuple[float | None, ...] = ()
    """Reward of each sibling so far: the weighted sum of the taskset's rewards that compare no siblings, and of those
    that do and come before this one; None if one of them failed."""
    parts: tuple[Mapping[str, float], ...] = ()
    """Scores of each sibling by these rewards, by name and without their weights."""

    @property
    def size(self) -> int:
        """Return the number of siblings that were sampled, those that are absent included."""
        return len(self.numbers) + len(self.absent)

    @classmethod
    def of(cls, siblings: Sequence[RewardInput]) -> RewardGroup:
        """Return a whole group."""
        return cls(siblings=tuple(siblings), numbers=tuple(range(len(siblings))))

    def only(self, places: Sequence[int]) -> RewardGroup:
        """Return the group with the siblings at these places; the others are absent."""
        gated = {number: "gated" for place, number in enumerate(self.numbers) if place not in places}
        return RewardGroup(
            siblings=tuple(self.siblings[place] for place in places),
            numbers=tuple(self.numbers[place] for place in places),
            absent={**self.absent, **gated},
        )

    def after(self, rewards: Sequence[float | None], parts: Sequence[Mapping[str, float]]) -> RewardGroup:
        """Return the group with what other rewards said of the siblings."""
        return dataclasses.replace(self, rewards=tuple(rewards), parts=tuple(parts))


def message_seen(
    role: str, content: str, tool_calls: Sequence[Mapping[str, Any]] = (), media: Sequence[Media] = ()
) -> dict[str, Any]:
    """Return a message in the form that rewards get."""
    message: dict[str, Any] = {"role": role, "content": content}
    if media:
        message["media"] = [dataclasses.asdict(one) for one in media]
    return {**message, "tool_calls": list(tool_calls)} if tool_calls else message


def problem_input(problem: Problem, turns: Iterable[dict[str, Any]] = (), **said: Any) -> RewardInput:
    """Return a problem in the form that rewards get: without a completion, or with the messages that came after it
    (`turns`) and the fields that belong to them."""
    asked = [message for message in problem.messages if message.role == "user"]
    fields: dict[str, Any] = {"completion": "", "num_tokens": 0, "truncated": False, **said}
    return RewardInput(
        answer=problem.answer,
        prompt=asked[-1].content if asked else "",
        messages=(
            *(message_seen(one.role, one.content, one.tool_calls, one.media) for one in problem.messages),
            *turns,
        ),
        info=problem.info,
        data_source=problem.data_source,
        num_prompt_messages=len(problem.messages),
        **fields,
    )


NAME_ANSWER = "name its column in the taskset's columns"
"""Advice for problems without an answer."""


def needed_answer(item: RewardInput, reward: str) -> str:
    """Return the answer of the problem. RewardError, which names `reward`, if there is none."""
    if item.answer is None:
        raise RewardError(f"{reward}: the problem has no answer; {NAME_ANSWER}")
    return item.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of a reward for one rollout: the number to train on, its parts, and metrics."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    additions: Mapping[str, Array] = field(default_factory=dict)
    """Finite arrays for the algorithm. An array with one element per token covers the tokens of all segments in
    order."""
    roles: Mapping[str, float | None] = field(default_factory=dict)
    """Reward of each role of the rollout, by name; None for a role that is not trained. Empty: `reward` is that of
    all."""
    detail: str = ""
    """Why it is this score, for people, such as the first test that failed. It stands beside the verdict on the log."""


class Reward(Protocol):
    """A function from a rollout to a score. `rewards.resolve` builds it as `Class(config: Class.Config)` in each child
    of the scorer, which then calls it for each rollout. `rewards.functions` wraps a plain function as a Reward.

    These members are optional:

    batched = True    The reward scores several rollouts at once, by `score_all(items)`. For each item it returns a
                      Score, a number, None where the reward does not apply, or the exception that says why not.
    group = True      The reward compares siblings. It is called once for all rollouts of a group, by
                      `score_group(group: RewardGroup)`, and returns for each sibling what `score_all` returns.
    open()            Makes costly preparations, such as loading a model. A scorer calls it before the first item;
                      `rftstream check` does not.
    check(item)       Raises RewardError if the problem lacks what the reward needs, whatever the completion will be.
                      `rftstream check` calls it.
    references(item)  Returns completions that are right, such as the problem's own solutions. `rftstream check` scores
                      them, and names the problems of which none has the reward 1.
    doubts(items)     Returns sentences about what is doubtful in these problems. `rftstream check` shows them.
    context           The most tokens of a conversation that the reward reads; longer ones have no score. None for no
                      limit. `rftstream check` compares it with `max_tokens`.
    reads_tokens = False The reward gets no tokens: `segments` and `completion_ids` are empty. This saves time with long
                      rollouts.
    takes_base = True The constructor also gets `base=`, the folder of the run file.
    """

    version: str
    """A text that changes whenever the same input could get another score."""

    def __call__(self, item: RewardInput) -> Score | float:
        """Return the score of a rollout. RewardError if it cannot be computed; any other exception counts as a
        RewardError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A rollout to score. The verifier and the evaluator submit it to a scorer."""

    request_id: str
    taskset: str
    """Name of the taskset whose reward scores the rollout, or `eval:` and the name of the evaluation."""
    item: RewardInput
    rollout_id: str = ""
    """Id of the rollout in the log. If empty, the request_id is used."""
    group_id: str = ""
    """Group of the rollout: rollouts of one problem may all hang. Empty: the rollout has no siblings."""
    sibling: int = 0
    """Number of the rollout in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReply:
    """The answer to a ScoreRequest: a score, or the reason for its absence."""

    request_id: str
    score: Score | None
    """The score, or None if it could not be computed; `reason` is then timeout, error, missing_checker or no_reward."""
    scorer: str
    scorer_version: str
    reason: str | None = None
    detail: str = ""
    tries: int = 1
    """Number of times that the rollout was tried. 0 if it was given up without a try, since all others hung."""


class Scorer(Protocol):
    """Scores many requests at once without blocking its caller.

    The verifier and the evaluator submit requests, poll for replies in each step, and close the scorer at the end. A
    scorer that has `withdraw(request_id)` is told of requests whose replies nobody needs any more. One that has
    `without_tokens` names tasksets and evaluations whose reward gets no tokens.
    """

    def submit(self, request: ScoreRequest) -> None:
        """Accept a request. The reply comes from a later `poll`."""

    def submit_group(self, requests: Sequence[ScoreRequest], absent: Mapping[int, str]) -> None:
        """Accept the rollouts of one group, which are scored together. Each gets a reply of its own, all at once.
        `absent`: the numbers of the other siblings, and why they are missing."""

    def poll(self, wait_s: float = 0.0) -> Sequence[ScoreReply]:
        """Return finished replies; wait up to `wait_s` seconds for the first."""

    @property
    def num_active(self) -> int:
        """Return the number of submitted requests without a reply."""

    @property
    def grouped(self) -> Collection[str] | None:
        """Return the tasksets and evaluations whose reward sees whole groups. None while that is not known yet."""

    def close(self) -> None:
        """End all children. Requests without a reply stay without one."""
