"""Families of tests whose code is the same: `make test` runs some of each, other ones each time, `make test-long` all.

    @pytest.mark.sampled(3)              # 3 of the cases of this test
    @pytest.mark.sampled(2, "kills")     # 2 of all tests with this name, in whatever file

Those that were not drawn get the mark `long`. All processes of a run draw the same: its first one sets the variable
SEED, and the run prints it at its end. With the variable a run takes the same tests again. Without `-m` it takes all,
and so does a run that names tests, by `-k` or by their files.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from secrets import randbelow
from typing import Any

import pytest

SEED = "SAMPLE_SEED"


def cases(values: Iterable[Any], *, kept: Collection[Any], num: int, slow: bool = True) -> list[Any]:
    """Return the cases of a parametrised test: those that every run has, and the others, of which `make test` draws
    `num`."""
    marks = [pytest.mark.sampled(num), *([pytest.mark.slow] if slow else [])]
    return [value if value in kept else pytest.param(value, marks=marks) for value in values]


def draw_seed() -> None:
    """Let this process and those that it starts have one seed."""
    os.environ.setdefault(SEED, str(randbelow(1 << 30)))


def mark_rest(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Mark as `long` what this run leaves out, or all of each family where a run is not to leave out the long ones."""
    draws = "not long" in config.option.markexpr
    if draws and names_tests(config):
        return
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    numbers: dict[str, int] = {}
    for item, mark in sampled(items):
        name = mark.args[1] if len(mark.args) > 1 else item.nodeid.partition("[")[0]
        families[name].append(item)
        numbers[name] = mark.args[0]
    for name, family in families.items():
        random = Random(f"{os.environ.get(SEED)}/{name}")
        drawn = random.sample(family, min(numbers[name], len(family))) if draws else []
        for item in set(family).difference(drawn):
            item.add_marker(pytest.mark.long)


def names_tests(config: pytest.Config) -> bool:
    """Return whether somebody asked for certain tests, and not for a folder of them."""
    files = (config.invocation_params.dir / word.partition("::")[0] for word in config.args)
    return bool(config.option.keyword) or any(map(Path.is_file, files))


def sampled(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Mark]]:
    """Return the tests that belong to a family and are not long anyway, with the mark that says so."""
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None and item.get_closest_marker("long") is None:
            yield item, mark
