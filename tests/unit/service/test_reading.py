"""What is on the log is read by functions that wait: on Kafka the first poll of a fresh reader brings nothing."""

from __future__ import annotations

from pathlib import Path

import rftstream

ROOT = Path(rftstream.__file__).parent
OWN_READERS = {
    "launch/sessions/evaluation.py": "follows `evals`, and reads to its end at last",
    "launch/sessions/model_evaluation.py": "follows a log in memory",
    "roles/trainer/recorded_batches.py": "reads by read_to_ends",
}
"""Modules that may make a reader. All others call service/reading.py or Log.read."""


def test_roles_and_launch_read_by_functions_that_wait() -> None:
    found = {
        str(file.relative_to(ROOT))
        for room in ("roles", "launch")
        for file in (ROOT / room).rglob("*.py")
        if "transport.reader(" in file.read_text()
    }
    assert found <= OWN_READERS.keys()
