"""Writes the dashboards of boards/ into dashboards/, as Grafana loads them.

    python deploy/grafana/generate.py

A test holds the two together and runs every query against a Prometheus that scrapes a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from boards import DASHBOARDS  # noqa: E402  after the path to it

FOLDER = HERE / "dashboards"


def wanted_texts() -> dict[Path, str]:
    """Return each file with its text as it should be now."""
    return {FOLDER / f"{dashboard.name}.json": dashboard.to_text() for dashboard in DASHBOARDS}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file, text in wanted_texts().items():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(HERE))


if __name__ == "__main__":
    main()
