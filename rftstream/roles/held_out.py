"""How well the policy does on demonstrations that are never trained on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np

from rftstream import codec
from rftstream.algorithms.base import TrainingRow
from rftstream.errors import ConfigError, ContractError
from rftstream.experts.split import held_out_numbers
from rftstream.experts.tokens import tokenise
from rftstream.messages import Demonstration, Experience
from rftstream.rendering import Renderer
from rftstream.roles.demonstrations import EXPERTS, Taken, ids_of
from rftstream.roles.training import Training
from rftstream.runtime.role import Log, read_records
from rftstream.sections import ExpertsSection
from rftstream.transport.base import Record, TopicPartition

log = logging.getLogger(__name__)


class HeldOut:
    """Those of a run, as they are when a trainer starts."""

    def __init__(self, settings: ExpertsSection, *, renderer: Renderer, training: Training) -> None:
        """ConfigError if the algorithm or the backend has no measure for them."""
        if not hasattr(training.algorithm, "held_out") or not hasattr(training.backend, "logprobs"):
            raise ConfigError(
                "experts.held_out: the algorithm has no `held_out`, or the backend no `logprobs`, expected both; "
                "set it to 0"
            )
        self._settings, self._renderer, self._training = settings, renderer, training
        self._rows: Sequence[TrainingRow] = ()
        self._reference: list[np.ndarray] | None = None

    def begin(self, log_: Log) -> None:
        """Reads them."""
        wanted = {int(number) for number in held_out_numbers(self._count(log_), self._settings.held_out)}
        chosen = sorted(wanted)[: self._settings.held_out_most]
        experiences = [
            one for number, record in self._records(log_, chosen) for one in self._experiences(number, record)
        ]
        self._rows = self._training.algorithm.prepare(experiences)[0]
        self._reference = None
        if not self._rows:
            log.warning("experts.held_out: there are too few demonstrations to hold any out")

    def due(self, version: int, *, last: bool) -> bool:
        return bool(self._rows) and (last or version % self._settings.held_out_every == 0)

    def look(self) -> dict[str, float]:
        """Metrics of the policy as it is now."""
        backend, budget = self._training.backend, self._training.settings.tokens_per_microbatch
        if "reference_logprobs" in self._training.algorithm.needs and self._reference is None:
            self._reference = backend.reference_logprobs(self._rows, budget)
        logprobs = backend.logprobs(self._rows, budget)
        found: dict[str, float] = self._training.algorithm.held_out(self._rows, logprobs, self._reference)  # type: ignore[attr-defined]  # __init__ looks for it
        return found

    def _count(self, log_: Log) -> int:
        self._offsets: dict[int, tuple[TopicPartition, int]] = {}
        for record in log_.read(EXPERTS, bodies=False):
            if not codec.is_foreign(record):
                self._offsets[int(record.header("number") or 0)] = record.place, record.offset
        return next(number for number in itertools.count() if number not in self._offsets)

    def _records(self, log_: Log, numbers: Sequence[int]) -> list[tuple[int, Record]]:
        places: dict[TopicPartition, dict[int, int]] = {}
        for number in numbers:
            place, offset = self._offsets[number]
            places.setdefault(place, {})[offset] = number
        self._offsets = {}
        found = [
            (numbers_of[offset], record)
            for place, numbers_of in places.items()
            for offset, record in read_records(log_.transport, place, numbers_of).items()
        ]
        return sorted(found, key=lambda one: one[0])

    def _experiences(self, number: int, record: Record) -> list[Experience]:
        """None of what cannot be used; the buffer says so of those that are trained on."""
        try:
            demonstration = codec.from_record(record)
            assert isinstance(demonstration, Demonstration)
            sides = tokenise(demonstration, self._renderer)
        except (ContractError, ConfigError) as error:
            log.warning("%s: held out, and of no use: %s", record, error)
            return []
        return Taken(ids_of(0, number, 0), demonstration, sides).experiences(0, 0, 0)
