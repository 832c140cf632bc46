"""The types of the interface for programs. The description at /api/v1/openapi.json is made from them, with the
docstring of each field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from rftstream.contracts.feedback import PairChoice

T = TypeVar("T")


def convert(found: object, item: type[T]) -> T:
    """Return the answer for programs: the fields that both types have."""
    return msgspec.convert(found, item, from_attributes=True)


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """The reason why a request is not answered or not done."""

    error: str
    """A sentence: what was found, what was expected."""


class RunItem(Struct, frozen=True, kw_only=True):
    """A run of this studio."""

    name: str
    """Name of the run in addresses."""
    state: str | None
    """running, paused, draining, stopped or finished; None: not read yet."""
    version: int | None
    """The newest version; None: not read yet."""
    error: str
    """Why the run cannot be read now; empty if it can."""


class FateCounts(Struct, frozen=True, kw_only=True):
    """The number of admitted groups or rollouts, and their fates. Admitted is the sum of the others."""

    admitted: int
    pending: int
    trained: int
    expired: int
    filtered: int
    dead: int


class Wrong(Struct, frozen=True, kw_only=True):
    """A problem of the run."""

    title: str
    text: str
    severe: bool


class Glance(Struct, frozen=True, kw_only=True):
    """A run at a glance, now or at an earlier moment."""

    name: str
    as_of: str
    """The moment, as requested; empty for now."""
    version: int
    """The newest version."""
    groups: FateCounts
    rollouts: FateCounts
    rewards: tuple[float | None, ...]
    """Mean reward of the newest batches, oldest first; at most 100."""
    evaluations: Mapping[str, Mapping[str, float]]
    """Evaluation -> its newest result: version, metrics, num_tasks, num_samples for each task, num_unscored for all."""
    wrong: tuple[Wrong, ...]
    """Problems of the run, for now only."""
    status: Mapping[str, Any] | None
    """Data of `rftstream status --json`, for now only."""


class RolloutItem(Struct, frozen=True, kw_only=True):
    """A rollout among its siblings."""

    rollout_id: str
    sibling: int
    fate: str
    """pending, batched, trained, expired, filtered or dead."""
    stage: str
    """waiting, sampled or verified."""
    status: str | None
    """How sampling ended; None before its end."""
    num_tokens: int | None
    """Sampled tokens."""
    reward: float | None
    """Reward. None: the rollout has none, or its group is not decided yet."""
    unscored: str | None
    """Why it has no reward."""
    rejected: str | None
    """`operator: reason` if an operator left it out."""


class GroupItem(Struct, frozen=True, kw_only=True):
    """A group with its siblings."""

    group_id: str
    sequence: int
    """The feeder's count. Pass it as `before` for the next page."""
    taskset: str
    problem: int
    fate: str
    """pending, batched, trained, expired, filtered or dead."""
    reason: str | None
    """Reason of the decision; None before the decision."""
    batch: int | None
    admitted_at: float
    """Time in seconds since 1970, as all times."""
    decided_at: float | None
    reward_mean: float | None
    siblings: tuple[RolloutItem, ...]


class GroupPage(Struct, frozen=True, kw_only=True):
    """Some groups, newest first."""

    groups: tuple[GroupItem, ...]
    before: int | None
    """Value of `before` for the next, older groups. None: there are none."""


class MessageItem(Struct, frozen=True, kw_only=True):
    """A message of the problem, or a turn. Long text is cut, with a note of the number of missing characters."""

    role: str
    text: str
    num_tokens: int
    """Number of sampled tokens; 0 for a message that was not sampled."""
    calls: tuple[str, ...]
    """Tool calls, one line each."""


class RolloutDetail(Struct, frozen=True, kw_only=True):
    """A rollout with its messages and its verdict."""

    rollout: RolloutItem
    group_id: str
    batch: int | None
    problem: tuple[MessageItem, ...]
    answer: str | None
    """The reference answer."""
    turns: tuple[MessageItem, ...]
    num_turns: int
    """Number of turns, including those left out of `turns`."""
    missing: str
    """Why there is no body; empty if there is one."""
    reward: float | None
    """Reward of the verdict."""
    parts: Mapping[str, float]
    """The parts of the verdict's reward."""
    roles: Mapping[str, float | None]
    """Reward of each role, in an episode of several agents; None for a role that is not trained."""
    scorer: str | None
    places: Mapping[str, str]
    """Fact -> place of its record, as `topic[partition]@offset`."""


class QuestionItem(Struct, frozen=True, kw_only=True):
    """A question to people."""

    question_id: str
    """`kind/group_id/siblings`."""
    kind: str
    """Kind of answer that is asked for: label, rating or pair."""
    rollouts: tuple[str, ...]
    order: tuple[int, ...]
    """Order in which to show the rollouts, as indexes into them."""
    reason: str
    """The rule that chose the rollouts."""
    quorum: int
    """Number of distinct people whose votes are needed."""
    asked_at: float
    expires_at: float | None
    held_until: float | None
    """Time until which the group is held back for answers. None: it is not held back."""
    state: str
    """open, judged or expired."""
    num_votes: int
    """Distinct people who have voted."""
    answered: bool
    """Whether an answer of the requesting person is in force."""


class QuestionPage(Struct, frozen=True, kw_only=True):
    """Some questions: open ones with the most urgent first, others in the order of asking."""

    questions: tuple[QuestionItem, ...]
    total: int
    """Number of all questions in this state."""
    skip: int | None
    """Value of `skip` for the next questions. None: there are no more."""


class NoteItem(Struct, frozen=True, kw_only=True):
    """A note on a rollout, a group or a version."""

    note_id: str
    target: str
    """The rollout, group or version (`v12`) that it is about."""
    text: str
    tags: tuple[str, ...]
    by: str
    """Name of the writer."""
    at: float


class NoteBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new note, or one to take back. The writer is the owner of the token."""

    target: str = ""
    """The rollout, group or version that it is about."""
    text: str = ""
    tags: list[str] = []
    remove: str | None = None
    """Id of the note to take back; then nothing else is given."""


class VoteBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vote, in the form of a row of `rftstream feedback add`: rollouts and exactly one answer. The voter is the owner
    of the token. Another answer to the same question is an edit."""

    rollout: str | None = None
    """The rollout that is judged."""
    rollouts: list[str] | None = None
    """The two siblings of a choice, or of a retracted pair."""
    label: float | None = None
    """Reward that the rollout should have."""
    rating: float | None = None
    """A number on the scale of the run file."""
    choice: PairChoice | None = None
    """The better one of the rollouts, as named here."""
    correction: str | None = None
    """The right answer, written out."""
    flag: str | bool | None = None
    """Reason why the rollout must not be trained on, or true."""
    retract: Literal["label", "rating", "pair", "correction", "flag"] | None = None
    """The kind of the answer to take back."""
    comment: str | None = None
    order: list[int] | None = None
    """Order in which the rollouts were shown, as indexes into them."""
    lead_time_s: float | None = None
    """Seconds from seeing the rollouts to the answer."""


class VoteDone(Struct, frozen=True, kw_only=True):
    """The effect of a vote so far. The buffer judges the vote later; `rftstream feedback list` shows the judgement."""

    question_id: str
    written: bool
    """Whether the vote was written. False: it repeats the annotator's last vote."""
    edit: bool
    """Whether it replaces an earlier vote."""
    expired: bool
    """Whether the question has expired: the vote is recorded but changes nothing."""
    applies: bool
    """Whether votes change batches in this run: its run file has [feedback]."""


class AgreementItem(Struct, frozen=True, kw_only=True):
    """The agreement between answers of one kind."""

    questions: int
    """Number of questions that at least two annotators have answered."""
    agreement: float | None
    """Share of equal pairs of answers; for ratings, 1 minus the mean distance over the scale."""
    alpha: float | None
    """Krippendorff's alpha. None: there is nothing to compare, or all answers are equal."""


class ShareItem(Struct, frozen=True, kw_only=True):
    """A count, with its share of a total."""

    count: int
    total: int
    share: float | None
    """Share of the total; None if the total is 0."""
    interval: tuple[float, float] | None
    """Wilson's interval of 95 %."""


class AnnotatorItem(Struct, frozen=True, kw_only=True):
    """The figures of an annotator."""

    annotator: str
    """A keyed hash, as on the log."""
    votes: Mapping[str, int]
    """Answers in force, by kind."""
    agreement: Mapping[str, AgreementItem]
    """Agreement with the others on the same questions, by kind."""
    median_time_s: float | None
    """Median seconds from seeing a question to the answer."""
    cannot_judge: ShareItem
    """Share of the pairs that the annotator cannot judge."""
    left: ShareItem
    """Pairs of which the left one was chosen."""
    gold: ShareItem | None
    """Right answers to gold questions; only for operators, else None."""


class AnnotatorList(Struct, frozen=True, kw_only=True):
    """Figures of annotators: operators get all, an annotator only their own."""

    annotators: tuple[AnnotatorItem, ...]
    all_together: Mapping[str, AgreementItem]
    """Agreement of all annotators, by kind; only for operators, else empty."""
    gold_questions: int | None
    """Number of gold questions with a right answer; only for operators, else None."""


class StateBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reason for the requested state of a run."""

    reason: str = ""
    """Reason for people, which is recorded on the log."""


class DrainBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to drain a run."""

    sure: Literal["drain"]
    """The word `drain`, as a confirmation, since a drain cannot be undone."""
    reason: str = ""
    """Reason for people, which is recorded on the log."""


class StateDone(Struct, frozen=True, kw_only=True):
    """The requested state of the run."""

    state: str
    """running, paused or draining."""
    changed: bool
    """Whether the request changed the state."""


Version = Annotated[int, Meta(ge=0, le=10**15 - 1)]


class EvaluateBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evaluations that are requested."""

    evaluation: str | None = None
    """Name of an evaluation of the run file; None: all."""
    versions: list[Version] | Literal["all"] = []
    """Versions to evaluate; none: the newest one. `all`: every version that the store can still make."""
    again: bool = False
    """Whether to repeat evaluations that have a result."""


class EvaluateDone(Struct, frozen=True, kw_only=True):
    """The counts of requested evaluations."""

    asked: int
    """Evaluations that were requested."""
    known: int
    """Number of evaluations that have their result already."""


class RetryBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dead groups that are to be put back."""

    groups: list[str] = []
    """Ids of the groups."""
    everything: bool = False
    """Whether to put back all groups that are still dead."""
    sample: bool = False
    """Whether to sample the groups again, even if a rollout could be used again."""


class RetryDone(Struct, frozen=True, kw_only=True):
    """The counts of dead groups that were requested to be put back."""

    asked: int
    """Groups that were requested to be put back."""
    put_back_before: int
    """Number of groups that were requested to be put back before."""
