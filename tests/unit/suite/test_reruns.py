"""Tests that fail are run once more, alone; what passes then is told, and does not fail the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suite.__main__ import MOST, run


class Pytest:
    """Stands in for pytest: each run fails these tests, the next one those that fail for good."""

    def __init__(self, failing: Sequence[str], *, for_good: Sequence[str] = (), code: int = 1) -> None:
        self._failing, self._for_good, self._code = list(failing), list(for_good), code
        self.calls: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str], failed: Path) -> int:
        self.calls.append(arguments)
        if len(self.calls) == 1:
            failed.write_text(json.dumps({test: f"{test} said this" for test in self._failing}))
            return self._code if self._failing else 0
        return int(arguments[-1] in self._for_good)


@pytest.mark.parametrize(
    ("stand_in", "code", "calls", "flaky"),
    [
        (Pytest([]), 0, 1, []),
        (Pytest(["a"]), 0, 2, ["a"]),
        (Pytest(["a", "b"], for_good=["b"]), 1, 3, ["a"]),
        (Pytest([f"t{number}" for number in range(MOST + 1)]), 1, 1, []),
        (Pytest(["a"], code=2), 2, 1, []),  # interrupted
    ],
    ids=["none", "by chance", "one for good", "too many", "interrupted"],
)
def test_what_failed_is_run_again(tmp_path: Path, stand_in: Pytest, code: int, calls: int, flaky: list[str]) -> None:
    said: list[str] = []
    assert run(["-q"], run_pytest=stand_in, kept=tmp_path / "kept", say=said.append) == code
    assert len(stand_in.calls) == calls
    assert [line.split()[1] for line in said if line.startswith("flaky:")] == flaky
    kept = sorted((tmp_path / "kept").iterdir()) if flaky else []
    assert [f"{test} said this" in path.read_text() for test, path in zip(flaky, kept, strict=True)] == [True] * len(
        flaky
    )
