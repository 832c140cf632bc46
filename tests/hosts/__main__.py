"""Plays schedules of a run on several hosts of one machine, and a trainer on two of them; the superuser alone can.

python -m tests.hosts --seeds 0:20 --json hosts.json
python -m tests.hosts --kind ranks
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults.rig import Played, Rig, counted
from tests.faults.schedule import CALM
from tests.hosts.network import is_possible
from tests.hosts.ranks import go_on_without_a_host, train_on_two_hosts
from tests.hosts.rig import Hosts, made, to_text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="FIRST:END")
    parser.add_argument("--kind", choices=("all", "schedules", "ranks"), default="all")
    parser.add_argument("--json", type=Path, help="where the counts go")
    given = parser.parse_args()
    if not is_possible():
        parser.error("hosts with networks of their own need the superuser and /dev/net/tun")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(130))  # hosts are taken down
    played: list[Played] = []
    with tempfile.TemporaryDirectory(prefix="rftstream-hosts-") as folder, made(Path(folder, "hosts")) as hosts:
        if given.kind != "schedules":
            print(train_on_two_hosts(hosts, "ranks").to_text(), flush=True)
            print(go_on_without_a_host(hosts, "elastic").to_text(), flush=True)
        if given.kind != "ranks":
            played = _play(hosts, Path(folder, "calm"), range(*map(int, given.seeds.split(":"))))
    counts = counted(played)
    print(json.dumps(counts, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps({**counts, "played": [one.to_json() for one in played]}, indent=2))
    return 1 if counts["failed"] else 0


def _play(hosts: Hosts, folder: Path, seeds: range) -> list[Played]:
    """Play schedules until one fails."""
    calm = Rig(folder).calm_run(CALM).result()
    played: list[Played] = []
    for seed in seeds:
        played.append(hosts.play(seed, calm))
        print(to_text(played[-1]), flush=True)
        if played[-1].error is not None:
            print(played[-1].error)
            break
    return played


if __name__ == "__main__":
    raise SystemExit(main())
