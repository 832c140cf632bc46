"""Named points: who dies at which of them, once, and what does not read as a fault is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rftstream import faults
from rftstream.errors import ConfigError

CODE = """
import sys
from pathlib import Path
from rftstream import faults
faults.arm(sys.argv[1], Path(sys.argv[2]))
for number in range(1, 4):
    faults.at("before_commit")
    faults.at("after_commit")
    print(number, flush=True)
"""


def passed(role: str, done: Path, told: str) -> tuple[int, list[str]]:
    run = subprocess.run(
        [sys.executable, "-c", CODE, role, str(done)], env={faults.VARIABLE: told, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout.split()


def test_it_happens_at_the_nth_time_to_that_role_and_once(tmp_path: Path) -> None:
    told = "trainer:after_commit:2,buffer:before_commit:1"
    assert passed("feeder", tmp_path / "done", told) == (0, ["1", "2", "3"])
    assert passed("trainer", tmp_path / "done", told) == (-9, ["1"])
    assert passed("trainer", tmp_path / "done", told) == (0, ["1", "2", "3"])
    assert passed("buffer", tmp_path / "done", told) == (-9, [])
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == [
        "buffer.before_commit.1", "trainer.after_commit.2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["trainer", "trainer:nowhere:1", "trainer:in_commit:x", "trainer:in_commit:1:sing", "a:in_commit:1:kill:2"]
)
def test_what_is_no_fault_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(ConfigError, match="expected ROLE:POINT:N"):
        faults.arm("trainer", tmp_path)
