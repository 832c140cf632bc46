"""Simulated runs with faults, drawn from seeds and checked all along: `python -m tests.simulation 0:500`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from rftstream.testing import Simulation
from tests.simulation.grid import check_seed, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, or FROM:TO")
    parser.add_argument("--calm", action="store_true", help="the same runs with nothing going wrong")
    parser.add_argument("--keep-going", action="store_true", help="after a failing seed, too")
    parser.add_argument("--verbose", action="store_true", help="with the story of each seed, and what the roles log")
    arguments = parser.parse_args()
    first, colon, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end) if colon else int(first) + 1)
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    else:
        logging.disable(logging.CRITICAL)
    failing: list[int] = []
    happened: Counter[str] = Counter()
    num_ticks = num_done = 0
    began = time.perf_counter()
    for seed in seeds:
        try:
            simulation = _run(seed, calm=arguments.calm)
        except Exception as error:
            failing.append(seed)
            if arguments.keep_going:
                print(f"seed {seed}: {type(error).__name__}: {error}".partition("\n")[0], flush=True)
                continue
            traceback.print_exc()
            break
        num_done += 1
        num_ticks += simulation.num_ticks
        happened += simulation.plan.happened
        if arguments.verbose:
            print(simulation.to_text(), flush=True)
    took = time.perf_counter() - began
    print(
        f"{num_done} of {len(seeds)} seeds fine, {num_ticks} ticks in {took:.1f} s, {60 * num_done / took:.0f} seeds "
        f"a minute; {dict(sorted(happened.items()))}; failing: {failing or 'none'}"
    )
    return 1 if failing else 0


def _run(seed: int, *, calm: bool) -> Simulation:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(seed, Path(folder), calm=True)[0] if calm else check_seed(seed, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
