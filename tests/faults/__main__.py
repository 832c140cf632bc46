"""Whole runs with faults drawn from seeds: `make faults DURATION_S=1800 SEED=7 LOG=kafka LOAD=20`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.rig import Played, Rig, counted
from tests.faults.schedule import LARGE, Schedule, draw
from tests.load import LoadReport, busy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--log", choices=sorted(LARGE), default="embedded")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the next ones follow")
    parser.add_argument("--duration-s", type=float, default=600.0, help="after so long no schedule is begun")
    parser.add_argument("--secured", action="store_true", help="brokers with TLS and ACLs, an exporter beside each run")
    parser.add_argument("--schedules", type=int, help="at most so many")
    parser.add_argument("--short", action="store_true", help="those of `make test`: shorter runs, without agents")
    parser.add_argument("--jobs", type=int, default=3, help="so many at once")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="beside N processes that compute all the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of it, for scripts")
    parser.add_argument("--draw", action="store_true", help="print the schedules and play none")
    given = parser.parse_args()
    if given.secured and given.log != "kafka":
        parser.error("--secured is for --log kafka: the embedded log has no users")
    count = given.schedules or (1 if given.draw else sys.maxsize)
    schedules = (draw(given.log, seed, short=given.short) for seed in range(given.seed, given.seed + count))
    if given.draw:
        print(*schedules, sep="\n\n")
        return 0
    load = LoadReport()
    played = _play(schedules, given, load)
    summary = {**counted(played), "load": load.to_text()}
    if given.json:
        text = json.dumps({**summary, "played": [one.to_json() for one in played]}, indent=2)
        given.json.write_text(text + "\n", encoding="utf-8")
    for one in played:
        if one.error:
            print(f"\n{one.error}", file=sys.stderr)
    print(*(f"{count:5} {what}" for what, count in summary["happened"].items()), sep="\n")
    where = f"{given.log} with TLS, ACLs and exporters" if given.secured else given.log
    print(
        f"{summary['schedules']} schedules on {where}, {summary['records']:,} records, twins = {summary['twins']}, "
        f"lost = {summary['lost']}, failed: {summary['failed'] or 'none'}"
    )
    print(f"{given.load} busy processes beside them; {summary['load']}")
    return 1 if summary["failed"] else 0


def _play(schedules: Iterator[Schedule], given: argparse.Namespace, load: LoadReport) -> list[Played]:
    until = time.monotonic() + given.duration_s

    def tell(played: Played) -> None:
        load.look()
        state = "FAILED" if played.error else "fine"
        what = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in sorted(played.happened.items()))
        print(
            f"{played.schedule.seed}: {state}, {played.seconds:.0f} s, {played.num_records} records; {what}", flush=True
        )

    folder = Path(tempfile.mkdtemp(prefix="rftstream-faults-"))
    cluster = Cluster(folder / "kafka", secured=given.secured) if given.log == "kafka" else None
    with contextlib.ExitStack() as stack:
        if cluster is not None:
            stack.callback(cluster.stop)
        rig = Rig(folder, cluster)
        stack.enter_context(busy(given.load))
        return rig.play_all(schedules, jobs=given.jobs, until=until, tell=tell)


if __name__ == "__main__":
    sys.exit(main())
