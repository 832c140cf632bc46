"""Feedback is what a person or a program says of rollouts, after they were scored. Topic `feedback`.

Who judges is a keyed hash: no names stand on the log. A person may say something again about the same rollouts: that
is the next revision, and takes the place of the one before. `retract` takes back what was said. A record says one
thing, and is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.ids import split_group_id
from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.rules import Violation, rule, show

_ANNOTATOR = re.compile(r"[0-9a-f]{32}")
GOLD_ANNOTATOR = "0" * 32
"""Annotator of records that give the right answer to a gold question. No person has this hash, and such a record is no
vote."""


class FeedbackKind(StrEnum):
    """The kinds of statements about rollouts."""

    pair = "pair"
    """Which of two siblings is better: `choice`."""
    rating = "rating"
    """How good a rollout is, on the scale of the run file: `reward`."""
    label = "label"
    """The reward that a rollout should have, e.g. 0 or 1: `reward`."""
    correction = "correction"
    """The right answer, written out: `correction`."""
    flag = "flag"
    """The rollout must not be trained on; `comment` may say why."""
    retract = "retract"
    """Takes back what the annotator has said on the question."""


class PairChoice(StrEnum):
    """The answer to the question which of two rollouts is better, in the order of `rollouts`, whatever was shown
    first."""

    first = "first"
    """The first is better."""
    second = "second"
    """The second is better."""
    tie = "tie"
    """Both are as good."""
    both_bad = "both_bad"
    """Neither should be learned from."""
    cannot_judge = "cannot_judge"
    """No vote: it counts for no quorum."""


def _feedback_headers(feedback: Feedback) -> Facts:
    return {
        "rollout_id": feedback.rollout_id,
        "sequence": feedback.sequence,
        "question_id": feedback.question_id or None,
    }


@message("feedback", version=2, topic="feedback", key=lambda feedback: feedback.feedback_id, headers=_feedback_headers)
class Feedback(Message):
    """A statement by a person or program about one or two rollouts. `feedback`: `rftstream feedback add`, programs ->
    buffer.

    The partition is that of the rollouts. A record without `question_id` is of version 1: it is no vote, and is
    recorded as such."""

    feedback_id: str
    """`question_id/annotator/revision`. In version 1 derived from source and rollout."""
    rollout_id: str
    """The rollout that is judged; of two the first."""
    source: str
    """The channel that the statement came through, e.g. `file`. In version 1 the judge."""
    reward: float | None = None
    """The reward of a label, or the number of a rating on the scale as it was given."""
    comment: str | None = None
    """The judgement in words."""
    given_at: float = 0.0
    """When it was given."""
    kind: FeedbackKind = FeedbackKind.label
    """Kind of the statement."""
    question_id: str = ""
    """Question that is answered: `kind/group_id/siblings`, whether it was asked or not. In a retract, the question
    whose answer is taken back."""
    rollouts: tuple[str, ...] = ()
    """Rollouts that are judged: two siblings of a pair, in order, else one."""
    sequence: NonNegativeInt | None = None
    """The feeder's count of the rollouts' group; `sequence mod partitions` is the partition."""
    annotator: Annotated[str, Meta(extra_json_schema={"pattern": f"^({_ANNOTATOR.pattern})?$"})] = ""
    """Annotator: 32 hex digits of HMAC-SHA256(run's secret, name). With 32 zeros the record is no vote, but the right
    answer to a gold question."""
    revision: NonNegativeInt = 0
    """Number of this statement among the annotator's on the question, dense from 0. The newest counts; a retract
    counts, too."""
    choice: PairChoice | None = None
    """Choice between the two rollouts of a pair."""
    correction: str | None = None
    """The right answer, written out."""
    order: tuple[NonNegativeInt, ...] = ()
    """How the rollouts were shown, as indexes into `rollouts`; empty if that is not known."""
    lead_time_s: float | None = None
    """Seconds from seeing the question to the answer."""


def question_id_of(kind: FeedbackKind, rollouts: Sequence[str]) -> str:
    """Return the id of the question that is asked of siblings: `kind/group_id/siblings`."""
    group, _, first = rollouts[0].rpartition("/")
    return f"{kind}/{group}/{'+'.join([first, *(rollout.rpartition('/')[2] for rollout in rollouts[1:])])}"


def feedback_id_of(question_id: str, annotator: str, revision: int) -> str:
    """Return the id of what an annotator says on a question."""
    return f"{question_id}/{annotator}/{revision}"


def group_of_rollouts(rollouts: Sequence[str]) -> str | None:
    """Return the group that all these rollouts are siblings in; None if they are not, or are no rollout ids."""
    groups = {rollout.rpartition("/")[0] for rollout in rollouts}
    siblings = [rollout.rpartition("/")[2] for rollout in rollouts]
    group = groups.pop() if len(groups) == 1 else ""
    if split_group_id(group) is None or not all(sibling.isdecimal() and sibling.isascii() for sibling in siblings):
        return None
    return group


def _answer_problem(feedback: Feedback) -> Violation | None:
    needed = {
        FeedbackKind.pair: "choice",
        FeedbackKind.rating: "reward",
        FeedbackKind.label: "reward",
        FeedbackKind.correction: "correction",
    }
    name = needed.get(feedback.kind)
    if name is not None and getattr(feedback, name) is None:
        return f".{name}", f"got none in a {feedback.kind}, expected one"
    return None


@rule(Feedback)
def _check_feedback(feedback: Feedback) -> Violation | None:
    if not feedback.question_id:
        return None
    rollouts, kind = feedback.rollouts, feedback.kind
    if not rollouts or feedback.rollout_id != rollouts[0]:
        return ".rollout_id", f"got {show(feedback.rollout_id)}, expected the first of the rollouts"
    if group_of_rollouts(rollouts) is None or len(set(rollouts)) < len(rollouts):
        return ".rollouts", f"got {show(list(rollouts))}, expected different siblings of one group"
    kinds = [one for one in FeedbackKind if one is not FeedbackKind.retract]
    asked = kinds if kind is FeedbackKind.retract else [kind]
    if feedback.question_id not in [question_id_of(one, rollouts) for one in asked]:
        return ".question_id", f"got {show(feedback.question_id)}, expected kind/group_id/siblings"
    if len(rollouts) != (2 if feedback.question_id.startswith(f"{FeedbackKind.pair}/") else 1):
        return ".rollouts", f"got {len(rollouts)}, expected two of a pair, else one"
    if feedback.sequence is None:
        return ".sequence", "got none, expected that of the rollouts' group"
    if not _ANNOTATOR.fullmatch(feedback.annotator):
        return ".annotator", f"got {show(feedback.annotator)}, expected 32 hex digits"
    if feedback.feedback_id != feedback_id_of(feedback.question_id, feedback.annotator, feedback.revision):
        return ".feedback_id", f"got {show(feedback.feedback_id)}, expected question_id/annotator/revision"
    if feedback.order and sorted(feedback.order) != list(range(len(rollouts))):
        return ".order", f"got {list(feedback.order)}, expected each index of the rollouts once"
    return _answer_problem(feedback)
