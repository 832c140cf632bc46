"""Two runs beside each other: what is said of rewards that do not compare."""

from __future__ import annotations

from rftstream.queries.decisions.side_by_side import compare_runs
from rftstream.transport.base import Transport
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.synthetic import SyntheticLog


def trained(mended_after: int) -> Transport:
    """Return the log of a run of five steps whose reward had other code up to a version."""
    log = SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test"))
    log.step(0, resumed=True)
    for version in range(1, 6):
        log.trained[version] = version
        log.step(version, metrics={"reward": 1.0}, scorers={"sums": f"exact {1 + (version > mended_after)}"})
    return log.transport


def test_a_reward_that_was_mended_half_way_is_told_beside_its_means() -> None:
    compared = compare_runs(("first", trained(3)), ("second", trained(9)))
    line = "sums: exact 1 -> exact 2 since version 4; older rewards do not compare"
    assert f"first: the reward changed: {line}\n" in compared.to_text()
    assert "second: the reward changed" not in compared.to_text()
    assert (compared.before.reward_changes, compared.after.reward_changes) == ((line,), ())
