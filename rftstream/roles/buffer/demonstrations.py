"""The order of demonstrations: a pure function of a cursor, the run's seed and the topic `experts`.

A pass goes through the demonstrations that existed when it began, in an order derived from the seed. Later ones wait
for the next pass. The cursor is part of the metadata of the buffer's positions, and is committed in the transaction
that holds the batch. So each demonstration is in a pass exactly once, even if processes are killed."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from rftstream.clock import Clock
from rftstream.config.sections import DemonstrationsSection
from rftstream.config.stages import Stage, Stages
from rftstream.contracts import codec
from rftstream.contracts.batches import Experience, LossKind
from rftstream.contracts.control import TasksEnded
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.ids import derive_seed, group_id
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.tasks import RolloutIds, Sampling
from rftstream.data.demonstrations.split import trained_numbers
from rftstream.data.demonstrations.tokens import Sides, kind_of, length_of, tokenise
from rftstream.data.tasksets.order import order
from rftstream.errors import ConfigError, ContractError
from rftstream.models.rendering import Renderer
from rftstream.roles.buffer import BUFFER
from rftstream.service.dead_letters import dead_letter
from rftstream.service.reading import read_places
from rftstream.service.role import Log, Publish
from rftstream.transport.base import Transport

log = logging.getLogger(__name__)

DEMONSTRATIONS = "experts"
"""Topic of demonstrations. In their ids it takes the place of the taskset: `experts/pass/number/0`."""


Place = tuple[TopicPartition, int]
"""Partition and offset."""
Letters = dict[Place, Publish]


@dataclass(slots=True)
class Walk:
    """Progress of the passes through the demonstrations of a kind."""

    begun: int = 0
    """Number of passes begun so far, with the current one."""
    size: int = 0
    """Number of demonstrations when the current pass began."""
    taken: int = 0
    """Number of demonstrations of the current pass that were taken."""


@dataclass(slots=True)
class Cursor:
    """Progress of all passes. In a run with stages, chats and pairs have separate passes, each over all numbers."""

    first: Walk = field(default_factory=Walk)
    total: int = 0
    """Number of demonstrations in batches so far."""
    pairs: Walk = field(default_factory=Walk)

    @property
    def begun(self) -> bool:
        """Whether any pass was begun."""
        return bool(self.first.begun or self.pairs.begun)

    def to_text(self) -> str:
        """Return the numbers in the form that the metadata holds."""
        walks = [self.first, self.pairs] if self.pairs.begun else [self.first]
        numbers = [number for walk in walks for number in (walk.begun, walk.size, walk.taken)]
        return " ".join(map(str, [*numbers[:3], self.total, *numbers[3:]]))

    @staticmethod
    def of(numbers: Sequence[int]) -> Cursor:
        """Return the cursor that `to_text` wrote; a new cursor if there are no numbers."""
        begun, size, taken, total, *pairs = numbers or (0, 0, 0, 0)
        return Cursor(Walk(begun, size, taken), total, Walk(*pairs))


@dataclass(frozen=True, slots=True)
class TokenizedDemonstration:
    """A demonstration with its tokens."""

    ids: RolloutIds
    demonstration: Demonstration
    sides: Sides

    def experiences(self, batch: int, share: int, position: int) -> list[Experience]:
        """Return the demonstration's experiences: one, or two for a pair."""
        return [
            Experience(
                ids=self.ids,
                batch_sequence=batch,
                share=share,
                position=position + place,
                loss_kind=kind_of(self.demonstration),
                segments=segments,
                reward=None,
                sampling=Sampling(),
                expert=True,
                pair=side,
                weight=self.demonstration.weight,
            )
            for place, (side, segments) in enumerate(self.sides.items())
        ]


@dataclass(eq=False)
class DemonstrationQueue:
    """The demonstrations of a run, in the order in which batches take them. `workers/buffer.py` makes it, and
    DemonstrationIntake calls it: `begin` at each recovery, `absorb` for each later record, and `take` for each batch.

    `kinds` are the loss kinds of all stages of the run. Demonstrations of other kinds cannot be used."""

    settings: DemonstrationsSection
    _: KW_ONLY
    seed: int
    passes: int | None
    kinds: frozenset[str]
    transport: Transport
    renderer: Renderer
    context: int | None
    clock: Clock
    cursor: Cursor = field(default_factory=Cursor, init=False)
    """State of the passes after the newest batch."""
    _offsets: list[array[int]] = field(default_factory=list, init=False)
    """Offsets of each partition's demonstrations, in order. With P partitions, number n is at index n div P of its
    partition."""
    _numbers_of: dict[int, np.ndarray] = field(default_factory=dict, init=False)
    """Number of demonstrations -> the numbers that are trained on."""
    _dead: set[Place] = field(default_factory=set, init=False)
    """Demonstrations that cannot be used and already have a dead letter."""

    def begin(self, log_: Log, cursor: Cursor) -> dict[TopicPartition, int]:
        """Read the demonstrations so far. Return the offsets from which reading continues."""
        self.cursor = cursor
        positions = log_.transport.admin.begin_offsets(DEMONSTRATIONS)
        self._offsets = [array("q") for _ in positions]
        self._numbers_of = {}
        self._dead = {
            (TopicPartition(DEMONSTRATIONS, int(partition)), int(offset))
            for record in log_.read("dead", bodies=False)
            for where, partition, offset in [(record.header("id") or b"//").decode().rsplit("/", 2)]
            if where == f"buffer/{DEMONSTRATIONS}"
        }
        for record in log_.read(DEMONSTRATIONS, bodies=False):
            self.absorb(record)
            positions[record.place] = record.offset + 1
        return positions

    def absorb(self, record: Record) -> None:
        """Add the next record. ContractError if numbers are missing, since writers number demonstrations without
        gaps."""
        if record.value is None and not record.headers:
            return
        if codec.is_foreign(record):
            log.error("%s: of no contract of this topic; passed over", record)
            return
        offsets, number = self._offsets[record.partition], (record.header("number") or b"0").decode()
        expected = len(offsets) * len(self._offsets) + record.partition
        if number != str(expected):
            raise ContractError(
                f"found demonstration {number}, expected {expected}; numbers are dense", where=str(record)
            )
        offsets.append(record.offset)

    @property
    def known(self) -> int:
        """Number of demonstrations read so far. Their numbers are 0 ... known - 1."""
        numbers = (len(offsets) * len(self._offsets) + place for place, offsets in enumerate(self._offsets))
        return min(numbers, default=0)

    def health(self) -> dict[str, object]:
        """Return how many demonstrations were read, were taken, and are dead."""
        passes = self.cursor.first.begun + self.cursor.pairs.begun
        return {
            "experts": self.known,
            "experts_taken": self.cursor.total,
            "experts_pass": passes,
            "experts_dead": len(self._dead),
        }

    def finished(self, walk: Walk, size: int | None = None) -> bool:
        """Whether all passes have ended. `size` is as for `take`."""
        full = walk.taken >= len(self._numbers(walk.size))
        last = self.passes is not None and walk.begun >= self.passes
        return full and (last or not len(self._numbers(self.known if size is None else size)))

    def take(
        self, count: int, size: int | None = None, kind: LossKind | None = None
    ) -> tuple[list[TokenizedDemonstration], list[Publish]]:
        """Return the next demonstrations, and dead letters for those that cannot be used. Fewer than `count` are
        returned when the passes end. `size` is the number of demonstrations in a new pass, by default all so far.
        `kind` is the kind to return; others are skipped, since another stage takes them."""
        taken: list[TokenizedDemonstration] = []
        letters: Letters = {}
        self._take(count, size, kind, taken, letters)
        self._dead |= letters.keys()
        return taken, list(letters.values())

    def _take(
        self, count: int, size: int | None, kind: LossKind | None, taken: list[TokenizedDemonstration], letters: Letters
    ) -> None:
        cursor, barren = self.cursor, False
        walk = cursor.pairs if kind is LossKind.dpo else cursor.first
        while len(taken) < count and not self.finished(walk, size):
            if walk.taken >= len(self._numbers(walk.size)):
                self._begin_pass(walk, self.known if size is None else size, letters, barren=barren, kind=kind)
                barren = True
                continue
            numbers = self._next_numbers(walk, count - len(taken))
            records = self._read([number for number in numbers if not self._is_dead(number, letters)])
            for number in numbers:
                found = self._open(walk, number, records[number], kind, letters) if number in records else None
                if found is not None:
                    taken.append(found)
                    cursor.total += 1
                    barren = False

    def _begin_pass(self, walk: Walk, size: int, letters: Letters, *, barren: bool, kind: LossKind | None) -> None:
        """Begin a pass. `barren` means that the previous pass gave nothing."""
        before, walk.begun, walk.size, walk.taken = walk.size, walk.begun + 1, size, 0
        if all(self._is_dead(int(number), letters) for number in self._numbers(size)):
            raise ConfigError(
                f"experts: none of {size:,} demonstrations can be used, expected some; the log of the buffer says why"
            )
        if barren:
            wanted = "pair" if kind is LossKind.dpo else "chat"
            raise ConfigError(
                f"experts: none of {before:,} demonstrations is a {wanted} that can be used, expected some for this "
                "stage; `rftstream experts load` brings some"
            )

    def _next_numbers(self, walk: Walk, count: int) -> list[int]:
        """Return up to `count` next numbers of this pass."""
        numbers = self._numbers(walk.size)
        end = min(walk.taken + count, len(numbers))
        places: Iterable[int] = range(walk.taken, end)
        walk.taken = end
        if self.settings.shuffle:
            places = map(order(len(numbers), walk.begun - 1, derive_seed(self.seed, "order", DEMONSTRATIONS)), places)
        return [int(numbers[place]) for place in places]

    def _numbers(self, size: int) -> np.ndarray:
        """Return those of the first `size` numbers that are trained on."""
        if size not in self._numbers_of:
            held = {walk.size for walk in (self.cursor.first, self.cursor.pairs)}
            self._numbers_of = {known: numbers for known, numbers in self._numbers_of.items() if known in held}
            self._numbers_of[size] = trained_numbers(size, self.settings.held_out)
        return self._numbers_of[size]

    def _place(self, number: int) -> Place:
        rank, partition = divmod(number, len(self._offsets))
        return TopicPartition(DEMONSTRATIONS, partition), self._offsets[partition][rank]

    def _is_dead(self, number: int, letters: Letters) -> bool:
        return (place := self._place(number)) in self._dead or place in letters

    def _read(self, numbers: Sequence[int]) -> dict[int, Record]:
        """Return the records of these demonstrations, by number."""
        places = {self._place(number): number for number in numbers}
        records = read_places(self.transport, places)
        if missing := sorted(places.keys() - records.keys()):
            partition, offset = missing[0]
            raise ContractError(
                "is gone from the log, expected all demonstrations to stay", where=f"{partition}@{offset}"
            )
        return {places[place]: record for place, record in records.items()}

    def _open(
        self, walk: Walk, number: int, record: Record, wanted: LossKind | None, letters: Letters
    ) -> TokenizedDemonstration | None:
        try:
            demonstration = codec.from_record(record)
            assert isinstance(demonstration, Demonstration)
            kind = kind_of(demonstration)
            if wanted is not None and kind is not wanted and kind in self.kinds:
                return None
            sides = self._tokens(demonstration, kind)
        except (ContractError, ConfigError) as error:
            log.error("%s: %s; message sent to dead", record, error)
            reason = "undecodable" if isinstance(error, ContractError) else "unusable"
            letters[self._place(number)] = dead_letter(
                record, role=BUFFER.name, reason=reason, detail=str(error), tries=1, now=self.clock.now()
            )
            return None
        return TokenizedDemonstration(ids_of(walk.begun - 1, number, self.cursor.total), demonstration, sides)

    def _tokens(self, demonstration: Demonstration, kind: LossKind) -> Sides:
        if kind not in self.kinds:
            raise ConfigError(f"{'a pair' if kind is LossKind.dpo else 'a chat'}, which the algorithm does not take")
        sides = tokenise(demonstration, self.renderer)
        if self.context is not None and length_of(sides) > self.context:
            raise ConfigError(f"{length_of(sides):,} tokens, expected at most the context of {self.context:,}")
        return sides


def ids_of(number_of_pass: int, number: int, sequence: int) -> RolloutIds:
    """Return the ids of a demonstration in a pass. `sequence` is the number of demonstrations in earlier batches."""
    group = group_id(DEMONSTRATIONS, number_of_pass, number, 0)
    return RolloutIds.of(group, taskset=DEMONSTRATIONS, sequence=sequence)


def spread(taken: Sequence[TokenizedDemonstration], shares: int) -> list[list[TokenizedDemonstration]]:
    """Spread demonstrations over the shares, in order and as evenly as can be."""
    parts: list[list[TokenizedDemonstration]] = [[] for _ in range(shares)]
    for index, demonstration in enumerate(taken):
        parts[index * shares // len(taken)].append(demonstration)
    return parts


# ------------------------------------------------------------------------------------------
#
# The demonstrations in batches: their number, and whether a batch has to wait for some.


class DemonstrationIntake:
    """The demonstrations that go into batches. The step makes it once, and calls `begin` at each recovery and `absorb`
    for each record of `experts`. Before a batch with rollouts the step asks `waits`, and before a batch without
    rollouts `allows_batch`. Then it calls `take`. In a run without demonstrations no batch waits, and `take` returns
    none."""

    def __init__(self, queue: DemonstrationQueue | None, stages: Stages, group_size: int) -> None:
        self._queue = queue
        self._stages = stages
        self._group_size = group_size
        self._kept = Cursor()
        """State of the passes at the recovery."""
        self._said_waiting = False

    def begin(self, log_: Log, kept: Cursor) -> dict[TopicPartition, int]:
        """Start from a committed cursor. Return the offsets from which demonstrations are read."""
        self._kept = kept
        return {} if self._queue is None else self._queue.begin(log_, kept)

    def absorb(self, record: Record) -> None:
        """Add a record of the topic. An undecodable record gets its dead letter when its turn comes."""
        if self._queue is not None:
            self._queue.absorb(record)

    @property
    def cursor(self) -> Cursor:
        """Cursor of the passes. A run that takes no demonstrations any more keeps the cursor, since it may take some
        again."""
        return self._kept if self._queue is None else self._queue.cursor

    def allows_batch(
        self, batch: int, stage: Stage, *, version: int, max_staleness: int, ended: TasksEnded | None
    ) -> bool:
        """Whether this batch of demonstrations alone may be made now. There must be as many demonstrations as the
        stages demand, or as the feeder has counted (`ended`). And the batch must be no further ahead of the trainer's
        `version` than a batch of rollouts may be."""
        if batch > version + max_staleness:
            return False
        if self._stages.named:
            return batch < (self._stages.steps or 0) and not self.waits(stage)
        if ended is None or batch >= (ended.batches or 0):
            return False
        return self._queue is not None and self._queue.known >= ended.experts

    def lacks(self, stage: Stage) -> bool:
        """Whether a batch of the stage needs demonstrations and there are none."""
        return self._queue is not None and self._takes(stage) and not self._queue.known

    def waits(self, stage: Stage) -> bool:
        """Whether a batch of the stage has to wait for demonstrations. The first wait is logged."""
        if not self.lacks(stage):
            return False
        if not self._said_waiting:
            log.warning("waits for demonstrations, there are none yet; `rftstream experts load` brings some")
        self._said_waiting = True
        return True

    def take(
        self, stage: Stage, num_groups: int, num_demonstrations: int | None
    ) -> tuple[list[TokenizedDemonstration], list[Publish]]:
        """Return the demonstrations of a batch of the stage, and dead letters for those that could not be used.
        `num_demonstrations` is the feeder's count in a run of demonstrations alone."""
        if self._queue is None or not self._takes(stage):
            return [], []
        size = None
        if stage.takes_rollouts:
            count = math.ceil(stage.demonstration_ratio * num_groups * self._group_size)
        else:
            count = stage.demonstrations_per_batch
            if not self._stages.named:
                size = num_demonstrations
        return self._queue.take(count, size, stage.kind)

    def health(self) -> Mapping[str, object]:
        """Return the values that the queue reports."""
        return {} if self._queue is None else self._queue.health()

    def _takes(self, stage: Stage) -> bool:
        return not self._stages.named or stage.kind is not None
