"""Ten moments at which workers of a run are killed, drawn by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from tests.e2e.workplace import RunView

TOPICS = ("tasks", "rollouts", "verified", "outcomes", "steps")


def moments(
    view: RunView, wait: Callable[[Callable[[], bool], str], object], victims: Sequence[str], seed: str
) -> Iterator[str]:
    """Yield ten times who is to be killed now, when a topic of the run has got some more records. All are killed as
    often as others, or once more."""
    random = Random(seed)
    drawn = ([*victims] * 10)[:10]
    random.shuffle(drawn)
    for victim in drawn:
        goes_on(view, wait, random.choice(TOPICS), random.randint(1, 12))
        yield victim


def goes_on(
    view: RunView, wait: Callable[[Callable[[], bool], str], object], topic: str = "steps", number: int = 3
) -> None:
    """Wait for so many more records of a topic."""

    def count() -> int:
        return sum(view.transport.admin.end_offsets(topic).values())

    wanted = count() + number
    wait(lambda: count() >= wanted, f"{number} records of {topic}")
