"""Classes stay small enough to be read in one sitting, and rooms within their budget of code: read off the source."""

from __future__ import annotations

from collections import Counter

from tests.source import sources

MOST_METHODS = 20
"""Of a class of the package, nested ones included."""


def test_classes_are_small() -> None:
    large = {
        found.name: found.num_methods
        for source in sources("rftstream", "workers")
        for found in source.classes
        if found.name != "Config" and found.num_methods > MOST_METHODS
    }
    assert not large, f"more than {MOST_METHODS} methods; hand over to an object what is not the class's own: {large}"


STEP = 50
"""Budgets are multiples of it, so that a line more or less moves none."""
BUDGETS = {
    "api": 1_100,
    "algorithms": 2_150,
    "backends": 5_100,
    "commands": 3_550,
    "config": 2_450,
    "contracts": 2_500,
    "core": 1_250,
    "data": 4_750,
    "environments": 5_600,
    "gateway": 1_500,
    "http": 650,
    "integrations": 6_400,
    "joined": 900,
    "launch": 4_000,
    "models": 4_100,
    "policies": 5_050,
    "preflight": 4_800,
    "queries": 14_850,
    "replay": 950,
    "rewards": 8_800,
    "roles": 10_550,
    "runs": 2_900,
    "sandbox": 2_700,
    "service": 2_800,
    "studio": 3_350,
    "testing": 2_000,
    "top": 850,
    "trackers": 550,
    "transport": 4_700,
    "weights": 2_800,
}
"""Room -> most lines of code, without blank lines, comments and docstrings."""


def test_rooms_keep_to_their_budgets() -> None:
    found: Counter[str] = Counter()
    for source in sources("rftstream"):
        parts = source.module.split(".")
        found[parts[1] if len(parts) > 2 or (source.path.name == "__init__.py" and len(parts) > 1) else "top"] += (
            source.num_code_lines
        )
    needed = {room: -(-count // STEP) * STEP for room, count in sorted(found.items())}
    differing = {room: count for room, count in needed.items() if BUDGETS.get(room) != count}
    assert not differing, (
        f"tests/unit/test_sizes.py, BUDGETS: put in {differing}. The commit says what the lines of a room that grew "
        "have bought; a room that shrank loses them from its budget"
    )
    assert needed.keys() == BUDGETS.keys(), f"rooms that are gone: {BUDGETS.keys() - needed.keys()}"
