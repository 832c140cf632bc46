"""Generated arithmetic: `3+4=` with the answer `7`. Its purpose is to see a run learn within a minute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rftstream.contracts.ids import derive_seed
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.data.tasksets.order import shuffle_index
from rftstream.errors import ConfigError

DEFAULT_SIZE = 10_000


class ArithmeticTaskset(GeneratedTaskset):
    """Sums of terms: all combinations in shuffled order, so that the `skip` + `size` problems are all different."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        operation: Literal["+", "-", "*"] = "+"
        """Operation on the numbers."""
        low: Annotated[int, Meta(ge=0)] = 0
        """Smallest term."""
        high: Annotated[int, Meta(ge=0)] = 9
        """Largest term."""
        terms: Annotated[int, Meta(ge=2)] = 2
        """Number of terms in a problem."""
        size: Annotated[int, Meta(ge=1)] | None = None
        """Number of problems in one pass; default: all, at most 10,000."""
        skip: Annotated[int, Meta(ge=0)] = 0
        """Number of first problems that are left out: `size = 80` here and `skip = 80` there have no problem in
        common."""
        seed: Annotated[int, Meta(ge=0)] = 0
        """Seed of the order."""
        template: str = "{problem}="
        """The prompt; {problem} is for example 3+4."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        if location or columns:
            raise ConfigError('arithmetic: takes neither a location nor columns; write source = "arithmetic"')
        if config.high < config.low:
            raise ConfigError(f"arithmetic: high = {config.high}, expected at least low = {config.low}")
        if "{problem}" not in config.template:
            raise ConfigError(f"arithmetic: template {config.template!r}, expected a text with {{problem}} in it")
        self._config = config
        self._width = config.high - config.low + 1
        self._all = self._width**config.terms
        size = config.size or min(DEFAULT_SIZE, self._all - config.skip)
        if size < 1 or config.skip + size > self._all:
            raise ConfigError(
                f"arithmetic: skip + size = {config.skip + size}, but there are only {self._all} problems with "
                f"{config.terms} terms of {config.low}..{config.high}; widen the range or lower size"
            )
        decided_by = ["arithmetic", 1, asdict(config), system]
        super().__init__("arithmetic", size=size, system=system, decided_by=decided_by)
        self._order_seed = derive_seed(config.seed, "arithmetic", config.low, config.high, config.terms)

    def make_problem(self, index: int) -> Problem:
        """Return the problem with this index."""
        terms = self._terms(shuffle_index(self._config.skip + index, self._all, seed=self._order_seed))
        prompt = self._config.template.replace("{problem}", self._config.operation.join(map(str, terms)))
        answer = str(self._result(terms))
        return Problem(messages=self.messages(prompt), answer=answer, data_source="arithmetic")

    def _terms(self, number: int) -> list[int]:
        terms = []
        for _ in range(self._config.terms):
            number, digit = divmod(number, self._width)
            terms.append(self._config.low + digit)
        return terms

    def _result(self, terms: list[int]) -> int:
        if self._config.operation == "+":
            return sum(terms)
        if self._config.operation == "*":
            return math.prod(terms)
        return terms[0] - sum(terms[1:])
