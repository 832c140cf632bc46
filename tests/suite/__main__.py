"""Runs the tests, and once more, alone, what failed:

    python -m tests.suite [--load N] [ARGUMENTS OF pytest ...]

A test that passes then does not fail the run. It is told (`flaky: TEST`), and what it said when it failed is kept below
build/flaky. More than MOST such tests fail the run. `--load N` keeps N processes busy beside the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.load import busy
from tests.suite.storeys import FAILED_FILE

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "flaky"
MOST = 3
"""Tests that may fail and pass when they are run again."""
SOME_FAILED = 1  # pytest's exit code


def run_pytest(arguments: Sequence[str], failed: Path) -> int:
    """Run pytest, which leaves in a file what failed. Return its exit code."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, FAILED_FILE: str(failed)}, check=False).returncode


def run(
    arguments: Sequence[str],
    *,
    run_pytest: Callable[[Sequence[str], Path], int] = run_pytest,
    kept: Path = KEPT,
    say: Callable[[str], None] = print,
) -> int:
    """Run the tests, and again what failed. Return the exit code: that of pytest, or 0 if all passed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failed.json"
        code = run_pytest(arguments, path)
        failed: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        if code != SOME_FAILED or not failed:
            return code
        if len(failed) > MOST:
            say(f"{len(failed)} tests failed; up to {MOST} would have been run again, alone")
            return code
        say(f"\nrun again, alone: {' '.join(failed)}")
        again = [run_pytest(["-n", "0", test], Path(folder) / "again.json") for test in failed]
    for test, code_then in zip(failed, again, strict=True):
        if code_then == 0:
            say(f"flaky: {test} (what it said: {keep(kept, test, failed[test])})")
    return max(again)


def keep(folder: Path, test: str, output: str) -> Path:
    """Write what a test said when it failed, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "-" for letter in test)[-100:]
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.txt"
    path.write_text(f"{test}\nload average {os.getloadavg()}\n\n{output}\n", encoding="utf-8")
    return path


def main() -> None:
    """Read --load, the only argument that is not pytest's."""
    arguments, load = sys.argv[1:], 0
    if arguments[:1] == ["--load"]:
        load, arguments = int(arguments[1]), arguments[2:]
    with busy(load):
        sys.exit(run(arguments))


if __name__ == "__main__":
    main()
