"""The feeder's progress in a growing taskset, whose size is unknown.

New problems come first, in the order in which they joined. While there are no new ones, the known problems come again,
pass after pass, until each has been drawn `passes` times. Then the feeder waits for new ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class GrowthWalk:
    """The feeder's progress in one growing taskset. It is part of the FeederCursor. `Draws` asks `has_next` and calls
    `next` for each draw."""

    fresh: int = 0
    """Number of problems drawn for the first time, in pass 0: all below this index."""
    taskset_pass: int = 1
    """The current pass of repeated problems."""
    taken: int = 0
    """Number of problems drawn in the current pass: all below this index."""
    waived: int = 0
    """Turns that the taskset lost to others while it had no problem. It does not make up for them."""

    def has_next(self, count: int, passes: int | None) -> bool:
        """Return whether there is a problem to draw. `count` is the number of problems that have joined. `passes` is
        the number of draws of each problem; None without a limit."""
        if self.fresh < count:
            return True
        again = passes is None or self.taskset_pass < passes
        return (
            again and self.fresh > 0 and (self.taken < self.fresh or passes is None or self.taskset_pass + 1 < passes)
        )

    def next(self, count: int, passes: int | None) -> tuple[int, int]:
        """Return pass and index of the next problem, and move on. Call it only if `has_next`."""
        assert self.has_next(count, passes), "asked first"
        if self.fresh < count:
            self.fresh += 1
            return 0, self.fresh - 1
        if self.taken == self.fresh:
            self.taskset_pass, self.taken = self.taskset_pass + 1, 0
        self.taken += 1
        return self.taskset_pass, self.taken - 1

    def to_json(self) -> dict[str, int]:
        """Return the numbers that differ from a new walk's, for the position's metadata."""
        return {name: value for name, value in asdict(self).items() if value != getattr(_NEW, name)}


_NEW = GrowthWalk()
