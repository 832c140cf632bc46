"""The simulation notices when a rule is left out; `make test-long`, `python -m tests.simulation.mutants`: each one.

`make test` has a mutant of each law, another one each time."""

from __future__ import annotations

import os
from pathlib import Path
from random import SystemRandom

import pytest

from tests.simulation import rank_mutants
from tests.simulation.grid import check_seed
from tests.simulation.mutants import MAX_TICKS, MUTANTS, SINGLES, STRANGERS, TRAINERS, WORKERS, caught

KNOWN = {
    "positions-before-records": 1, "read-uncommitted": 9, "epochs-ignored": 0, "partition-of-the-rollout": 0,
    "ids-drawn": 4, "filtered-held": 1, "pieces-left": 0, "nothing-durable": 2, "pieces-of-anybody": 1,
    "summary-late": 0, "passes-forgotten": 12, "half-decided-kept": 8, "stages-ignored": 1, "deletions-given-up": 8,
    "strangers-believed": 0, "chain-not-asked": 1, "answered-before-commit": 0, "retries-sampled-again": 0,
    "any-answer-replayed": 0, "answer-made-again": 0, "any-key-accepted": 0,
    "older-revisions-counted": 0, "judged-again": 11, "votes-forgotten": 1, "asked-again": 0, "nobody-waits": 0,
    "bodies-as-scored": 2, "flags-ignored": 13, "history-changes": 1, "gold-judged": 1,
    "uses-untold": 2, "uses-forgotten": 55, "uses-counted-as-new": 4, "luck-of-the-clock": 5,
    "bodies-without-operators": 4, "any-age": 24, "reusable-deleted": 4,
    "facts-past-seen": 35, "skips-counted-twice": 1, "late-ones-unseen": 20, "seeds-of-the-clock": 0,
    "checkpoint-of-the-next": 4, "unscorable-as-zero": 1, "stale-tasks": 1, "values-of-neighbours": 2,
    "siblings-apart": 2, "minority-judged": 27, "failed-passed-on": 2, "refused-positions-kept": 3,
    "claims-volatile": 0, "held-before-whole": 10, "parts-left": 1, "any-beginning-kept": 2,
}  # fmt: skip
"""The seed that catches it, where that takes seconds. Any change of what is drawn or of when something happens may move
it: then others are tried, which takes longer."""
MORE_SEEDS = 80

NOT_FOR_LOOPS = {
    "values-of-neighbours": "a loop of a user hands in no values beside its tokens",
    **dict.fromkeys(rank_mutants.RULES, "a loop of a user has no ranks"),
}

LATE_WITH_LOOPS = ("passes-forgotten", "late-ones-unseen", "uses-forgotten")
"""With loops these take more seeds, which `make test-long` plays."""

KNOWN_WITH_LOOPS = {
    **{name: seed for name, seed in KNOWN.items() if name not in (*NOT_FOR_LOOPS, *LATE_WITH_LOOPS)},
    "refused-work-dropped": 0, "unstable-positions": 3, "lost-work-published": 1, "pieces-left": 1,
    "pieces-read-too-early": 2, "pieces-saved-again": 1, "claim-read-before-start": 2, "claims-hidden": 7,
    "chains-broken": 12, "nothing-durable": 5, "pieces-of-anybody": 31, "checkpoint-of-the-next": 26,
    "checkpoint-without-positions": 6, "one-person-a-quorum": 0, "expiry-ignored": 0,
}  # fmt: skip
"""The same in runs with loops of users in the places of samplers and trainer."""

CHOICES = {
    law: [
        (name, joined)
        for joined, known in ((False, KNOWN), (True, KNOWN_WITH_LOOPS))
        for name in known
        if MUTANTS[name].law == law
    ]
    for law in {one.law for one in MUTANTS.values()}
}


@pytest.mark.heavy("a seed that has moved is looked for")
@pytest.mark.parametrize("law", sorted(CHOICES))
def test_a_rule_left_out_is_noticed(law: str) -> None:
    """`MUTANT=name` chooses it, and `MUTANT=name+loops` in runs with loops of users."""
    name, _, loops = os.environ.get("MUTANT", "").partition("+")
    choice = name, bool(loops)
    if choice not in CHOICES[law]:
        choice = SystemRandom().choice(CHOICES[law])
    name, joined = choice
    print(f"again: MUTANT={name}{'+loops' if joined else ''}")
    known = (KNOWN_WITH_LOOPS if joined else KNOWN)[name]
    assert caught(MUTANTS[name], [known, *range(MORE_SEEDS)], joined=joined)


def test_with_all_rules_nothing_is_noticed(tmp_path: Path) -> None:
    """The faults by which some of them are caught break no law by themselves."""
    for number, faults in enumerate((WORKERS, SINGLES, TRAINERS, STRANGERS)):
        check_seed(7, tmp_path / f"{number}", faults=faults, max_ticks=MAX_TICKS)


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_every_rule_left_out_is_noticed(name: str) -> None:
    first = [KNOWN[name]] if name in KNOWN else []
    assert caught(MUTANTS[name], [*first, *range(600)])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in NOT_FOR_LOOPS])
def test_every_rule_left_out_is_noticed_with_loops_of_users(name: str) -> None:
    first = [KNOWN_WITH_LOOPS[name]] if name in KNOWN_WITH_LOOPS else []
    assert caught(MUTANTS[name], [*first, *range(600)], joined=True)
