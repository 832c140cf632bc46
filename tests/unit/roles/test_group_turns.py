"""Which ready groups are batched first."""

from __future__ import annotations

from types import SimpleNamespace

from rftstream.roles.buffer.groups import _turn


def test_a_group_whose_last_chance_this_batch_is_comes_first_whatever_matters_more() -> None:
    versions_and_priorities = [(5, 9.0), (3, 1.0), (4, 1.0), (2, 2.0), (None, 0.5), (4, 2.0)]
    groups = [
        SimpleNamespace(oldest_version=version, priority=priority, sequence=number)
        for number, (version, priority) in enumerate(versions_and_priorities)
    ]
    order = sorted(groups, key=lambda group: _turn(group, 3))  # type: ignore[arg-type]
    assert [group.sequence for group in order] == [3, 1, 0, 5, 2, 4]
