"""A large file of a run is gone through once: how many of its rows are decoded, and how many bytes are read, at each
start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.data.tasksets import row_index, rows
from rftstream.data.tasksets.files import JsonlTaskset
from rftstream.data.tasksets.row_index import kept_in
from rftstream.errors import ConfigError
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene

pytestmark = pytest.mark.law("bounded")

LARGE, AT_ONCE = 40, 16


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of the rows that are decoded from now on, in small files that count as large."""
    found: list[str] = []
    decode = rows._json_object

    def counted(data: bytes, where: str, expected: str) -> dict[str, Any]:
        found.append(where)
        return decode(data, where, expected)

    monkeypatch.setattr(rows, "_json_object", counted)
    monkeypatch.setattr(rows, "LARGE_ROWS", LARGE)
    monkeypatch.setattr(rows, "CHECKED_AT_ONCE", AT_ONCE)
    return found


def written(path: Path, count: int, bad: int | None = None) -> Path:
    lines = [json.dumps({"prompt": f"question {number}", "answer": str(number)}) for number in range(count)]
    if bad is not None:
        lines[bad] = '{"answer": "nothing is asked"}'
    path.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    return path


def opened(path: Path, system: str | None = None) -> JsonlTaskset:
    return JsonlTaskset(JsonlTaskset.Config(), location=str(path), columns={}, system=system)


def test_a_large_file_is_gone_through_once(tmp_path: Path, decoded: list[str]) -> None:
    path = written(tmp_path / "rows.jsonl", LARGE)
    whole = opened(path)
    assert len(decoded) == LARGE, "outside of a run all rows are looked at"
    decoded.clear()
    with kept_in(tmp_path / "index"):
        taskset = opened(path)
        assert (len(taskset), taskset.digest, decoded) == (LARGE, whole.digest, [])
        assert taskset.problem(LARGE - 1) == whole.problem(LARGE - 1)
        decoded.clear()
        assert [taskset.check_some() for _ in range(4)] == [True, True, False, False]
        assert len(decoded) == len(set(decoded)) == LARGE
        assert f"{path}:{2 * LARGE - 1}" in decoded, "blank lines count as lines"
        decoded.clear()
        again = opened(path)
        assert (again.check_some(), decoded, again.digest) == (False, [], whole.digest)
        assert again.problem(7) == whole.problem(7)


def test_a_small_file_is_looked_at_as_a_whole(tmp_path: Path, decoded: list[str]) -> None:
    with kept_in(tmp_path / "index"):
        assert not opened(written(tmp_path / "rows.jsonl", LARGE - 1)).check_some()
    assert len(decoded) == LARGE - 1 and not (tmp_path / "index").exists()


@pytest.mark.parametrize("spoil", ["rows", "settings", "damage", "release", "gone", "half"])
def test_what_was_kept_of_something_else_is_made_anew(
    spoil: str, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "rows.jsonl", LARGE)
    with kept_in(tmp_path / "index"):
        taskset = opened(path)
        while spoil != "half" and taskset.check_some():
            pass
        (kept,) = (tmp_path / "index" / "rows").iterdir()
        match spoil:
            case "rows":
                written(path, LARGE + 1)
            case "damage":
                kept.write_bytes(kept.read_bytes()[:-8] + bytes(8))
            case "release":
                monkeypatch.setattr(row_index, "__version__", "another")
            case "gone":
                kept.unlink()
        decoded.clear()
        again = opened(path, system="Think." if spoil == "settings" else None)
        while again.check_some():
            pass
    assert len(decoded) == len(again) == LARGE + (spoil == "rows")


def test_tasks_flow_while_a_file_is_looked_at(tmp_path: Path, decoded: list[str]) -> None:
    count = 50 * AT_ONCE
    path = written(tmp_path / "rows.jsonl", count, bad=count - 1)
    run = Scene(tmp_path, manifest=False, tasksets={"sums": {"source": f"jsonl:{path}", "reward": "math"}})
    driver = RoleDriver(run, "feeder")
    for _ in range(5):
        if not run.messages("tasks"):
            driver.tick()
    assert run.messages("tasks") and len(decoded) < count // 2
    with pytest.raises(ConfigError, match=rf"tasksets\.sums: .*rows\.jsonl:{2 * count - 1}: no column 'prompt'"):
        driver.work()
    driver.service.close()
