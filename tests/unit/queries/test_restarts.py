"""Processes that died and were started again: `status` counts them, and the studio says so if they are many."""

from __future__ import annotations

import re
from pathlib import Path

from rftstream.queries.state.flow_map import what_is_wrong
from rftstream.queries.state.status import Status
from rftstream.queries.state.status_reading import read_status
from rftstream.runs.folder import OpenRun, RunFolder
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.queries.test_status import config, noted
from tests.unit.synthetic import SyntheticLog

DIED = "WARNING run explorer-0 ended (exit 3): disk full; starting again in 10.0 s"


def test_who_died_and_was_started_again(tmp_path: Path) -> None:
    log = SyntheticLog(MemoryLog(lambda: 0.0).connect())
    log.step(0, resumed=True)

    def died(times: int) -> Status:
        noted(tmp_path, *(f"2026-01-31 12:2{minute}:00.000 {DIED}" for minute in range(times)))
        return read_status(OpenRun(RunFolder(tmp_path), config(), log.transport))

    def many(status: Status) -> list[str]:
        return [one.text for one in what_is_wrong(status, now=0.0) if one.title == "restarted"]

    status = died(2)
    assert [(one["process"], one["count"]) for one in status.to_json()["restarts"]] == [
        ("trainer-0", 1),
        ("explorer-0", 2),
    ]
    assert re.search(r"restarted +trainer-0 once at 2026-01-31 12:10:00: killed by SIGKILL\n", status.to_text())
    assert "explorer-0 2 times, last at 2026-01-31 12:21:00: exit 3: disk full\n" in status.to_text()
    assert not many(status), "as it should be"
    [text] = many(died(3))
    assert text.startswith("explorer-0 3 times") and "trainer-0" not in text
    names = [f"explorer-{index}" for index in range(64)]
    noted(tmp_path, *(f"2026-01-31 13:00:{n % 60:02}.000 {DIED.replace('explorer-0', name)}"
                      for n, name in enumerate(names)))  # fmt: skip
    rows = re.findall(r"restarted +(.*)", read_status(OpenRun(RunFolder(tmp_path), config(), log.transport)).to_text())
    assert rows[0].startswith("59 others, 59 times in all: ") and len(rows) == 7
    assert [row.split()[0] for row in rows[1:]] == names[-6:]
