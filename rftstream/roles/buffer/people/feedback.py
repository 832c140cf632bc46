"""The buffer's handling of feedback: it asks questions about complete groups, and writes a judgement for each vote.

Questions and judgements are written in the buffer's transactions. When a vote is read, the buffer decides whether it
comes before or after its group's batch: the reward of an open group changes, that of a decided group does not. After a
restart the votes are read again, and votes with a judgement on the log keep that judgement."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from rftstream.clock import Clock
from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts import codec
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.questions import Judgement, Question
from rftstream.contracts.records import Record, TopicPartition
from rftstream.data.feedback.fold import OPEN, FeedbackFold, GroupStatus, judgement_id_of
from rftstream.data.feedback.selection import choose_questions
from rftstream.errors import ContractError
from rftstream.roles.buffer.bodies import Bodies
from rftstream.roles.buffer.groups import Group, OpenGroups
from rftstream.roles.buffer.people.judged_rewards import JudgedBodies, JudgedRewards
from rftstream.roles.buffer.progress import BufferProgress
from rftstream.service.role import FOREVER, Log, Publish, SingleTransaction
from rftstream.transport.base import Transport

FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions about an open group."""

    questions: tuple[str, ...] = ()
    held_until: float = -math.inf


class FeedbackIntake:
    """The buffer's intake of feedback from annotators. The step makes one at each recovery, and calls:

    - `recall` for each outcome on the log, then `begin`;
    - `absorb` for each record of `feedback`;
    - `fold` before it chooses a batch; the returned groups are judged again;
    - `holds` before it lets a group into a batch;
    - `decided` for each outcome;
    - `with_outputs` for each transaction.

    In a run without questions it reads and holds nothing."""

    def __init__(self, settings: FeedbackSection | None, seed: int, clock: Clock) -> None:
        self._settings, self._seed, self._clock = settings, seed, clock
        self._rewards = JudgedRewards(settings or FeedbackSection())
        self._fold = FeedbackFold(settings or FeedbackSection())
        self._decided = DecidedGroups()
        self._asked: dict[int, Asked] = {}
        """Open groups, by sequence, for which the decision to ask was made."""
        self._recorded: set[str] = set()
        """Judgements on the log at the recovery."""
        self._waiting: list[tuple[Record, Feedback | None]] = []
        """Votes without a judgement, in order."""
        self._coming: set[str] = set()
        """Rollouts of waiting votes that are on `verified` and were not read yet."""
        self._outputs: list[Publish] = []
        """Records for the next transaction."""

    def bodies(self, transport: Transport, max_bytes: int) -> Bodies:
        """Return the store for the bodies of open groups."""
        if self._settings is None:
            return Bodies(transport, max_bytes)
        return JudgedBodies(transport, max_bytes, self._rewards)

    # ------------------------------------------------------------------------------------------ reading

    def recall(self, outcome: GroupOutcome) -> None:
        """Apply an outcome from the log."""
        if self._settings is not None and not outcome.late:
            self._note_outcome(outcome)

    def _note_outcome(self, outcome: GroupOutcome) -> None:
        size = outcome.group_size or len(outcome.rollouts)
        self._decided.add(outcome.sequence, outcome.group_id, size, outcome.result, outcome.batch_sequence)

    def begin(self, log_: Log) -> dict[TopicPartition, int]:
        """Read questions, votes and judgements. Return the offsets from which reading of votes continues."""
        if self._settings is None:
            return {}
        judgements: dict[str, Judgement] = {}
        for received in log_.messages("judgements"):
            if isinstance(received.message, Judgement):
                judgements[received.message.judgement_id] = received.message
                self._fold.note(received.message)
                self._rewards.learn(received.message)
        for received in log_.messages("questions"):
            if isinstance(received.message, Question):
                self._note_question(received.message)
        self._recorded = set(judgements)
        return self._restore_votes(log_, judgements)

    def _note_question(self, question: Question) -> None:
        self._fold.ask(question)
        if question.sequence not in self._decided:
            before = self._asked.get(question.sequence, Asked())
            until = before.held_until if question.held_until is None else question.held_until
            self._asked[question.sequence] = Asked((*before.questions, question.question_id), until)

    def _restore_votes(self, log_: Log, judgements: Mapping[str, Judgement]) -> dict[TopicPartition, int]:
        """Apply the votes that have a judgement. Return the offset of the first vote without one, in each partition."""
        positions = log_.transport.admin.begin_offsets(FEEDBACK)
        unjudged: set[TopicPartition] = set()
        for record in log_.read(FEEDBACK):
            judgement = judgements.get(judgement_id_of(record))
            if judgement is None and not codec.is_foreign(record):
                unjudged.add(record.place)
            if record.place not in unjudged:
                positions[record.place] = record.offset + 1
            vote = _vote_in(record) if judgement is not None else None
            if vote is not None and judgement is not None:
                self._fold.restore(vote, judgement)
        return positions

    def absorb(self, record: Record, vote: Feedback | None) -> None:
        """Add a vote; None if it cannot be decoded."""
        if judgement_id_of(record) not in self._recorded:
            self._waiting.append((record, vote))

    # ------------------------------------------------------------------------------------------ judging

    def fold(self, log_: Log, groups: OpenGroups, progress: BufferProgress) -> list[Group]:
        """Judge the votes that can be judged. Return the open groups that must be judged again, because their rewards
        have changed or because they no longer need to wait."""
        if self._settings is None:
            return []
        touched: dict[int, Group] = {}
        waiting, self._waiting = self._waiting, []
        unplaced: list[tuple[Record, Feedback]] = []
        for record, vote in waiting:
            status = self._status_of(vote, groups) if vote is not None and vote.question_id else None
            if status is None and vote is not None and vote.question_id and self._may_come(vote):
                if set(vote.rollouts) & self._coming:
                    self._waiting.append((record, vote))
                else:
                    unplaced.append((record, vote))
                continue
            self._judge(record, vote, status, groups, touched)
        if unplaced:
            self._look_ahead(log_, progress, unplaced, groups)
        now = self._clock.now()
        released = [group for group in groups.by_sequence.values() if group.held and not self._is_held(group, now)]
        touched |= {group.sequence: group for group in released}
        return [group for group in touched.values() if group.ready or group.held]

    def _judge(
        self,
        record: Record,
        vote: Feedback | None,
        status: GroupStatus | None,
        groups: OpenGroups,
        touched: dict[int, Group],
    ) -> None:
        judgement = self._fold.judge(record, vote, status, self._clock.now())
        self._outputs.append(Publish("judgements", 0, judgement))
        if vote is None or status is not OPEN or vote.sequence is None or not self._rewards.learn(judgement):
            return
        group = groups.by_sequence[vote.sequence]
        self._rewards.apply(group)
        touched[group.sequence] = group

    def _may_come(self, vote: Feedback) -> bool:
        """Return whether a group of the vote may still arrive. If the sequence is decided, another group had it."""
        return vote.sequence is not None and vote.sequence not in self._decided

    def _status_of(self, vote: Feedback, groups: OpenGroups) -> GroupStatus | None:
        """Return the result of a vote's group; None if its rollouts are not known here."""
        sequence, group_id = vote.sequence, vote.rollout_id.rpartition("/")[0]
        siblings = [int(rollout.rpartition("/")[2]) for rollout in vote.rollouts]
        if sequence is None:
            return None
        group = groups.by_sequence.get(sequence)
        if group is not None:
            known = group.group_id == group_id and set(siblings) <= group.siblings.keys()
            return OPEN if known else None
        return self._decided.find(sequence, group_id, siblings) if sequence in self._decided else None

    def _look_ahead(
        self, log_: Log, progress: BufferProgress, votes: list[tuple[Record, Feedback]], groups: OpenGroups
    ) -> None:
        """Judge votes on rollouts that were not read here. If the rollout is further ahead on `verified`, the vote
        waits for it. Otherwise the rollout is unknown, since annotators can only judge scored rollouts."""
        wanted = {rollout for _, vote in votes for rollout in vote.rollouts}
        partitions = {record.partition for record, _ in votes}
        places = {place: offset for place, offset in progress.read.items() if place.partition in partitions}
        for record in log_.read("verified", start=places, bodies=False, partitions=partitions):
            name = record.text("rollout_id")
            if name in wanted and not codec.is_foreign(record):
                self._coming.add(name)
        for record, vote in votes:
            missing = [
                rollout
                for rollout in vote.rollouts
                if rollout not in self._coming and not _is_here(rollout, vote, groups)
            ]
            if missing:
                self._judge(record, vote, None, groups, {})
            else:
                self._waiting.append((record, vote))

    # ------------------------------------------------------------------------------------------ groups

    def holds(self, group: Group) -> bool:
        """Apply the judged rewards to the group, and ask annotators about it if that was not done yet. Return whether
        the group has to wait for their answers."""
        if self._settings is None:
            return False
        self._rewards.apply(group)
        now = self._clock.now()
        if group.sequence not in self._asked:
            self._ask(group, now)
        group.held = not group.ready and self._is_held(group, now)  # a group that was let in once stays in
        return group.held

    def _ask(self, group: Group, now: float) -> None:
        assert self._settings is not None
        siblings = [group.siblings[number] for number in sorted(group.siblings)]
        scored = [(sibling.summary, sibling.parts) for sibling in siblings]
        self._asked[group.sequence] = Asked()
        for question in choose_questions(self._settings, self._seed, group.group_id, group.sequence, scored, now):
            name = question.question_id
            if not self._fold.is_asked(name) and not self._fold.is_gold(name):
                self._note_question(question)
                self._outputs.append(Publish("questions", 0, question))

    def _is_held(self, group: Group, now: float) -> bool:
        asked = self._asked.get(group.sequence, Asked())
        return now < asked.held_until and not all(map(self._fold.is_judged, asked.questions))

    def next_release_s(self, groups: OpenGroups) -> float:
        """Return the seconds until the next group has waited long enough; FOREVER if none waits."""
        if self._settings is None:
            return FOREVER
        held = [self._asked[one.sequence].held_until for one in groups.by_sequence.values() if one.held]
        return max(0.0, min(held) - self._clock.now()) if held else FOREVER

    def decided(self, group: Group, result: GroupResult, batch: int) -> None:
        """Record the result of a group that gets its outcome in the next transaction. `batch` is the next batch."""
        if self._settings is None:
            return
        in_batch = batch if result is GroupResult.batched else None
        self._decided.add(group.sequence, group.group_id, group.size, result, in_batch)
        self._asked.pop(group.sequence, None)
        self._rewards.forget(group)
        if self._coming:
            self._coming -= {sibling.summary.rollout_id for sibling in group.siblings.values()}

    # ------------------------------------------------------------------------------------------ writing

    def with_outputs(self, transaction: SingleTransaction | None) -> SingleTransaction | None:
        """Add the questions and judgements since the last transaction. None if there is nothing to write."""
        if not self._outputs:
            return transaction
        outputs, self._outputs = tuple(self._outputs), []
        if transaction is None:
            return SingleTransaction(outputs)
        return replace(transaction, outputs=(*transaction.outputs, *outputs))

    def health(self) -> Mapping[str, object]:
        """Return how many votes wait and how many questions were judged."""
        if self._settings is None:
            return {}
        return {"votes_waiting": len(self._waiting), "questions_judged": len(self._fold.judgements)}


def _vote_in(record: Record) -> Feedback | None:
    try:
        message = codec.from_record(record)
    except ContractError:
        return None
    return message if isinstance(message, Feedback) else None


def _is_here(rollout_id: str, vote: Feedback, groups: OpenGroups) -> bool:
    """Return whether the rollout belongs to an open group."""
    group = groups.by_sequence.get(vote.sequence if vote.sequence is not None else -1)
    return group is not None and any(sibling.summary.rollout_id == rollout_id for sibling in group.siblings.values())


# ------------------------------------------------------------------------------------------
#
# The result of each group, for votes that come after its outcome: 20 bytes a group.


RESULTS = tuple(GroupResult)


class DecidedGroups:
    """The result of every decided group, by sequence. FeedbackIntake makes it, calls `add` for each outcome, and asks
    `find`."""

    def __init__(self) -> None:
        self._digests = array("Q")
        """Digests of group ids, by sequence; 0 for an unknown group."""
        self._batches = array("q")
        """Batch sequence of each group, or -1."""
        self._facts = array("I")
        """For each group the number of siblings times the number of possible results, plus the index of the result."""

    def add(self, sequence: int, group_id: str, size: int, result: GroupResult, batch: int | None) -> None:
        """Add a group that has an outcome."""
        missing = sequence + 1 - len(self._digests)
        if missing > 0:
            self._digests.extend([0] * missing)
            self._batches.extend([-1] * missing)
            self._facts.extend([0] * missing)
        self._digests[sequence] = _digest(group_id)
        self._batches[sequence] = -1 if batch is None else batch
        self._facts[sequence] = size * len(RESULTS) + RESULTS.index(result)

    def __contains__(self, sequence: int) -> bool:
        return sequence < len(self._digests) and self._digests[sequence] != 0

    def find(self, sequence: int, group_id: str, siblings: list[int]) -> GroupStatus | None:
        """Return the result of the group with this sequence; None if another group has the sequence, or lacks these
        siblings."""
        size, result = divmod(self._facts[sequence], len(RESULTS))
        if self._digests[sequence] != _digest(group_id) or max(siblings) >= size:
            return None
        batch = self._batches[sequence]
        return GroupStatus(RESULTS[result], None if batch < 0 else batch)


def _digest(group_id: str) -> int:
    return int.from_bytes(blake2b(group_id.encode(), digest_size=8).digest(), "little") or 1
