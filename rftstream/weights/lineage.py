"""The rule that says which versions are in force when a newer trainer goes on from an older version.

When trainer epoch e starts from version b, versions of older epochs beyond b are not in force any more; those up to b
stay. What an older epoch writes after a newer one has started is refused.
"""

from __future__ import annotations

from rftstream.contracts.versions import VersionName


class Lineage:
    """The starts of trainers that were seen so far. Its owner calls `start` for each of them, in log order."""

    def __init__(self) -> None:
        self._starts: list[tuple[int, int]] = []

    @property
    def epoch(self) -> int:
        """The trainer epoch in force; 0 before the first."""
        return self._starts[-1][0] if self._starts else 0

    def accepts(self, epoch: int) -> bool:
        """Return False for the record of a trainer that another has replaced."""
        return epoch >= self.epoch

    def start(self, name: VersionName) -> None:
        """Note that a newer trainer epoch begins with this version."""
        assert name.trainer_epoch > self.epoch, "epochs start in order"
        self._starts.append((name.trainer_epoch, name.version))

    def take(self, name: VersionName, *, resumed: bool) -> bool:
        """Take note of a record of `steps`, in log order. Return False for one of a trainer that another has replaced.

        A trainer's first record is `resumed` and names the version that it starts from. One whose first record is a
        step has started from the version before."""
        if not self.accepts(name.trainer_epoch):
            return False
        if name.trainer_epoch > self.epoch:
            self.start(VersionName(trainer_epoch=name.trainer_epoch, version=name.version - (not resumed)))
        return True

    def in_force(self, name: VersionName) -> bool:
        """Return True for a version that no later start has left behind, provided that it was recorded at all."""
        return all(name.version <= version for epoch, version in self._starts if epoch > name.trainer_epoch)
