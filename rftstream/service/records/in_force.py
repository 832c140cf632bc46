"""The rule for topics that a single role writes: which of their records are in force. All readers use it.

A record is in force if two things hold. The role that writes the topic was claimed under the record's epoch. And the
record follows from the records before it. Any other record is foreign: somebody else wrote it, or it is damaged. A
foreign record changes nothing for any reader and is skipped.

- On `control` (service/records/control_in_force.py), claims of a role are numbered without gaps. The first valid
  manifest is the manifest. Records of the trainer and the feeder (`finished`, `trimmed`, `end`) count if their epoch is
  in force at this place. A `trimmed` must contradict neither the log's ends nor earlier records, and its checkpoint's
  version must be on `steps`.
- On `weights` and `steps` each record names a version of its writer's epoch. On `steps` versions are numbered without
  gaps, and a trainer begins with a version that is there already. An announcement may skip versions that are on
  `steps`.
- On `outcomes` each group is decided once (service/records/outcomes_in_force.py).
- On `tasks`, `evals`, `questions` and `judgements` the epoch alone decides. On `summaries` the epoch of the role that
  writes the summarised topic decides; the users of a summary check whether it is true (service/records/summaries.py).
- On `batches` a record belongs to the chain of batches, which roles/trainer/assembly.py puts together.

A claim is on the log before all other records of its epoch, but a reader may see another topic first. So a reader that
meets an unknown epoch first reads `control` to its end, and then decides."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator

from rftstream.contracts import codec
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.summaries import Summary, summariser
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import StepRecord
from rftstream.contracts.versions import WeightsAnnounced as Announced
from rftstream.errors import ContractError, ForeignRecord
from rftstream.service.reading import read_between
from rftstream.service.records.control_in_force import ControlInForce, ControlStart, records_of
from rftstream.service.records.newest_summaries import FIRST_LOOK, newest_summaries
from rftstream.service.records.outcomes_in_force import OutcomesInForce, outcome_of_headers
from rftstream.service.records.versions_in_force import RecordedVersions, VersionsInForce
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

CONTROL = TopicPartition("control", 0)
RULED = frozenset(("control", "summaries", *(name for name, topic in TOPICS.items() if topic.writer is not None)))
"""Topics whose records the rule judges."""
PASSED_OVER = RULED - {"tasks", "batches"}
"""Topics on which an undecodable record is skipped, too: its headers or later records tell enough."""
FOLLOWING = frozenset(("control", "weights", "steps", "outcomes"))
"""Topics on which a record has to follow from the records before it. They have one partition."""


class RecordsInForce:
    """Judges records in the order in which a reader meets them.

    Each reader of a log has its own instance. It passes the records of a topic in order, either from the beginning of
    the topic or from the end of the summary that was passed to `begin_at`. A record that is passed twice gets the same
    answer twice."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._recorded = RecordedVersions(transport)
        self._control = ControlInForce(transport, self._recorded)
        """State of `control` up to the last judged record."""
        self._start: ControlStart | None = None
        """Where `control` begins for this reader; None if nobody asked yet."""
        self._versions: defaultdict[tuple[str, str], VersionsInForce] = defaultdict(VersionsInForce)
        """Versions in force, by topic and model."""
        self._judged: dict[str, int] = {}
        """Topic -> offset of the record that was judged last."""
        self.outcomes = OutcomesInForce()
        """State of `outcomes` up to the last judged record."""
        self._foreign: dict[tuple[str, int], str] = {}
        """Topic of FOLLOWING and offset -> why the record there is foreign."""

    def check(self, record: Record, message: Message) -> None:
        """Raise ForeignRecord unless the record is in force. TransportError if the log does not answer; the caller then
        asks again."""
        if record.topic in RULED and (why := self._why_foreign(record, message)) is not None:
            raise ForeignRecord(f"foreign: {why}", where=str(record))

    def decode(self, record: Record) -> Message | None:
        """Return the message of a record, None for a tombstone. ContractError if it cannot be decoded. ForeignRecord if
        it is not in force, or if it cannot be decoded on a topic of PASSED_OVER."""
        is_new = record.topic == "control" and record.offset >= self._control.next_offset
        if record.value is None:
            if is_new:
                self._control.withdraw(record)
            return None
        try:
            message = codec.from_record(record)
        except ContractError as error:
            if record.topic not in PASSED_OVER:
                raise
            if is_new:
                self._control.pass_over(record)
            message = self._by_headers(record, error)
        self.check(record, message)
        return message

    def _by_headers(self, record: Record, error: ContractError) -> Message:
        """Return the outcome that the headers of an undecodable record describe. ForeignRecord for other messages."""
        outcome = outcome_of_headers(record) if record.topic == "outcomes" else None
        if outcome is None:
            is_new = record.topic == "steps" and record.offset > self._judged.get("steps", -1)
            if is_new and self.is_claimed(RoleName.trainer, writer_epoch(record)):
                self._versions["steps", ""].num_unread += 1
                self._judged["steps"] = record.offset
            raise ForeignRecord(error.text, path=error.path, where=error.where) from None
        if record.offset > self._judged.get("outcomes", -1) and self._why_foreign(record, outcome) is None:
            log.warning("%s; group %s counts as its headers say", error, outcome.group_id)
        return outcome

    # ------------------------------------------------------------------------------------------ summaries

    def begin_anew(self, topic: str, summary: Summary | None = None) -> None:
        """Forget the judgements on the topic. With a summary, begin with the state that it describes."""
        self._judged[topic] = -1 if summary is None else summary.through - 1
        self._foreign = {place: why for place, why in self._foreign.items() if place[0] != topic}
        if topic == "outcomes":
            self.outcomes = OutcomesInForce(summary.outcomes if summary is not None else None)
            return
        for key in [key for key in self._versions if key[0] == topic]:
            del self._versions[key]
        if summary is not None and summary.steps is not None:
            self._versions[topic, ""] = VersionsInForce.of_steps(summary.steps)
        if summary is not None and summary.weights is not None:
            for model, there in VersionsInForce.of_weights(summary.weights).items():
                self._versions[topic, model] = there

    def begin_control(self) -> ControlStart:
        """Return where a reader with this rule begins to read `control`: at the newest trusted summary, unless the rule
        has judged records of it already. The reader first passes the records that are returned."""
        if self._start is None:
            begin = self._transport.admin.begin_offsets("control")[CONTROL]
            self._start = (None if self._control.next_offset else self._summarised(begin)) or ControlStart(begin)
        return self._start

    def _summarised(self, begin: int) -> ControlStart | None:
        """Begin with the newest summary of `control`. None if the one before it does not bear it out."""
        end = self._transport.admin.end_offsets("control")[CONTROL]
        # Who may write a summary is said on `control`, so that these are judged by their content alone. The search must
        # not cost more than what it saves.
        within = max(FIRST_LOOK, end - begin)
        newest = newest_summaries(self._transport, "control", codec.from_record, below=end, within=within)
        if len(newest) < 2 or newest[1][1].through < begin:
            return None
        (record, said), (_, before) = newest
        found = RecordsInForce(self._transport)
        found._recorded = self._recorded
        found._begin_control_with(before)
        found._judge_control(before.through, said.through)
        if found.summary("control", said.through) != said:
            log.warning("%s: says something else of control than stands there; reading all of it", record)
            return None
        self._begin_control_with(said)
        return ControlStart(said.through, tuple(records_of(said.control)))

    def _begin_control_with(self, summary: Summary) -> None:
        self._control = ControlInForce(self._transport, self._recorded, summary.control)
        self._control.next_offset = summary.through

    def _judge_control(self, start: int, end: int) -> None:
        for _ in self.messages(read_between(self._transport, {CONTROL: start}, {CONTROL: end})):
            pass  # the records need only be judged

    def _was_left_out(self, record: Record) -> bool:
        """Return whether a record of `control` is below the summary with which this reader began, and not in it."""
        start = self._start
        if start is None or record.offset >= start.offset:
            return False
        return all(record.offset != one.offset for one in start.records)

    def summary(self, topic: str, through: int) -> Summary | None:
        """Return the summary of the records judged so far, which are those below `through`. None if a summary at this
        place would be incomplete."""
        if topic == "control":
            control = self._control.summary()
            return None if control is None else Summary(topic=topic, through=through, control=control)
        if topic == "outcomes":
            outcomes = self.outcomes.summary()
            return None if outcomes is None else Summary(topic=topic, through=through, outcomes=outcomes)
        there = {key[1]: versions for key, versions in self._versions.items() if key[0] == topic}
        if topic == "weights":
            weights = VersionsInForce.weights_summary(there)
            return None if weights is None else Summary(topic=topic, through=through, weights=weights)
        steps = there[""].steps_summary() if there else None
        return None if steps is None else Summary(topic=topic, through=through, steps=steps)

    def messages(self, records: Iterable[Record]) -> Iterator[tuple[Record, Message | None]]:
        """Yield records with their messages, None for tombstones. Records that are foreign or undecodable are left out:
        they must not stop a tool that only reads, and the roles report them."""
        for record in records:
            try:
                yield record, self.decode(record)
            except ContractError:
                continue

    # ------------------------------------------------------------------------------------------ epochs

    def is_claimed(self, role: str, epoch: int) -> bool:
        """Return whether the role was ever claimed under this epoch. Before it returns False, it reads `control` to its
        end."""
        known = self._control.claims.get(role)
        for settled in (False, True):  # an open transaction may hide a claim
            if known is None or epoch > known.epoch:
                self._read_on(settled=settled)
                known = self._control.claims.get(role)
        if known is None:
            return self._control.may_lack_claims()
        return 1 <= epoch <= known.epoch

    def _read_on(self, *, settled: bool) -> None:
        """Judge `control` up to its end. `settled` is as for `Admin.end_offsets`."""
        start, end = self.begin_control(), self._transport.admin.end_offsets("control", settled=settled)[CONTROL]
        if end <= self._control.next_offset:
            return
        self._judge_control(max(start.offset, self._control.next_offset), end)
        self._control.next_offset = max(self._control.next_offset, end)

    # ------------------------------------------------------------------------------------------ records

    def _why_foreign(self, record: Record, message: Message) -> str | None:
        topic, place = record.topic, (record.topic, record.offset)
        if topic not in FOLLOWING:
            writer = summariser(message.topic) if isinstance(message, Summary) else TOPICS[topic].writer
            return self._why_unclaimed(record, writer or "")
        if topic == "control":
            if self._was_left_out(record):
                self._judge_anew()
            if record.offset >= self._control.next_offset:
                why = self._control.why_foreign(record, message, writer_epoch(record))
                if why is not None:
                    self._foreign[place] = why
        elif record.offset > self._judged.get(topic, -1):
            match message:
                case Announced() | StepRecord():
                    why = self._of_version(record, message)
                case GroupOutcome() | BatchReuse():
                    why = self._of_outcome(record, message)
                case _:
                    why = None
            if why is not None:
                self._foreign[place] = why
            self._judged[topic] = record.offset
        return self._foreign.get(place)

    def _judge_anew(self) -> None:
        """Judge `control` from its beginning, for a reader that reads all of it."""
        begin, end = self._transport.admin.begin_offsets("control")[CONTROL], self._control.next_offset
        self._start, self._control = ControlStart(begin), ControlInForce(self._transport, self._recorded)
        self._judge_control(begin, end)

    def _why_unclaimed(self, record: Record, role: str) -> str | None:
        """Return why the role did not write the record, or None if it did."""
        epoch = writer_epoch(record)
        if self.is_claimed(role, epoch) or self._control.may_lack_claims():
            return None
        return None if self._control.was_imported and record.topic == "tasks" else _unclaimed(role, epoch)

    def _of_outcome(self, record: Record, message: GroupOutcome | BatchReuse) -> str | None:
        # Releases up to 0.1 wrote the late outcomes of an import without an epoch.
        was_imported = isinstance(message, GroupOutcome) and message.late and writer_epoch(record) == 0
        if not was_imported and (why := self._why_unclaimed(record, RoleName.buffer)) is not None:
            return why
        return self.outcomes.why_foreign(message)

    def _of_version(self, record: Record, message: Announced | StepRecord) -> str | None:
        name, epoch = message.name, writer_epoch(record)
        if epoch != name.trainer_epoch:
            return f"a version of trainer epoch {name.trainer_epoch}, written under epoch {epoch}"
        if not self.is_claimed(RoleName.trainer, epoch):
            return _unclaimed(RoleName.trainer, epoch)
        there = self._versions[record.topic, message.model if isinstance(message, Announced) else ""]
        why = there.why_not(name)
        if why is not None and there.is_ahead(name) and isinstance(message, Announced) and name in self._recorded:
            why = None
        if why is None:
            there.add(message)
        return why


def writer_epoch(record: Record) -> int:
    """Return the epoch that a record names as its writer's; -1 if it names none."""
    text = record.header("writer_epoch") or b""
    return int(text) if text.isdigit() and len(text) < 20 else -1


def _unclaimed(role: str, epoch: int) -> str:
    return f"written under {role} epoch {epoch}, which nobody claimed"
