"""The table of topics: who writes what where, with which key. deploy/ and the docs are checked against it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rftstream.contracts.role_names import RoleName

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Most bytes of one record: key, value and headers together."""

MAX_DEAD_BYTES = MAX_RECORD_BYTES + 256 * 1024
"""Most bytes of a record on `dead`, which holds a whole record and the reason."""


class Width(StrEnum):
    """How many partitions a topic has."""

    partitions = "partitions"
    """The run's partition count."""
    shares = "shares"
    """The trainer's shares."""
    one = "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic of the run: who writes it, and how it is partitioned and kept. Each message names its topic itself."""

    name: str
    key: str
    """Description of the keys of its records, for docs. Each message defines its own key (MessageSpec.key)."""
    width: Width = Width.one
    twin: tuple[str, ...] | None = ("id",)
    """Headers that together must be unique on the topic; None if repeats are intended."""
    compacted: bool = False
    max_record_bytes: int = MAX_RECORD_BYTES
    writer: str | None = None
    """The single role whose claimed epoch a record must name to be in force (service/records/in_force.py). None if
    records need no epoch. On `control` and `summaries` the role depends on the message."""
    description: str = ""


TOPICS: dict[str, Topic] = {
    topic.name: topic
    for topic in (
        Topic(
            name="tasks",
            key="rollout_id",
            width=Width.partitions,
            twin=("rollout_id",),
            writer=RoleName.feeder,
            description="one rollout to do",
        ),
        Topic(
            name="rollouts",
            key="rollout_id",
            width=Width.partitions,
            twin=("rollout_id",),
            description="sampled, not yet scored",
        ),
        Topic(
            name="partials",
            key="rollout_id#piece",
            width=Width.partitions,
            twin=("rollout_id", "piece"),
            compacted=True,
            description="unfinished rollouts to go on with",
        ),
        Topic(
            name="verified",
            key="rollout_id",
            width=Width.partitions,
            twin=("rollout_id",),
            description="scored, or with the reason why not",
        ),
        Topic(
            name="experts",
            key="demonstration_id",
            width=Width.partitions,
            description="expert demonstrations and preferences",
        ),
        Topic(
            name="problems",
            key="problem_id",
            description="problems that join a growing taskset",
        ),
        Topic(
            name="feedback",
            key="feedback_id",
            width=Width.partitions,
            twin=None,
            description="what people say of rollouts",
        ),
        Topic(
            name="questions",
            key="question_id",
            writer=RoleName.buffer,
            description="what people are asked about rollouts",
        ),
        Topic(
            name="judgements",
            key="partition/offset",
            writer=RoleName.buffer,
            description="what became of what people said",
        ),
        Topic(
            name="batches",
            key="batch_sequence",
            width=Width.shares,
            twin=("share", "batch_sequence", "id"),
            writer=RoleName.buffer,
            description="what is trained on",
        ),
        Topic(
            name="outcomes",
            key="group_id",
            writer=RoleName.buffer,
            description="what became of each group",
        ),
        Topic(
            name="weights",
            key="model/version/trainer_epoch",
            writer=RoleName.trainer,
            description="new weights in the object store",
        ),
        Topic(
            name="steps",
            key="version/trainer_epoch",
            writer=RoleName.trainer,
            description="trained batches with their metrics",
        ),
        Topic(
            name="evals",
            key="evaluation/version/trainer_epoch",
            twin=None,
            writer=RoleName.evaluator,
            description="evaluation results",
        ),
        Topic(
            name="control",
            key="see control.py",
            twin=None,
            description="who is in force, what the run should do",
        ),
        Topic(
            name="summaries",
            key="topic",
            twin=None,
            description="what records so far amount to, for whoever starts",
        ),
        Topic(
            name="dead",
            key="role/topic/partition/offset",
            twin=None,
            max_record_bytes=MAX_DEAD_BYTES,
            description="what could not be dealt with, as it was",
        ),
    )
}


def num_partitions(topic: Topic, *, partitions: int, shares: int) -> int:
    """Return how many partitions the topic has in a run with these counts."""
    return {Width.partitions: partitions, Width.shares: shares, Width.one: 1}[topic.width]
