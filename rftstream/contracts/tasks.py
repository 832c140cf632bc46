"""A task is one rollout to do. Topic `tasks`: feeder -> explorer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from msgspec import Meta

from rftstream.contracts.ids import rollout_id
from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeInt, PositiveInt
from rftstream.contracts.rules import Violation, rule, show
from rftstream.contracts.structs import message_part

_TASKSET = re.compile(r"[a-z0-9_-]+")
_MAX_SEED = 2**63 - 1


@message_part(frozen=True, slots=True, kw_only=True)
class RolloutIds:
    """Where a rollout belongs. Set by the feeder, carried unchanged to the end of the flow."""

    rollout_id: str
    """`group_id/sibling`."""
    group_id: str
    """`taskset/pass/index/attempt`."""
    taskset: Annotated[str, Meta(extra_json_schema={"pattern": f"^{_TASKSET.pattern}$"})]
    """Name in the run file, `[a-z0-9_-]+`."""
    sibling: NonNegativeInt
    """Index in the group, dense from 0."""
    group_size: PositiveInt
    """Siblings that the feeder admitted."""
    sequence: NonNegativeInt
    """The feeder's dense count of admitted groups; `sequence mod partitions` is the partition everywhere."""
    min_version: NonNegativeInt
    """No token of the rollout may be sampled by an older version."""

    @staticmethod
    def of(
        group_id: str, *, taskset: str, sibling: int = 0, group_size: int = 1, sequence: int = 0, min_version: int = 0
    ) -> RolloutIds:
        """Return the ids of a sibling of a group; what is left out are those of a group of one, the first of all."""
        return RolloutIds(
            rollout_id=rollout_id(group_id, sibling),
            group_id=group_id,
            taskset=taskset,
            sibling=sibling,
            group_size=group_size,
            sequence=sequence,
            min_version=min_version,
        )


ID_HEADERS = ("group_id", "rollout_id", "sibling", "group_size", "sequence", "min_version", "taskset")
"""Headers of every message that carries RolloutIds. They tell the ids also where the body cannot be decoded."""


def headers_of_ids(ids: RolloutIds) -> Facts:
    """Return the headers that tell the ids of a rollout."""
    return {name: getattr(ids, name) for name in ID_HEADERS}


@rule(RolloutIds)
def _check_rollout_ids(ids: RolloutIds) -> Violation | None:
    if not _TASKSET.fullmatch(ids.taskset):
        return ".taskset", f"got {show(ids.taskset)}, expected only a-z, 0-9, _ and -"
    if not ids.group_id or ids.rollout_id != f"{ids.group_id}/{ids.sibling}":
        return ".rollout_id", f"got {show(ids.rollout_id)}, expected group_id/sibling"
    if ids.sibling >= ids.group_size:
        return ".sibling", f"got {ids.sibling}, expected less than the group_size {ids.group_size}"
    return None


@message_part(frozen=True, slots=True, kw_only=True)
class Media:
    """An image or other payload, by reference."""

    url: str
    """Where the bytes are: `store:NAME` for an object of the run's store, or any URL that fsspec opens."""
    digest: str
    """`sha256:<hex>` of the bytes behind the url; empty if the maker of the reference could not read them."""
    kind: str
    """Media type, e.g. image/png; empty if it could not be told."""
    num_bytes: NonNegativeInt = 0
    """Size of the payload; 0 if it is not known."""
    width: NonNegativeInt = 0
    """Width of an image in pixels; 0 if it is not known."""
    height: NonNegativeInt = 0
    """Height of an image in pixels; 0 if it is not known."""


@message_part(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation, as chat templates take it."""

    role: str
    """system, user, assistant or tool."""
    content: str
    """The text; empty where a message is tool calls only."""
    media: tuple[Media, ...] = ()
    """Images or other payloads that are shown with the text, in order."""
    name: str | None = None
    """Name of the speaker or of the tool, where the template uses it."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Tool calls as the model family writes them, one plain map each."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""


FORMS: Mapping[str, tuple[type, ...]] = {
    "json": (dict, str),
    "json_object": (bool,),
    "regex": (str,),
    "choice": (list, tuple),
    "grammar": (str,),
}
"""Kind of a form, by vLLM's names -> types of its value: a JSON Schema, true, a regular expression, the texts to choose
from, a grammar in GBNF."""


@message_part(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of sampling, the full set. docs/algorithms.md says with which of them the recorded logprobs are
    exact."""

    temperature: float = 1.0
    """Temperature of sampling. 0 is greedy; the recorded logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """Probability mass that tokens are sampled from; 1: off."""
    top_k: NonNegativeInt = 0
    """Number of likeliest tokens that are sampled from; 0: off."""
    min_p: float = 0.0
    """Least probability of a sampled token, relative to the likeliest one; 0: off."""
    presence_penalty: float = 0.0
    """Penalty on tokens that have been sampled before; 0: off."""
    frequency_penalty: float = 0.0
    """Penalty on tokens for each time that they have been sampled before; 0: off."""
    repetition_penalty: float = 1.0
    """Factor that makes tokens of prompt and completion less likely; 1: off."""
    min_tokens: NonNegativeInt = 0
    """No end of sequence before this many completion tokens."""
    max_tokens: NonNegativeInt = 256
    """Completion tokens of the whole rollout, all turns together."""
    stop: tuple[str, ...] = ()
    """A completion ends after any of these."""
    grammar: dict[str, Any] = field(default_factory=dict)
    """The form of each completion, by its kind: `{ json = "SCHEMA" }`, `{ json_object = true }`,
    `{ regex = "[0-9]+" }`, `{ choice = ["yes", "no"] }` or `{ grammar = "root ::= ..." }` (GBNF). A further turn begins
    anew. Empty: any form."""


@message_part(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem to be solved, as the taskset gave it."""

    messages: tuple[ChatMessage, ...]
    """The prompt."""
    answer: str | None = None
    """The reference answer, where the taskset has one."""
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of the tools offered, one plain map each."""
    info: dict[str, Any] = field(default_factory=dict)
    """Everything else that the taskset had, for environment and reward; plain values only."""
    data_source: str = ""
    """Which part of a mixed taskset it comes from."""


@message(
    "task",
    version=5,
    topic="tasks",
    key=lambda task: task.ids.rollout_id,
    headers=lambda task: headers_of_ids(task.ids),
)
class Task(Message):
    """One rollout to do. `tasks`: feeder -> explorer."""

    ids: RolloutIds
    """The rollout to be made."""
    problem: Problem
    """Problem to solve."""
    sampling: Sampling
    """Sampling settings of the rollout; set per taskset."""
    seed: Annotated[int, Meta(ge=0, le=_MAX_SEED)]
    """Derived from the run's seed and the rollout_id; non-negative, below 2**63."""
    environment: str = "single_turn"
    """Name in the table of environments."""
    stored_rollout: str | None = None
    """`topic[partition]@offset` of a rollout to score again instead of sampling."""
    created_at: float = 0.0
    """When the feeder admitted it."""
    seen: NonNegativeInt | None = None
    """Operators decided about this group, and about the problems that were skipped before it, by the facts in this many
    records of `outcomes`, the first ones; None: there are no operators."""
    problems_end: NonNegativeInt | None = None
    """When the group was drawn, growing tasksets had the problems below this offset of `problems`; None: the run has no
    growing taskset."""
