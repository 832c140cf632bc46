"""Putting the batches of the log together again: experiences per share, closed and checked by their manifests."""

from __future__ import annotations

from dataclasses import dataclass, field

from rftstream import codec
from rftstream.errors import ContractError
from rftstream.messages import BatchManifest, Experience
from rftstream.runtime.role import Received


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, all shares, in share order."""

    sequence: int
    experiences: tuple[Experience, ...]
    manifests: tuple[BatchManifest, ...]
    positions: tuple[int, ...]
    """Next offset after the batch, per share."""

    @property
    def manifest(self) -> BatchManifest:
        return self.manifests[0]

    @property
    def num_rollouts(self) -> int:
        """Without demonstrations."""
        return sum(not experience.expert for experience in self.experiences)


@dataclass(slots=True)
class _Share:
    experiences: list[Experience] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    closed: list[tuple[BatchManifest, tuple[Experience, ...], int]] = field(default_factory=list)
    next_sequence: int = 0


class BatchAssembly:
    """Reads `batches` by position from batch `first` on."""

    def __init__(self, shares: int, first: int) -> None:
        self._shares = [_Share(next_sequence=first) for _ in range(shares)]

    def add(self, received: Received) -> None:
        """ContractError if the log does not hold what its manifests say."""
        record, message = received.record, received.message
        share = self._shares[record.partition]
        if isinstance(message, Experience):
            self._check(share, message.batch_sequence, received)
            share.experiences.append(message)
            share.encoded.append(record.value or b"")
        elif isinstance(message, BatchManifest):
            self._check(share, message.batch_sequence, received)
            digest = codec.digest_of_experiences(share.encoded)
            if len(share.experiences) != message.count or digest != message.digest:
                raise ContractError(
                    f"batch {message.batch_sequence}: found {len(share.experiences)} experiences with digest {digest}, "
                    f"expected {message.count} with {message.digest}; the log is damaged",
                    where=str(record),
                )
            share.closed.append((message, tuple(share.experiences), record.offset + 1))
            share.experiences, share.encoded = [], []
            share.next_sequence += 1

    @staticmethod
    def _check(share: _Share, sequence: int, received: Received) -> None:
        if sequence != share.next_sequence:
            raise ContractError(
                f"found batch {sequence}, expected batch {share.next_sequence}; batches follow each "
                "other without a gap",
                where=str(received.record),
            )

    @property
    def num_ready(self) -> int:
        """Batches that are complete in every share."""
        return min(len(share.closed) for share in self._shares)

    def take(self) -> Batch | None:
        """The next complete batch."""
        if not self.num_ready:
            return None
        heads = [share.closed.pop(0) for share in self._shares]
        return Batch(
            sequence=heads[0][0].batch_sequence,
            experiences=tuple(experience for _, experiences, _ in heads for experience in experiences),
            manifests=tuple(manifest for manifest, _, _ in heads),
            positions=tuple(position for _, _, position in heads),
        )
