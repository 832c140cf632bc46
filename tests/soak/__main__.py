"""A run that goes on for long, and whether anything in it grows: `make soak DURATION_S=3600`.

Without `--simulated-hours` real processes work over the embedded log, two of which are killed now and then."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.e2e.workplace import Workplace
from tests.soak.processes import LIMITS, ProcessSoak
from tests.soak.series import draw, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--duration-s", type=float, default=3600.0, help="of real time")
    parser.add_argument("--every-s", type=float, default=10.0, help="from one sample to the next")
    parser.add_argument("--kill-every-s", type=float, default=120.0, help="from one killed worker to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all samples, for scripts")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rftstream-soak-") as folder:
        place = Workplace(Path(folder) / "place")
        soak = ProcessSoak(
            place, given.duration_s, every_s=given.every_s, kill_every_s=given.kill_every_s, seed=given.seed
        )
        try:
            said = soak.play(lambda line: print(line, flush=True))
        finally:
            place.end()
    lines = soak.series.lines(LIMITS)
    print(table(lines))
    print(json.dumps(said))
    grown = [line.name for line in lines if line.grows]
    if given.json:
        whole = {
            "duration_s": given.duration_s, "run": said, "lines": [line.to_json() for line in lines],
            "samples": soak.series.to_json(),
        }  # fmt: skip
        given.json.write_text(json.dumps(whole) + "\n", encoding="utf-8")
    if given.picture:
        draw(soak.series, given.picture, f"{given.duration_s / 60:.0f} minutes of real time")
    print(f"{given.duration_s:g} s, grown: {', '.join(grown) or 'nothing'}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
