"""What programs ask the studio and what they are told, as types. The description at /api/v1/openapi.json is made from
these, with what stands under each field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from rftstream.contracts.feedback import PairChoice

T = TypeVar("T")


def convert(found: object, item: type[T]) -> T:
    """Return what programs are told of what was found: the fields that both have."""
    return msgspec.convert(found, item, from_attributes=True)


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """Why something is not answered or not done."""

    error: str
    """A sentence: what was found, what was expected."""


class RunItem(Struct, frozen=True, kw_only=True):
    """A run of this studio."""

    name: str
    """Name of the run in addresses."""
    state: str | None
    """running, paused, draining, stopped or finished; None: not looked at yet."""
    version: int | None
    """The newest version; None as above."""
    error: str
    """Why the run cannot be looked at now; empty if it can."""


class FateCounts(Struct, frozen=True, kw_only=True):
    """How many groups or rollouts were admitted, and what became of them: admitted is the sum of the others."""

    admitted: int
    pending: int
    trained: int
    expired: int
    filtered: int
    dead: int


class Wrong(Struct, frozen=True, kw_only=True):
    """Something that looks wrong."""

    title: str
    text: str
    severe: bool


class Glance(Struct, frozen=True, kw_only=True):
    """A run at a glance, now or as it was."""

    name: str
    as_of: str
    """Moment as it was asked for; empty for now."""
    version: int
    """The newest version."""
    groups: FateCounts
    rollouts: FateCounts
    rewards: tuple[float | None, ...]
    """Mean reward of the newest batches, oldest first; at most 100."""
    evaluations: Mapping[str, Mapping[str, float]]
    """Evaluation -> its newest result: version, metrics, num_tasks, num_samples of each, num_unscored of all."""
    wrong: tuple[Wrong, ...]
    """Signs that something may be wrong; for now alone."""
    status: Mapping[str, Any] | None
    """Data of `rftstream status --json`; for now alone."""


class RolloutItem(Struct, frozen=True, kw_only=True):
    """A rollout among its siblings."""

    rollout_id: str
    sibling: int
    fate: str
    """pending, batched, trained, expired, filtered or dead."""
    stage: str
    """waiting, sampled or verified."""
    status: str | None
    """How sampling ended; None if it has not."""
    num_tokens: int | None
    """Sampled tokens."""
    reward: float | None
    """None: it has none, or its group is not decided yet."""
    unscored: str | None
    """Why it has no reward."""
    rejected: str | None
    """`operator: reason` where an operator left it out."""


class GroupItem(Struct, frozen=True, kw_only=True):
    """A group with its siblings."""

    group_id: str
    sequence: int
    """The feeder's count; `before` takes it for the next page."""
    taskset: str
    problem: int
    fate: str
    """pending, batched, trained, expired, filtered or dead."""
    reason: str | None
    """Why it was decided so; None if it is not decided."""
    batch: int | None
    admitted_at: float
    """Seconds since 1970, as all times."""
    decided_at: float | None
    reward_mean: float | None
    siblings: tuple[RolloutItem, ...]


class GroupPage(Struct, frozen=True, kw_only=True):
    """Some groups, newest first."""

    groups: tuple[GroupItem, ...]
    before: int | None
    """Ask with this `before` for older ones; None: there are none."""


class MessageItem(Struct, frozen=True, kw_only=True):
    """A message of the problem, or a turn. Long text is cut, and says by how much."""

    role: str
    text: str
    num_tokens: int
    """Sampled tokens; 0 for what was not sampled."""
    calls: tuple[str, ...]
    """Tool calls, a line each."""


class RolloutDetail(Struct, frozen=True, kw_only=True):
    """A rollout with what was said, and the verdict."""

    rollout: RolloutItem
    group_id: str
    batch: int | None
    problem: tuple[MessageItem, ...]
    answer: str | None
    """The reference answer."""
    turns: tuple[MessageItem, ...]
    num_turns: int
    """Number of turns, also of those that are left out of `turns`."""
    missing: str
    """Why there is no body; empty where there is one."""
    reward: float | None
    """The verdict's."""
    parts: Mapping[str, float]
    """The parts of the verdict's reward."""
    scorer: str | None
    places: Mapping[str, str]
    """Fact -> place of the record that tells it, as `topic[partition]@offset`."""


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
    """Which rule chose them."""
    quorum: int
    """Distinct people whose votes it takes."""
    asked_at: float
    expires_at: float | None
    held_until: float | None
    """Time until which the group waits for answers; None: it does not wait."""
    state: str
    """open, judged or expired."""
    num_votes: int
    """Distinct people who have voted."""
    answered: bool
    """Whether an answer of who asks stands."""


class QuestionPage(Struct, frozen=True, kw_only=True):
    """Some questions: open ones with the most urgent first, others as they were asked."""

    questions: tuple[QuestionItem, ...]
    total: int
    """Number of all questions in this state."""
    skip: int | None
    """Ask with this `skip` for more; None: there are no more."""


class VoteBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vote, as a row of `rftstream feedback add`: rollouts and exactly one answer. The voter is the owner of the
    token. Another answer to the same question is an edit."""

    rollout: str | None = None
    """The rollout that is judged."""
    rollouts: list[str] | None = None
    """Two siblings, of a choice, or of a retracted pair."""
    label: float | None = None
    """Reward that the rollout should have."""
    rating: float | None = None
    """A number on the scale of the run file."""
    choice: PairChoice | None = None
    """Which of the rollouts is better, as they are named here."""
    correction: str | None = None
    """The right answer, written out."""
    flag: str | bool | None = None
    """Why the rollout must not be trained on, or true."""
    retract: Literal["label", "rating", "pair", "correction", "flag"] | None = None
    """The kind of the answer that is taken back."""
    comment: str | None = None
    order: list[int] | None = None
    """Order in which the rollouts were shown, as indexes into them."""
    lead_time_s: float | None = None
    """Seconds from seeing the rollouts to the answer."""


class VoteDone(Struct, frozen=True, kw_only=True):
    """The effect of a vote so far. The buffer judges the vote later; `rftstream feedback list` shows the judgement."""

    question_id: str
    written: bool
    """False: the annotator says this already."""
    edit: bool
    """Whether it takes the place of what was said before."""
    expired: bool
    """Whether the question has expired: it is recorded, and changes nothing."""
    applies: bool
    """Whether votes change anything in this run: its run file has [feedback]."""


class AgreementItem(Struct, frozen=True, kw_only=True):
    """How far answers of one kind agree."""

    questions: int
    """Number of questions that at least two annotators have answered."""
    agreement: float | None
    """Share of pairs of answers that are equal; of ratings 1 minus the mean distance over the scale."""
    alpha: float | None
    """Krippendorff's; None: nothing to compare, or all answers are the same."""


class ShareItem(Struct, frozen=True, kw_only=True):
    """How many of some are of a kind."""

    count: int
    total: int
    share: float | None
    """None of none."""
    interval: tuple[float, float] | None
    """Wilson's, of 95 %."""


class AnnotatorItem(Struct, frozen=True, kw_only=True):
    """How an annotator judges."""

    annotator: str
    """A keyed hash, as on the log."""
    votes: Mapping[str, int]
    """Answers that stand, by kind."""
    agreement: Mapping[str, AgreementItem]
    """Agreement with the others on the same questions, by kind."""
    median_time_s: float | None
    """Seconds from seeing a question to the answer, median."""
    cannot_judge: ShareItem
    """Share of the pairs that the annotator cannot judge."""
    left: ShareItem
    """Pairs of which the left one was chosen."""
    gold: ShareItem | None
    """Right answers to gold questions; None to all but operators."""


class AnnotatorList(Struct, frozen=True, kw_only=True):
    """How annotators judge: to operators all, to an annotator only what is their own."""

    annotators: tuple[AnnotatorItem, ...]
    all_together: Mapping[str, AgreementItem]
    """Agreement of all, by kind; empty to all but operators."""
    gold_questions: int | None
    """Number of gold questions with a right answer; None to all but operators."""


class StateBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reason why the run is asked for another state."""

    reason: str = ""
    """Reason for people; it stands on the log."""


class DrainBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to drain a run."""

    sure: Literal["drain"]
    """The word `drain`: it is not taken back."""
    reason: str = ""
    """Reason for people; it stands on the log."""


class StateDone(Struct, frozen=True, kw_only=True):
    """The state that is wanted of the run now."""

    state: str
    """running, paused or draining."""
    changed: bool
    """False: it was so already."""


Version = Annotated[int, Meta(ge=0, le=10**15 - 1)]


class EvaluateBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evaluations that are requested."""

    evaluation: str | None = None
    """Name of an evaluation of the run file; None: all."""
    versions: list[Version] | Literal["all"] = []
    """Versions; none: the newest one. `all`: those that can still be made from the store."""
    again: bool = False
    """Evaluates also versions that have their result."""


class EvaluateDone(Struct, frozen=True, kw_only=True):
    """The counts of requested evaluations."""

    asked: int
    """Evaluations that were asked for."""
    known: int
    """Number of evaluations that have their result already."""


class RetryBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dead groups that are to be put back."""

    groups: list[str] = []
    """Ids of the groups."""
    everything: bool = False
    """Puts back all groups that are still dead."""
    sample: bool = False
    """Samples the groups anew, also where a rollout could be used again."""


class RetryDone(Struct, frozen=True, kw_only=True):
    """The counts of dead groups that were requested to be put back."""

    asked: int
    """Groups asked to be put back."""
    put_back_before: int
    """Number of groups that were requested to be put back before."""
