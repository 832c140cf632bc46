"""A run that goes on for long, and whether anything in it grows: `make soak DURATION_S=3600`.

Real processes work over the embedded log, two of which are killed now and then. With `--simulated-hours` all roles work
in this process, by a manual clock: `make soak SIMULATED_HOURS=24`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from tests.e2e.workplace import Workplace
from tests.soak import processes, simulated
from tests.soak.series import Series, draw, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--duration-s", type=float, default=3600.0, help="of real time")
    parser.add_argument("--simulated-hours", type=float, help="of simulated time, instead")
    parser.add_argument("--every-s", type=float, default=10.0, help="from one sample to the next")
    parser.add_argument("--kill-every-s", type=float, default=120.0, help="from one killed worker to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all samples, for scripts")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of them")
    given = parser.parse_args()
    if given.simulated_hours is not None:
        series, said, limits = *_simulate(given), simulated.LIMITS
        length = f"{given.simulated_hours:g} simulated hours"
    else:
        series, said, limits = *_play(given), processes.LIMITS
        length = f"{given.duration_s / 60:g} minutes"
    lines = series.lines(limits)
    print(table(lines))
    print(json.dumps(said))
    grown = [line.name for line in lines if line.grows]
    if given.json:
        whole = {
            "length": length, "run": said, "lines": [line.to_json() for line in lines], "samples": series.to_json(),
        }  # fmt: skip
        given.json.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    if given.picture:
        draw(series, given.picture, length)
    print(f"{length}; grown: {', '.join(grown) or 'nothing'}")
    return 1 if grown else 0


def _play(given: argparse.Namespace) -> tuple[Series, dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="rftstream-soak-") as folder:
        place = Workplace(Path(folder) / "place")
        soak = processes.ProcessSoak(
            place, given.duration_s, every_s=given.every_s, kill_every_s=given.kill_every_s, seed=given.seed
        )
        try:
            return soak.series, soak.play(_tell)
        finally:
            place.end()


def _simulate(given: argparse.Namespace) -> tuple[Series, dict[str, object]]:
    logging.disable(logging.CRITICAL)  # of roles that are killed
    soak = simulated.SimulatedSoak(given.simulated_hours, seed=given.seed)
    return soak.series, soak.play(_tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
