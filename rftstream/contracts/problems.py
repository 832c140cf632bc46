"""Problems that join a run while it goes on, made by people, agents or a model. Topic `problems`.

The n-th problem of a taskset on the topic has the index n in it, for good: the topic has one partition and nothing of
it is deleted. A problem that a model made stands here only if it passed a check; what did not pass stands here, too,
under the id that it would have had, as a RejectedProblem.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum

from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.rules import Violation, presence, rule
from rftstream.contracts.tasks import Problem
from rftstream.contracts.versions import VersionName


class ProblemMaker(StrEnum):
    """The kinds of makers of a problem."""

    person = "person"
    """Somebody who wrote it, or chose it."""
    agent = "agent"
    """A program that drives itself."""
    model = "model"
    """A model that was asked for it."""


class ProblemKind(StrEnum):
    """The ways in which a problem can derive from its parent."""

    given = "given"
    """The problem has no parent."""
    reworded = "reworded"
    """Other words, the same answer."""
    varied = "varied"
    """Another problem of the same kind, with an answer of its own."""
    harder = "harder"
    """A harder problem, with an answer of its own."""


class RejectReason(StrEnum):
    """Why what a model made is no problem of the run."""

    unreadable = "unreadable"
    """The model said something else than what it was asked for, such as prose."""
    no_answer = "no_answer"
    """There is no answer to check attempts against."""
    same_text = "same_text"
    """The parent in the same words."""
    known = "known"
    """The taskset has this problem already."""
    too_long = "too_long"
    """Its prompt leaves no room for a completion."""
    refused = "refused"
    """The model's server refused the request."""
    failed = "failed"
    """The model could not be asked, or attempts at the problem could not be scored."""
    disagreed = "disagreed"
    """Too few or too many of the attempts at it had its answer."""


@message(
    "problem",
    topic="problems",
    key=lambda new: new.problem_id,
    headers=lambda new: {**_problem_headers(new), "maker": new.maker},
)
class NewProblem(Message):
    """A problem that joins a taskset of the run. `problems`: `rftstream problems add`, synthesiser -> feeder."""

    problem_id: str
    """Derived: from the group that it was made of, the topic that told of it, the kind and a number; of a given one
    from taskset and digest."""
    taskset: str
    """The taskset that it joins, whose source is `log:problems`."""
    problem: Problem
    """Text and answer."""
    digest: str
    """`sha256:<hex>` of messages and answer (`problem_digest`)."""
    maker: ProblemMaker
    """Kind of the problem's maker."""
    made_by: str
    """Name of the person, program or model that made the problem."""
    kind: ProblemKind = ProblemKind.given
    """How the problem derives from its parent."""
    parent: str | None = None
    """The problem that it was made of, `taskset/index`."""
    parent_group: str | None = None
    """The group whose record had the model asked, `taskset/pass/index/attempt`."""
    version: VersionName | None = None
    """The version of the policy that made it, if that is who made it."""
    num_samples: NonNegativeInt = 0
    """Attempts at it that were scored before it was admitted."""
    num_agreed: NonNegativeInt = 0
    """Number of these attempts that had the problem's answer."""
    made_at: float = 0.0
    """When it was admitted."""


@rule(
    NewProblem,
    json_schema={
        "if": {"properties": {"kind": {"const": "given"}}},
        "then": {"properties": {"parent": {"type": "null"}}},
        "else": {"required": ["parent"], "properties": {"parent": {"type": "string"}}},
    },
)
def _check_new_problem(new: NewProblem) -> Violation | None:
    if (new.parent is None) is not (new.kind is ProblemKind.given):
        return ".parent", f"got {presence(new.parent)} with kind {new.kind}, expected one exactly for made problems"
    return None


def _problem_headers(message: NewProblem | RejectedProblem) -> Facts:
    return {"taskset": message.taskset, "kind": message.kind}


@message(
    "rejected_problem",
    topic="problems",
    key=lambda rejected: rejected.problem_id,
    headers=lambda rejected: {**_problem_headers(rejected), "reason": rejected.reason},
)
class RejectedProblem(Message):
    """A problem that a model made and that no taskset takes. `problems`: synthesiser -> status, people."""

    problem_id: str
    """The id that the problem would have had; no other record has it."""
    taskset: str
    """The taskset that it would have joined."""
    kind: ProblemKind
    """Kind of problem that the model was asked for."""
    parent: str
    """The problem that it was asked about, `taskset/index`."""
    parent_group: str
    """The group whose record had the model asked."""
    made_by: str
    """The model's name."""
    reason: RejectReason
    """Why it was rejected."""
    detail: str = ""
    """The reason in a sentence."""
    said: str = ""
    """The beginning of what the model said."""
    version: VersionName | None = None
    """The version of the policy that was asked, if that is who was asked."""
    num_samples: NonNegativeInt = 0
    """Attempts at it that were scored."""
    num_agreed: NonNegativeInt = 0
    """Number of these attempts that had the problem's answer."""
    made_at: float = 0.0
    """When it was rejected."""


def problem_digest(problem: Problem) -> str:
    """Return `sha256:<hex>` of what is asked and its answer: roles, texts, images by their digests, and the answer."""
    messages = [
        [message.role, message.content, [media.digest for media in message.media]] for message in problem.messages
    ]
    text = json.dumps([messages, problem.answer], ensure_ascii=False, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def given_problem_id(taskset: str, digest: str) -> str:
    """Return the id of a problem that has no parent in the run's log: given twice, it is the same."""
    return f"{taskset}/given/{digest.removeprefix('sha256:')[:32]}"


def made_problem_id(group: str, topic: str, kind: ProblemKind, number: int) -> str:
    """Return the id of the n-th problem of a kind that is made of a group, for its record on a topic."""
    return f"{group}/{topic}/{kind}/{number}"
