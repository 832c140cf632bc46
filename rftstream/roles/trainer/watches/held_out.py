"""Measures the policy on demonstrations that are never trained on."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.base import on_device
from rftstream.config.sections import DemonstrationsSection
from rftstream.config.stages import Stage
from rftstream.contracts import codec
from rftstream.contracts.batches import Experience
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.records import Record, TopicPartition
from rftstream.data.demonstrations.split import held_out_numbers
from rftstream.data.demonstrations.tokens import tokenise
from rftstream.errors import ConfigError, ContractError
from rftstream.models.rendering import Renderer
from rftstream.roles.buffer.demonstrations import DEMONSTRATIONS, TokenizedDemonstration, ids_of
from rftstream.roles.trainer.training import Training
from rftstream.service.reading import read_places
from rftstream.service.role import Log

log = logging.getLogger(__name__)


class HeldOut:
    """The held-out demonstrations of a run, as they are when a trainer starts. `workers/trainer.py` makes it. The step
    calls `begin` at each recovery, and `look` after each version that is `due`."""

    def __init__(self, settings: DemonstrationsSection, *, renderer: Renderer, training: Training) -> None:
        """ConfigError if the algorithm (of any stage) or the backend cannot measure them."""
        algorithms = training.algorithms or (training.algorithm,)
        if not any(hasattr(algorithm, "held_out") for algorithm in algorithms) or not hasattr(
            training.backend, "logprobs"
        ):
            raise ConfigError(
                "experts.held_out: the algorithm has no `held_out`, or the backend no `logprobs`, expected both; "
                "set it to 0"
            )
        self._settings, self._renderer, self._training = settings, renderer, training
        self._experiences: list[Experience] = []
        self._rows: Sequence[TrainingRow] = ()
        self._rows_of: int | None = None
        """The stage for which the rows were made."""
        self._reference: list[np.ndarray] | None = None
        self._offsets: dict[int, tuple[TopicPartition, int]] = {}
        """Number of a demonstration -> its place, while demonstrations are chosen."""

    def begin(self, log_: Log) -> None:
        """Read the demonstrations."""
        numbers = [int(number) for number in held_out_numbers(self._count(log_), self._settings.held_out)]
        self._experiences, self._rows_of = list(self._choose(log_, numbers)), None
        self._offsets.clear()
        if not self._experiences:
            log.warning("experts.held_out: there are too few demonstrations to hold any out")

    def due(self, stage: Stage, version: int, *, last: bool) -> bool:
        """Whether this version, made by the stage, is to be measured."""
        algorithm = self._training.at(stage).algorithm
        if not self._experiences or not hasattr(algorithm, "held_out"):
            return False
        return last or version == stage.end or version % self._settings.held_out_every == 0

    def look(self, stage: Stage) -> dict[str, float]:
        """Return metrics of the current policy, by the algorithm of the stage."""
        training = self._training.at(stage)
        algorithm, backend, budget = training.algorithm, training.backend, training.settings.tokens_per_microbatch
        if self._rows_of != stage.number:
            self._rows, self._rows_of, self._reference = algorithm.prepare(self._experiences)[0], stage.number, None
        if not self._rows:
            return {}
        stays = training.settings.reference_every is None
        with on_device(backend):
            if "reference_logprobs" in algorithm.needs and not (self._reference and stays):
                self._reference = backend.reference_logprobs(self._rows, budget)
            logprobs = backend.logprobs(self._rows, budget)
        found: dict[str, float] = algorithm.held_out(self._rows, logprobs, self._reference)  # type: ignore[attr-defined]  # `due` looks for it
        return found

    def _choose(self, log_: Log, numbers: Sequence[int]) -> Iterator[Experience]:
        """Yield the first demonstrations. In a run with stages these are some of each kind, chats and pairs."""
        most, counts = self._settings.held_out_most, Counter[str]()
        if not self._training.algorithms:
            numbers = numbers[:most]
        for begin in range(0, len(numbers), most):
            for number, record in self._records(log_, numbers[begin : begin + most]):
                if (sides := self._experiences_of(number, record)) and counts[sides[0].loss_kind] < most:
                    counts[sides[0].loss_kind] += 1
                    yield from sides
            if len(counts) > 1 and min(counts.values()) >= most:
                return

    def _count(self, log_: Log) -> int:
        """Store the place of each demonstration. Return their number."""
        for record in log_.read(DEMONSTRATIONS, bodies=False):
            if not codec.is_foreign(record) and (number := record.number("number")) is not None:
                self._offsets[number] = record.place, record.offset
        return next(number for number in itertools.count() if number not in self._offsets)

    def _records(self, log_: Log, numbers: Sequence[int]) -> list[tuple[int, Record]]:
        records = read_places(log_.transport, [self._offsets[number] for number in numbers])
        there = ((number, records.get(self._offsets[number])) for number in sorted(numbers))
        return [(number, record) for number, record in there if record is not None]

    def _experiences_of(self, number: int, record: Record) -> list[Experience]:
        """Return the experiences of a demonstration; an empty list if it cannot be used."""
        try:
            demonstration = codec.from_record(record)
            assert isinstance(demonstration, Demonstration)
            sides = tokenise(demonstration, self._renderer)
        except (ContractError, ConfigError) as error:
            log.warning("%s: held out, and of no use: %s", record, error)
            return []
        return TokenizedDemonstration(ids_of(0, number, 0), demonstration, sides).experiences(0, 0, 0)
