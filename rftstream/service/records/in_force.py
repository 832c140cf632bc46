"""The rule for topics that a single role writes: which of their records are in force. All readers use it.

A record is in force if two things hold. The role that writes the topic was claimed under the record's epoch. And the
record follows from the records before it. Any other record is foreign: somebody else wrote it, or it is damaged. A
foreign record changes nothing for any reader and is skipped.

- On `control`, claims of a role are numbered without gaps. The first valid manifest is the manifest. Records of the
  trainer and the feeder (`finished`, `trimmed`, `end`) count if their epoch is in force at this place. A `trimmed` must
  contradict neither the log's ends nor earlier records, and its checkpoint's version must be on `steps`.
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
from typing import TYPE_CHECKING

from rftstream.contracts import codec
from rftstream.contracts.control import Claim, Drawn, RunFinished, RunManifest, TasksEnded, Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rules import show
from rftstream.contracts.summaries import Summary
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.versions import StepRecord
from rftstream.contracts.versions import WeightsAnnounced as Announced
from rftstream.errors import ContractError, ForeignRecord
from rftstream.service.reading import read_between
from rftstream.service.records.outcomes_in_force import OutcomesInForce, outcome_of_headers
from rftstream.service.records.versions_in_force import RecordedVersions, VersionsInForce
from rftstream.transport.base import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        self._claims: dict[str, Claim] = {}
        self._has_manifest = False
        self._was_imported = False
        """Whether the tasks are copies of another run's tasks, so that the claims of their feeder are on the other
        run's log."""
        self._trimmed: Trimmed | None = None
        self._next_offset = 0
        """The offset on `control` below which all records were judged."""
        self._versions: defaultdict[tuple[str, str], VersionsInForce] = defaultdict(VersionsInForce)
        """Versions in force, by topic and model."""
        self._judged: dict[str, int] = {}
        """Topic -> offset of the record that was judged last."""
        self.outcomes = OutcomesInForce()
        """State of `outcomes` up to the last judged record."""
        self._recorded = RecordedVersions(transport)
        self._foreign: dict[tuple[str, int], str] = {}
        """Topic of FOLLOWING and offset -> why the record there is foreign."""
        self._is_compacted: bool | None = None

    def check(self, record: Record, message: Message) -> None:
        """Raise ForeignRecord unless the record is in force. TransportError if the log does not answer; the caller then
        asks again."""
        if record.topic in RULED and (why := self._why_foreign(record, message)) is not None:
            raise ForeignRecord(f"foreign: {why}", where=str(record))

    def decode(self, record: Record) -> Message | None:
        """Return the message of a record, None for a tombstone. ContractError if it cannot be decoded. ForeignRecord if
        it is not in force, or if it cannot be decoded on a topic of PASSED_OVER."""
        if record.value is None:
            return None
        try:
            message = codec.from_record(record)
        except ContractError as error:
            if record.topic not in PASSED_OVER:
                raise
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

    def summary(self, topic: str, through: int) -> Summary | None:
        """Return the summary of the records judged so far, which are those below `through`. None if a summary at this
        place would be incomplete."""
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
        known = self._claims.get(role)
        for settled in (False, True):  # an open transaction may hide a claim
            if known is None or epoch > known.epoch:
                self._read_on(settled=settled)
                known = self._claims.get(role)
        if known is None:
            return self._may_lack_claims()
        return 1 <= epoch <= known.epoch

    def _rules(self, role: str, epoch: int) -> bool:
        """Return whether the role is held under this epoch at the place on `control` that is being judged."""
        known = self._claims.get(role)
        return self._may_lack_claims() if known is None else epoch == known.epoch

    def _read_on(self, *, settled: bool) -> None:
        """Judge `control` up to its end. `settled` is as for `Admin.end_offsets`."""
        end = self._transport.admin.end_offsets("control", settled=settled)[CONTROL]
        if end <= self._next_offset:
            return
        begin = self._transport.admin.begin_offsets("control")[CONTROL]
        start = max(begin, self._next_offset)
        for _ in self.messages(read_between(self._transport, {CONTROL: start}, {CONTROL: end})):
            pass  # the records need only be judged
        self._next_offset = max(self._next_offset, end)

    def _may_lack_claims(self) -> bool:
        """Return whether claims may have been compacted away. Runs that are older than this rule have such a
        `control`."""
        if self._is_compacted is None:
            self._is_compacted = self._transport.admin.topics()["control"].compacted
        return self._is_compacted

    # ------------------------------------------------------------------------------------------ records

    def _why_foreign(self, record: Record, message: Message) -> str | None:
        topic, place = record.topic, (record.topic, record.offset)
        if topic not in FOLLOWING:
            return self._why_unclaimed(record, message.topic if isinstance(message, Summary) else topic)
        if topic == "control":
            is_new = record.offset >= self._next_offset
        else:
            is_new = record.offset > self._judged.get(topic, -1)
        if is_new:
            match message:
                case Announced() | StepRecord():
                    why = self._of_version(record, message)
                case GroupOutcome() | BatchReuse():
                    why = self._of_outcome(record, message)
                case _:
                    why = self._of_control(record, message)
            if why is not None:
                self._foreign[place] = why
            if topic == "control":
                self._next_offset = record.offset + 1
            else:
                self._judged[topic] = record.offset
        return self._foreign.get(place)

    def _why_unclaimed(self, record: Record, topic: str) -> str | None:
        """Return why the role that writes `topic` did not write the record, or None if it did."""
        role, epoch = TOPICS[topic].writer or "", writer_epoch(record)
        if self.is_claimed(role, epoch) or self._may_lack_claims():
            return None
        return None if self._was_imported and record.topic == "tasks" else _unclaimed(role, epoch)

    def _of_outcome(self, record: Record, message: GroupOutcome | BatchReuse) -> str | None:
        # Releases up to 0.1 wrote the late outcomes of an import without an epoch.
        was_imported = isinstance(message, GroupOutcome) and message.late and writer_epoch(record) == 0
        if not was_imported and (why := self._why_unclaimed(record, record.topic)) is not None:
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

    def _of_control(self, record: Record, message: Message) -> str | None:
        epoch = writer_epoch(record)
        match message:
            case Claim():
                return self._of_claim(message)
            case RunManifest():
                if self._has_manifest:
                    return "a second manifest; the first good one is the run's"
                self._has_manifest = True
            case TasksEnded():
                was_imported = message.reason == "imported" and epoch == 0 and RoleName.feeder not in self._claims
                if not was_imported and not self._rules(RoleName.feeder, epoch):
                    return _not_in_force(RoleName.feeder, epoch, self._claims)
                self._was_imported = self._was_imported or was_imported
            case Drawn():
                if not self._rules(RoleName.feeder, epoch):
                    return _not_in_force(RoleName.feeder, epoch, self._claims)
            case RunFinished():
                if not self._rules(RoleName.trainer, epoch) or message.name.trainer_epoch != epoch:
                    return _not_in_force(RoleName.trainer, epoch, self._claims)
            case Trimmed():
                if not self._rules(RoleName.trainer, epoch):
                    return _not_in_force(RoleName.trainer, epoch, self._claims)
                if (why := self._contradiction(message)) is not None:
                    return why
                self._trimmed = message
        return None

    def _of_claim(self, claim: Claim) -> str | None:
        known = self._claims.get(claim.role)
        follows = known.epoch + 1 if known is not None else 1
        if claim.epoch != follows and (known is not None or not self._may_lack_claims()):
            return f"a claim of epoch {claim.epoch} by {claim.process}, expected {follows}: claims follow one by one"
        self._claims[claim.role] = claim
        return None

    def _contradiction(self, said: Trimmed) -> str | None:
        """Return how the record contradicts the log, or None. Everything that it deletes must have existed, and must
        stay deleted."""
        before = self._trimmed
        if before is not None and (said.version < before.version or said.sequence < before.sequence):
            return f"it takes back that what is below version {before.version} was deleted"
        if said.version > said.name.version:
            return (
                f"it deletes what is below version {said.version}, and its newest checkpoint is of {said.name.version}"
            )
        if said.name.version and said.name not in self._recorded:
            return f"its checkpoint is of version {said.name.version} of epoch {said.name.trainer_epoch}, not on steps"
        for topic, offsets in said.offsets.items():
            if topic not in TOPICS:
                return f"it deletes from {show(topic)}, which is no topic"
            ends = [end for _, end in sorted(self._transport.admin.end_offsets(topic).items())]
            kept = (before.offsets.get(topic) if before is not None else None) or (0,) * len(ends)
            if len(offsets) != len(ends) or any(offset > end for offset, end in zip(offsets, ends, strict=True)):
                return f"it deletes {topic} up to {offsets}, but the log ends at {tuple(ends)}"
            if any(offset < least for offset, least in zip(offsets, kept, strict=True)):
                return f"it takes back that {topic} was deleted up to {kept}"
        return None


def writer_epoch(record: Record) -> int:
    """Return the epoch that a record names as its writer's; -1 if it names none."""
    text = record.header("writer_epoch") or b""
    return int(text) if text.isdigit() and len(text) < 20 else -1


def _unclaimed(role: str, epoch: int) -> str:
    return f"written under {role} epoch {epoch}, which nobody claimed"


def _not_in_force(role: str, epoch: int, claims: Mapping[str, Claim]) -> str:
    known = claims.get(role)
    return f"written under {role} epoch {epoch}, expected the one in force, {known.epoch if known else 'none yet'}"
