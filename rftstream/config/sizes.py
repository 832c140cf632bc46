"""Checks that the records of a run fit into the limits of records. Settings that would need larger records are refused
when the run file is read, and not by the role that first writes such a record."""

from __future__ import annotations

from rftstream.config.sections import RunConfig
from rftstream.contracts.limits import LIMITS
from rftstream.contracts.topics import MAX_RECORD_BYTES
from rftstream.errors import ConfigError

_ID_BYTES = 48
"""Most bytes of the numbers in the id of a group or a rollout, with the id's frame."""
_SIBLING_BYTES = 180
"""Bytes that an outcome takes for one sibling, beside the sibling's id."""
_OTHER_BYTES = 1 << 20
"""Bytes of everything else in an outcome or manifest."""


def check_sizes(config: RunConfig) -> None:
    """Raise ConfigError if a batch has more groups, or a group more siblings, than one record can name.

    A batch's manifest names its groups. A group's outcome names its siblings, and late siblings a second time.
    """
    longest = max(map(len, config.tasksets), default=0) + _ID_BYTES
    room = MAX_RECORD_BYTES - _OTHER_BYTES
    for name, value, needed, what in (
        ("groups_per_batch", config.feeder.groups_per_batch, longest, "manifest of a batch"),
        ("group_size", config.feeder.group_size, 2 * longest + _SIBLING_BYTES, "outcome of a group"),
    ):
        most = min(LIMITS.items, room // needed)
        if value > most:
            raise ConfigError(
                f"feeder.{name}: got {value:,}, expected at most {most:,}; the {what} names them all in one record"
            )
