"""Assembles the batches on the log: the experiences of each share, closed and checked by their manifests.

Manifests form a chain: in each share batch k + 1 follows batch k, and a manifest holds the count and the digest of its
experiences. Records outside of the chain are foreign, and are returned to be dead-lettered. A foreign record looks the
same as a damaged batch. So for each record that does not fit, the assembly checks once whether the buffer has committed
the batch. If it has, the whole batch is on the log. If no manifest there closes the batch, it cannot be completed, and
the run ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.records import Record
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.versions import StepRecord
from rftstream.errors import ContractError
from rftstream.service.role import Foreign, Log, Received

MAX_CHOICES = 4096
"""Most combinations of experiences that are tried if several experiences claim the same place in a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch with all shares, in share order."""

    sequence: int
    experiences: tuple[Experience, ...]
    manifests: tuple[BatchManifest, ...]
    positions: tuple[int, ...]
    """Next offset after the batch, for each share."""

    @property
    def manifest(self) -> BatchManifest:
        """The manifest of the first share. Manifests of other shares differ only in what describes their own share."""
        return self.manifests[0]

    @property
    def num_rollouts(self) -> int:
        """Number of experiences that are rollouts trained on for the first time. The others are demonstrations, and
        rollouts that were in an earlier batch."""
        return sum(not experience.expert and not experience.use for experience in self.experiences)


class BatchesLog(Protocol):
    """Access to batches on the log beyond the records read so far."""

    def is_committed(self, sequence: int) -> bool:
        """Whether the buffer has committed this batch, so that all of it is on the log."""

    def after(self, record: Record) -> Iterator[Received]:
        """Yield the records after a record in its share, up to the end. Undecodable records and records out of force
        are left out."""


class CommittedBatches:
    """The committed batches on a run's log. The trainer and readers of batches make it, and BatchAssembly asks it."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def is_committed(self, sequence: int) -> bool:
        """Whether the batch is on the log: the buffer has committed a position for it, or a step has trained it."""
        committed = self._log.committed(RoleName.buffer).values()
        if any(sequence < int(position.metadata.split()[1]) for position in committed if position.metadata):
            return True
        log = Log(self._log.transport)  # the trainer may have begun to read `steps` after these
        steps = (step for _, step in log.in_force("steps") if isinstance(step, StepRecord))
        return any(step.batch_sequence is not None and sequence <= step.batch_sequence for step in steps)

    def after(self, record: Record) -> Iterator[Received]:
        """Yield the records after a record in its share. Undecodable records and records out of force are left out."""
        start = {record.place: record.offset + 1}
        for found in self._log.read("batches", start=start, settled=True, partitions=[record.partition]):
            try:
                yield Received(found, self._log.rule.decode(found))
            except ContractError:
                continue


@dataclass(slots=True)
class _Share:
    experiences: list[Received] = field(default_factory=list)
    """Experiences that may belong to the next batch."""
    manifests: list[Received] = field(default_factory=list)
    """Manifests that name the next batch and did not close it."""
    closed: list[tuple[BatchManifest, tuple[Experience, ...], int]] = field(default_factory=list)
    num_closed: int = 0
    next_sequence: int = 0
    found_to_close: int = -1
    """The last batch for which a search of the log found a closing manifest."""


class BatchAssembly:
    """Incomplete batches, and complete ones that were not taken. The trainer's step makes it at each recovery, for the
    batches from `first` on. It calls `add` for each record of `batches` (or `undecodable`), and `take` when it can
    train another batch."""

    def __init__(self, shares: int, first: int, log: BatchesLog) -> None:
        self._shares = [_Share(next_sequence=first) for _ in range(shares)]
        self._log = log

    def add(self, received: Received) -> list[Foreign]:
        """Add the next record of a share. Return the records that turned out to be foreign. ContractError if the next
        batch cannot be completed."""
        message, share = received.message, self._shares[received.record.partition]
        if not isinstance(message, Experience | BatchManifest):
            return []
        sequence, expected = message.batch_sequence, share.next_sequence
        if sequence < expected:
            return [Foreign(received.record, f"it belongs to batch {sequence}, and that is complete")]
        if sequence > expected or message.share != received.record.partition:
            why = (
                f"found batch {sequence} of share {message.share}, expected batch {expected}; batches follow each "
                "other without a gap"
            )
            self._doubt(received.record, why)
            return [Foreign(received.record, why)]
        if isinstance(message, Experience):
            share.experiences.append(received)
            return []
        return self._close(received, message)

    def undecodable(self, record: Record, error: ContractError) -> None:
        """Record that an undecodable record was skipped. ContractError if the next batch is incomplete without it."""
        self._doubt(record, error.text)

    def _close(self, received: Received, manifest: BatchManifest) -> list[Foreign]:
        share = self._shares[received.record.partition]
        chosen = _chosen(share.experiences, manifest, len(self._shares))
        if chosen is None or (not chosen and not self._is_empty(received, manifest.batch_sequence)):
            digest = codec.digest_of_experiences(received.record.value or b"" for received in share.experiences)
            why = (
                f"batch {manifest.batch_sequence}: found {len(share.experiences)} experiences with digest {digest}, "
                f"expected {manifest.count} with {manifest.digest}"
            )
            share.manifests.append(received)
            self._doubt(received.record, why)
            return []
        taken = set(map(id, chosen))
        unchosen = [found for found in share.experiences if id(found) not in taken]
        others = [*unchosen, *share.manifests]
        experiences = tuple(one.message for one in chosen if isinstance(one.message, Experience))
        share.closed.append((manifest, experiences, received.record.offset + 1))
        share.experiences, share.manifests = [], []
        share.num_closed += 1
        share.next_sequence += 1
        return [
            Foreign(other.record, f"it is not what the manifest of batch {manifest.batch_sequence} names")
            for other in others
        ]

    def _doubt(self, record: Record, why: str) -> None:
        """Decide whether a record that does not fit is foreign, or whether the next batch of the share is damaged."""
        share = self._shares[record.partition]
        sequence = share.next_sequence
        if share.found_to_close == sequence or not self._log.is_committed(sequence):
            return
        if self._closes_behind(record, sequence):
            share.found_to_close = sequence
            return
        raise ContractError(
            f"{why}; batch {sequence} cannot be completed from what is on the log: the log is damaged",
            where=str(record),
        )

    def _is_empty(self, received: Received, sequence: int) -> bool:
        """Whether a batch is empty in this share according to its manifest. No experience can confirm an empty
        manifest, so any writer could have made it."""
        return self._log.is_committed(sequence) and not self._closes_behind(received.record, sequence, up_to=sequence)

    def _closes_behind(self, record: Record, sequence: int, up_to: int | None = None) -> bool:
        """Whether a manifest after the record closes this batch. With `up_to`, the search ends at the first manifest
        of a later batch than `up_to`."""
        experiences = list(self._shares[record.partition].experiences)
        for received in self._log.after(record):
            match received.message:
                case Experience(batch_sequence=found) if found == sequence:
                    experiences.append(received)
                case BatchManifest(batch_sequence=found) as manifest if found == sequence:
                    if _chosen(experiences, manifest, len(self._shares)) is not None:
                        return True
                case BatchManifest(batch_sequence=found) if up_to is not None and found > up_to:
                    return False
        return False

    @property
    def num_ready(self) -> int:
        """Number of batches that are complete in every share."""
        return min(len(share.closed) for share in self._shares)

    def open_records(self) -> list[Record]:
        """Return the records that belong to no complete batch so far."""
        return [found.record for share in self._shares for found in (*share.experiences, *share.manifests)]

    def num_closed(self, share: int) -> int:
        """Number of batches that were complete in a share so far."""
        return self._shares[share].num_closed

    def take(self) -> Batch | None:
        """Return the next batch, each once; None if it is incomplete."""
        if not self.num_ready:
            return None
        heads = [share.closed.pop(0) for share in self._shares]
        return Batch(
            sequence=heads[0][0].batch_sequence,
            experiences=tuple(experience for _, experiences, _ in heads for experience in experiences),
            manifests=tuple(manifest for manifest, _, _ in heads),
            positions=tuple(position for _, _, position in heads),
        )


def _chosen(found: Sequence[Received], manifest: BatchManifest, num_shares: int) -> Sequence[Received] | None:
    """Return those of the experiences that the manifest describes; None if they are not complete."""
    if manifest.num_shares != num_shares:
        return None
    if _digest(found) == manifest.digest and len(found) == manifest.count:
        return found
    at: list[list[int]] = [[] for _ in range(manifest.count)] if manifest.count <= len(found) else []
    for number, received in enumerate(found):
        if isinstance(received.message, Experience) and received.message.position < len(at):
            at[received.message.position].append(number)
    if len(at) != manifest.count or math.prod(map(len, at)) > MAX_CHOICES:
        return None
    in_order = (
        way for way in itertools.product(*at) if all(before < after for before, after in itertools.pairwise(way))
    )
    ways = ([found[number] for number in way] for way in in_order)
    return next((way for way in ways if _digest(way) == manifest.digest), None)


def _digest(experiences: Sequence[Received]) -> str:
    return codec.digest_of_experiences(received.record.value or b"" for received in experiences)
