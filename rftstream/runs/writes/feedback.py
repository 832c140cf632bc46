"""Writes votes to a run's `feedback`, each once. A vote that repeats the annotator's last one is not written again, and
a different one is the next revision.

Votes have a producer name of their own, so that two commands at once cannot use the same revision: the later fences the
earlier. All votes are checked before the first one is written.

Right answers to gold questions are written in the same way, under an annotator that is no person.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.config.role_sections import FeedbackSection
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.feedback import GOLD_ANNOTATOR, Feedback, FeedbackKind, feedback_id_of
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.data.feedback.rows import Vote
from rftstream.errors import ConfigError, ContractError
from rftstream.gateway.keys import GatewayKeys, run_secret
from rftstream.runs.folder import RunFolder, wanted_topics
from rftstream.runs.writes.additions import adding
from rftstream.service.role import Log
from rftstream.transport.base import Transport

TOPICS = ("feedback", "questions", "judgements")


@dataclass(slots=True, kw_only=True)
class Added:
    """The counts of votes when some were added. `add_votes` makes and returns it."""

    votes: int
    """Votes that were given."""
    new: int = 0
    """Votes that were written, or that would be in a `dry_run`."""
    known: int = 0
    """Votes that repeat the annotator's newest revision. They are not written."""
    edits: int = 0
    """Written votes that are a later revision, retracts included."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Kind -> written votes."""
    annotators: int = 0
    """Number of distinct annotators."""
    applies: bool = True
    """Whether the run file has [feedback], so that votes can change batches."""
    dry_run: bool = False
    gold: bool = False
    """Whether these are right answers to gold questions instead of votes."""

    def to_json(self) -> dict[str, Any]:
        """Return the values as a dict for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def to_text(self) -> str:
        """Return the values as text for people."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.items()) or "nothing"
        verb = "to be added" if self.dry_run else "added"
        given = (
            f"{self.votes:,} right answers" if self.gold else f"{self.votes:,} votes of {self.annotators:,} annotators"
        )
        text = f"{given}: {kinds} {verb}"
        if self.edits:
            text += f"; {self.edits:,} of them change what was said before"
        if self.known:
            text += f"; {self.known:,} there already"
        if not self.applies and not self.gold:
            text += "\nthe run file has no [feedback]: they are recorded, and change no batch"
        return text


def add_votes(
    transport: Transport,
    config: RunConfig,
    folder: RunFolder,
    votes: Iterable[Vote],
    *,
    dry_run: bool = False,
    gold: bool = False,
    scored: Mapping[str, int] | None = None,
    revisions: VoteRevisions | None = None,
) -> Added:
    """Write votes that are not on the log yet. ConfigError names the first one on a rollout that nobody scored in this
    run; then nothing is written.

    `gold`: they are the right answers to questions, which are gold from then on; ConfigError for a question that
    already has an answer. `scored`: rollouts that the caller knows to be scored -> the feeder's count of their group.
    For others the headers of all rollouts are read. `revisions`: state that the caller keeps between calls, so that
    only new records of `feedback` are read.
    """
    chosen, known = list(votes), dict(scored or {})
    if not dry_run:
        transport.admin.ensure_topics({name: wanted_topics(config)[name] for name in TOPICS})
    writer, lost = f"{folder.run_id}.feedback", f"feedback: somebody else began to add votes to {folder.run_id}"
    with adding(transport, writer, lost=lost, again="add them again", dry_run=dry_run) as additions:
        log = Log(transport)
        sequences = {_group(rollout): sequence for rollout, sequence in known.items()}
        unknown = [vote for vote in chosen if not known.keys() >= set(vote.rollouts)]
        if unknown:
            sequences |= find_sequences(log, {_group(vote.rollouts[0]) for vote in unknown})
            _check_known(log, unknown, sequences, config.transport.partitions)
        newest = (revisions or VoteRevisions()).follow(log)  # after the start of the producer, which fences all others
        added = Added(votes=len(chosen), applies=config.feedback is not None, dry_run=dry_run, gold=gold)
        if gold:
            _check_gold(chosen, newest, config.feedback or FeedbackSection())
            names = dict.fromkeys((vote.by for vote in chosen), GOLD_ANNOTATOR)
        else:
            keys = GatewayKeys(run_secret(folder.run_id), folder.run_id)
            names = {vote.by: keys.annotator(vote.by) for vote in chosen}
            added.annotators = len(names)
        new = list(_new_votes(chosen, names, sequences, newest, added))
        additions.write(vote_record(feedback, config, folder.run_id) for feedback in new)
    return added


def _new_votes(
    votes: Sequence[Vote],
    names: Mapping[str, str],
    sequences: Mapping[str, int],
    newest: Mapping[tuple[str, str], Feedback],
    added: Added,
) -> Iterator[Feedback]:
    """Yield the votes that the log does not have, under the hidden `names`, and count all in `added`."""
    said: dict[tuple[str, str], Feedback] = {}
    for vote in votes:
        key = vote.question_id, names[vote.by]
        before = said.get(key, newest.get(key))
        feedback = next_revision(vote, names[vote.by], sequences[_group(vote.rollouts[0])], before)
        if feedback is None:
            added.known += 1
            continue
        if vote.kind is FeedbackKind.retract and (before is None or before.kind is FeedbackKind.retract):
            raise ConfigError(f"{vote.where}: retract: nothing of this annotator stands on {vote.question_id}")
        if before is None or feedback.revision > before.revision:
            said[key] = feedback
        added.new += 1
        added.edits += before is not None
        added.kinds[str(vote.kind)] = added.kinds.get(str(vote.kind), 0) + 1
        yield feedback


class VoteRevisions:
    """The newest vote of each annotator on each question. `add_votes` makes one, or gets one that its caller keeps
    between calls and that then reads only new records. It belongs to one run."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, str], Feedback] = {}
        self._positions: dict[TopicPartition, int] = {}

    def follow(self, log: Log) -> Mapping[tuple[str, str], Feedback]:
        """Read the new records. Return all newest votes, by question_id and annotator."""
        ends = log.ends("feedback")
        if any(ends.get(place, 0) < offset for place, offset in self._positions.items()):
            self._newest, self._positions = {}, {}  # the run was made anew
        for record in log.read("feedback", start=self._positions):
            self._positions[record.place] = record.offset + 1
            try:
                vote = codec.from_record(record)
            except ContractError:
                continue
            if isinstance(vote, Feedback) and vote.question_id:
                self.note(vote)
        return self._newest

    def note(self, vote: Feedback) -> None:
        """Add a vote: one on the log, or a committed one that a reader may see a little later."""
        known = self._newest.get((vote.question_id, vote.annotator))
        if known is None or vote.revision > known.revision:
            self._newest[vote.question_id, vote.annotator] = vote


def _check_gold(votes: Sequence[Vote], newest: Mapping[tuple[str, str], Feedback], settings: FeedbackSection) -> None:
    """Raise ConfigError for the first right answer that is off the scale, or that comes after somebody's vote."""
    gold = {question_id for question_id, annotator in newest if annotator == GOLD_ANNOTATOR}
    answered = {question_id for question_id, annotator in newest if annotator != GOLD_ANNOTATOR} - gold
    low, high = settings.scale
    for vote in votes:
        if vote.question_id in answered:
            raise ConfigError(
                f"{vote.where}: {vote.question_id}: somebody has answered it already, expected a question without votes"
            )
        if vote.kind is FeedbackKind.rating and not low <= (vote.reward or 0.0) <= high:
            raise ConfigError(f"{vote.where}: rating: got {vote.reward}, expected {low} to {high} (feedback.scale)")


def find_sequences(log: Log, groups: set[str]) -> dict[str, int]:
    """Return the feeder's count of each of these groups that is on the log."""
    wanted, found = {group.encode() for group in groups}, dict[str, int]()
    for topic in ("outcomes", "verified"):  # outcomes remain after the records of rollouts are deleted
        if len(found) == len(groups):
            break
        for record in log.read(topic, bodies=False):
            group, sequence = record.header("group_id"), record.header("sequence") or b""
            if group in wanted and group is not None and sequence.isdigit():
                found[group.decode()] = int(sequence)
    return found


def _check_known(log: Log, votes: list[Vote], sequences: Mapping[str, int], partitions: int) -> None:
    """Raise ConfigError for the first vote on a rollout that has no record on `verified`."""
    wanted = {rollout for vote in votes for rollout in vote.rollouts}
    places = {sequences[group] % partitions for rollout in wanted if (group := _group(rollout)) in sequences}
    there: set[str] = set()
    if places:
        for record in log.read("verified", bodies=False, partitions=places):
            name = record.text("rollout_id")
            if name in wanted:
                there.add(name)
    deleted = any(log.transport.admin.begin_offsets("verified").values())
    for vote in votes:
        for rollout in vote.rollouts:
            if rollout not in there and not (deleted and _group(rollout) in sequences):
                raise ConfigError(
                    f"{vote.where}: {rollout}: not scored in this run, expected a rollout on `verified`; "
                    "`rftstream inspect RUN verified --json` lists them"
                )


def _group(rollout_id: str) -> str:
    return rollout_id.rpartition("/")[0]


def next_revision(vote: Vote, annotator: str, sequence: int, before: Feedback | None) -> Feedback | None:
    """Return the record of a vote that follows the annotator's newest one; None if that vote is the same."""
    revision = 0 if before is None else before.revision + 1
    if vote.revision is not None:
        revision = vote.revision
    feedback = Feedback(
        feedback_id=feedback_id_of(vote.question_id, annotator, revision),
        rollout_id=vote.rollouts[0],
        source=vote.source,
        reward=vote.reward,
        comment=vote.comment,
        given_at=time.time() if vote.given_at is None else vote.given_at,
        kind=vote.kind,
        question_id=vote.question_id,
        rollouts=vote.rollouts,
        sequence=sequence,
        annotator=annotator,
        revision=revision,
        choice=vote.choice,
        correction=vote.correction,
        order=vote.order,
        lead_time_s=vote.lead_time_s,
    )
    is_known = before is not None and _said(before) == _said(feedback) and vote.revision in (None, before.revision)
    return None if is_known else feedback


def _said(feedback: Feedback) -> tuple[Any, ...]:
    """Return the content that distinguishes a vote from the last revision."""
    return feedback.kind, feedback.reward, feedback.choice, feedback.correction, feedback.comment


def vote_record(feedback: Feedback, config: RunConfig, run_id: str) -> NewRecord:
    """Return the record of a vote."""
    return codec.to_record(feedback, "feedback", (feedback.sequence or 0) % config.transport.partitions, run=run_id)
