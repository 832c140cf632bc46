"""python -m tests.simulation SEED | FROM:TO [--calm] [--keep-going]: simulated runs with faults, checked all along."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.simulation.grid import is_deterministic, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, or a range FROM:TO")
    parser.add_argument("--calm", action="store_true", help="nothing goes wrong")
    parser.add_argument("--keep-going", action="store_true", help="after a failing seed, too")
    parser.add_argument("--verbose", action="store_true", help="the roles' own logs, and the story of each seed")
    arguments = parser.parse_args()
    first, colon, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end) if colon else int(first) + 1)
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    else:
        logging.disable(logging.CRITICAL)
    failing, happened, num_ticks, began = [], Counter[str](), 0, time.perf_counter()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                simulation, laws = simulate(seed, Path(folder), calm=arguments.calm)
                if not arguments.calm and is_deterministic(simulation.config):
                    _, calm = simulate(seed, Path(folder) / "calm", calm=True)
                    compare(laws, calm)
            except Exception as error:
                failing.append(seed)
                traceback.print_exc() if arguments.verbose or not arguments.keep_going else print(
                    f"seed {seed}: {type(error).__name__}: {error}")
                if not arguments.keep_going:
                    break
            else:
                happened += simulation.plan.happened
                num_ticks += simulation.num_ticks
                if arguments.verbose:
                    print(simulation.to_text())
    took = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {num_ticks} ticks in {took:.1f} s ({60 * len(seeds) / took:.0f} seeds a minute); "
          f"{dict(sorted(happened.items()))}; failing: {failing or 'none'}")
    return 1 if failing else 0


def compare(laws, calm) -> None:
    """A run that was left alone has the same batches and the same weights, as far as both went."""
    one, other = laws.batches(), calm.batches()
    shorter = min(len(one), len(other))
    if laws.finished.reason == calm.finished.reason:
        assert one == other, "faults changed the batches"
        shorter = len(one)
    assert one[: shorter - 1] == other[: shorter - 1], "faults changed the batches"
    for version in range(shorter):
        if version in laws.digests and version in calm.digests:
            assert laws.digests[version] == calm.digests[version], f"faults changed the weights of version {version}"


if __name__ == "__main__":
    sys.exit(main())
