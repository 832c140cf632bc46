"""Word problems of one step, as an example of a taskset of one's own: `Mia has 5 pears and buys 3 more. ...` gives 8.

Each problem is a story with two numbers. Stories that are held out have pairs of numbers that no other story of their
kind has, so what is answered rightly there was not learned by heart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.errors import ConfigError

NAMES = ("Mia", "Tom", "Amara", "Jonas", "Priya", "Diego", "Lena", "Kofi", "Yuki", "Sara", "Omar", "Ines")
THINGS = ("apples", "marbles", "stickers", "pencils", "shells", "coins", "books", "cookies", "stamps", "beads")
STORIES = (
    (+1, "{name} has {a} {things}. A friend gives {name} {b} more. How many {things} does {name} have now?"),
    (+1, "There are {a} {things} on the table and {b} on the floor. How many {things} are there altogether?"),
    (-1, "{name} has {a} {things}. {name} gives {b} of them away. How many {things} are left?"),
    (-1, "There were {a} {things} in a box. {name} took {b} of them. How many {things} are still in the box?"),
)
"""The sign of the second number, and the text."""


class WordProblems(GeneratedTaskset):
    """Stories in which something is added or taken away."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        size: Annotated[int, Meta(ge=1)] = 2000
        """Problems in one pass."""
        largest: Annotated[int, Meta(ge=2)] = 9
        """Largest number in a story."""
        held_out: bool = False
        """Whether these are the stories that are held out: a fifth of all pairs of numbers."""
        seed: Annotated[int, Meta(ge=0)] = 0
        """Seed of names, things and order."""
        template: str = "Question: {story}\nAnswer:"
        """The prompt; {story} is the story with its question."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if columns:
            raise ConfigError(f"columns: got {', '.join(columns)}, expected none; these stories are made up")
        self._config = config
        self._cases = [case for case in _cases(config.largest) if _is_held_out(*case) == config.held_out]
        decided_by = ["word_problems", 1, asdict(config), system]
        super().__init__("word_problems", size=config.size, system=system, decided_by=decided_by)

    def make_problem(self, index: int) -> Problem:
        """Return the story with this index, which alone decides what is drawn."""
        draw = Random(derive_seed(self._config.seed, "word_problems", index))
        kind, a, b = draw.choice(self._cases)
        sign, text = STORIES[kind]
        story = text.format(name=draw.choice(NAMES), things=draw.choice(THINGS), a=a, b=b)
        prompt = self._config.template.replace("{story}", story)
        return Problem(messages=self.messages(prompt), answer=str(a + sign * b), data_source="word_problems")


def last_number(completion: str, answer: str) -> float:
    """1 where the last number of the completion is the answer: `8` and `5 + 3 = 8` are as good."""
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [answer])


def _cases(largest: int) -> list[tuple[int, int, int]]:
    """Return each kind of story with each pair of numbers that it can have; nobody gives away more than there is."""
    numbers = range(1, largest + 1)
    return [
        (kind, a, b) for kind, (sign, _) in enumerate(STORIES) for a in numbers for b in numbers if sign > 0 or b < a
    ]


def _is_held_out(kind: int, a: int, b: int) -> bool:
    return Random(derive_seed(0, "held_out", kind, a, b)).random() < 0.2
