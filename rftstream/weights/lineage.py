"""The rule for which versions are in force after a newer trainer continues from an older version.

When trainer epoch e starts from version b, versions of older epochs above b are no longer in force; those up to b stay.
Records that an older epoch writes after a newer one has started are refused."""

from __future__ import annotations

from rftstream.contracts.versions import VersionName


class Lineage:
    """The starts of trainers so far. Its owner calls `start` for each of them, in log order."""

    def __init__(self) -> None:
        self._starts: list[tuple[int, int]] = []

    @property
    def epoch(self) -> int:
        """The trainer epoch in force; 0 before the first."""
        return self._starts[-1][0] if self._starts else 0

    def accepts(self, epoch: int) -> bool:
        """Return False for a record of a replaced trainer."""
        return epoch >= self.epoch

    def start(self, name: VersionName) -> None:
        """Record that a newer trainer epoch begins with this version."""
        assert name.trainer_epoch > self.epoch, "epochs start in order"
        self._starts.append((name.trainer_epoch, name.version))

    def take(self, name: VersionName, *, resumed: bool) -> bool:
        """Apply a record of `steps`, in log order. Return False for a record of a replaced trainer.

        A trainer's first record is `resumed` and names the version from which it starts. If the first record is a step
        instead, the trainer has started from the version before."""
        if not self.accepts(name.trainer_epoch):
            return False
        if name.trainer_epoch > self.epoch:
            self.start(VersionName(trainer_epoch=name.trainer_epoch, version=name.version - (not resumed)))
        return True

    def in_force(self, name: VersionName) -> bool:
        """Return False for a version that a later start has put out of force. True also for versions that were never
        recorded."""
        return all(name.version <= version for epoch, version in self._starts if epoch > name.trainer_epoch)
