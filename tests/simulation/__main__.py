"""Simulated runs with faults, drawn from seeds and checked all along: `make simulate SEEDS=0:2000`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from functools import partial

from tests.simulation.played import play, prepare

TOLD_EVERY_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, or FROM:TO")
    parser.add_argument("--calm", action="store_true", help="the same runs with nothing going wrong")
    parser.add_argument("--pipelines", action="store_true", help="the same runs with operators of data pipelines")
    parser.add_argument("--joined", action="store_true", help="the same runs with loops of users (rftstream.join)")
    parser.add_argument("--compared", action="store_true", help="the same runs with a reward that compares siblings")
    parser.add_argument("--ranks", action="store_true", help="the same runs with versions in parts, one of each rank")
    parser.add_argument("--keep-going", action="store_true", help="after a failing seed, too")
    parser.add_argument("--verbose", action="store_true", help="with the story of each seed, and what the roles log")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play them")
    arguments = parser.parse_args()
    first, colon, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end) if colon else int(first) + 1)
    kinds = {name: getattr(arguments, name) for name in ("calm", "verbose", "pipelines", "joined", "compared", "ranks")}
    one = partial(play, **kinds)
    failing: list[int] = []
    happened: Counter[str] = Counter()
    num_ticks = num_done = 0
    began = told = time.perf_counter()

    def so_far() -> str:
        took = time.perf_counter() - began
        return (
            f"{num_done} of {len(seeds)} seeds fine, {num_ticks} ticks in {took:.1f} s, {60 * num_done / took:.0f} "
            f"seeds a minute; failing: {failing or 'none'}"
        )

    with multiprocessing.get_context("spawn").Pool(
        arguments.jobs, initializer=prepare, initargs=(arguments.verbose,)
    ) as pool:
        for played in pool.imap_unordered(one, seeds):
            if played.error:
                failing.append(played.seed)
                print(played.error, file=sys.stderr, flush=True)
                if not arguments.keep_going:
                    break
            else:
                num_done += 1
            num_ticks += played.num_ticks
            happened += played.happened
            if arguments.verbose:
                print(played.story, flush=True)
            if time.perf_counter() - told > TOLD_EVERY_S:
                told = time.perf_counter()
                print(so_far(), file=sys.stderr, flush=True)
    print(f"{so_far()}; {dict(sorted(happened.items()))}")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
