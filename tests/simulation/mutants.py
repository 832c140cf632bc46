"""Rules left out one at a time: does the simulation notice? `python -m tests.simulation.mutants [NAME...]`

Each mutant changes one rule while the program runs; then seeds are run until a law fails. A mutant that survives says
that the laws, or the model of the log, are blind to its rule.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

from rftstream.config.stages import Stages
from rftstream.contracts import ids
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.summaries import Summary
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import StepRecord
from rftstream.errors import AssignmentLost, RftError
from rftstream.rewards.base import Score, ScoreReply
from rftstream.roles.buffer.demonstrations import Cursor, DemonstrationQueue
from rftstream.roles.buffer.step import BufferStep
from rftstream.roles.explorer import step as explorer_module
from rftstream.roles.feeder import draws as draws_module
from rftstream.roles.feeder.admission import Admission, VersionInForce
from rftstream.roles.feeder.step import FeederStep
from rftstream.roles.trainer.assembly import CommittedBatches
from rftstream.roles.verifier.step import VerifierStep
from rftstream.service.loops.concurrent import ConcurrentService
from rftstream.service.loops.owned_partitions import OwnedPartitions
from rftstream.service.loops.results import SavedRecords
from rftstream.service.loops.single import SingleService
from rftstream.service.loops.single_reader import SingleReader
from rftstream.service.records import summaries
from rftstream.service.records.in_force import RecordsInForce
from rftstream.service.role import Log, SingleTransaction
from rftstream.service.role_claim import RoleClaim
from rftstream.testing import Faults
from rftstream.testing.faults import AFTER_COMMIT, BEFORE_COMMIT, BETWEEN, FaultScript
from rftstream.transport.base import Position, Snapshot
from rftstream.transport.cursors import PartitionBatch
from rftstream.transport.memory import clients
from rftstream.transport.memory.clients import MemoryMember, MemoryProducer
from rftstream.transport.memory.log import MemoryTransaction
from rftstream.transport.memory.transactions import Coordinator
from rftstream.transport.memory.transport import MemoryAdmin, MemoryTransport
from rftstream.weights.lineage import Lineage
from tests.simulation import (
    agent_mutants,
    group_mutants,
    people_mutants,
    piece_mutants,
    pipeline_mutants,
    rank_mutants,
    reuse_mutants,
)
from tests.simulation import (
    trainer_mutants as trainers,
)
from tests.simulation.agent_runs import play_agents
from tests.simulation.annotators import play_people
from tests.simulation.changes import Change, around, instead, together
from tests.simulation.grid import check_seed

MAX_TICKS = 8_000
"""A run that hangs is a failure too."""


@dataclass(frozen=True, slots=True)
class Mutant:
    law: str
    """Which one it breaks: a name in tests/law_coverage.py."""
    what: str
    change: Change
    faults: Faults | Callable[[], FaultScript] | None = None
    """Where those of the grid seldom lead to the place."""
    agents: bool = False
    """Whether its runs are those with agents."""
    pipelines: bool = False
    """Whether its runs have operators of data pipelines."""
    people: bool = False
    """Whether its runs are those with people."""
    compared: bool = False
    """Whether its runs have a reward that compares siblings."""
    ranks: bool = False
    """Whether its runs have versions in parts."""

    def run(self, seed: int, *, changed: bool, joined: bool = False) -> None:
        change = self.change() if changed else contextlib.nullcontext()
        if self.agents:
            with tempfile.TemporaryDirectory() as folder, change:
                play_agents(Path(folder), seed, joined=joined)
            return
        if self.people:
            with tempfile.TemporaryDirectory() as folder, change:
                play_people(Path(folder), seed, joined=joined)
            return
        faults = self.faults() if callable(self.faults) else self.faults
        with tempfile.TemporaryDirectory() as folder, change:
            more = {"pipelines": self.pipelines, "compared": self.compared, "savers": self.faults is SAVERS}
            more |= {"ranks": self.ranks, "joined": joined}
            check_seed(seed, Path(folder), faults=faults, max_ticks=MAX_TICKS, **more)


@dataclass(frozen=True, slots=True)
class Caught:
    seed: int
    num_seeds: int
    how: str


def caught(mutant: Mutant, seeds: Sequence[int], *, joined: bool = False) -> Caught | None:
    """The first of the seeds by which it is caught: with the rule in place, nothing is wrong there. `joined`: with
    users' loops for samplers and trainer."""
    for number, seed in enumerate(seeds):
        try:
            mutant.run(seed, changed=True, joined=joined)
        except Exception as error:  # A mutant may break in any way.
            how = _first_line(error)
        else:
            continue
        try:
            mutant.run(seed, changed=False, joined=joined)
        except AssertionError as error:
            if "the run does not end" not in str(error):  # A long one says nothing.
                raise
        else:
            return Caught(seed, number + 1, how)
    return None


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if not text or isinstance(error, AssertionError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = text or f"{where.name}: {where.line}"
    if not isinstance(error, AssertionError | RftError):
        text = f"{type(error).__name__}: {text}"
    ended = [line for line in "\n".join(getattr(error, "__notes__", [])).splitlines() if ": exit " in line]
    return f"{text} ({ended[-1].strip()})" if "finished is not None" in text and ended else text


# --------------------------------------------------------------------------------------------- transactions


@around(MemoryProducer, "commit")
def positions_before_records(
    commit: Any, self: MemoryProducer, records: Any, *, positions: Any = None, group: Any = None, snapshot: Any = None
) -> None:
    if records and positions:
        commit(self, [], positions=positions, group=group, snapshot=snapshot)
        positions = None
    commit(self, records, positions=positions, group=group, snapshot=snapshot)


@around(ConcurrentService, "_commit")
def refused_work_dropped(commit: Any, self: ConcurrentService, partitions: OwnedPartitions) -> bool:
    failures, results = self._failures, list(self._results)
    committed: bool = commit(self, partitions)
    if self._failures > failures and not self._writer.is_in_doubt:
        for result in results:
            if (owned := partitions._owned.get(result.work.place)) is not None:
                owned[1]._open.pop(result.work.offset, None)
        self._results._results.clear()
    return committed


@contextmanager
def refused_positions_kept() -> Iterator[None]:
    """As kafka-python does by itself."""
    add_positions = Coordinator.add_positions
    refused: dict[str, dict[TopicPartition, Position]] = {}

    def mutated(self: Coordinator, transaction: MemoryTransaction, group: str, positions: Any, snapshot: Any) -> None:
        positions = {**refused.pop(transaction.transactional_id, {}), **positions}
        try:
            add_positions(self, transaction, group, positions, snapshot)
        except AssignmentLost:
            refused[transaction.transactional_id] = positions
            raise

    with patch.object(Coordinator, "add_positions", mutated):
        yield


def rebalances_in_commits() -> FaultScript:
    """An explorer stands still with a transaction that will be refused, and others have its partitions; these change
    hands again when it has gone on."""
    return FaultScript(*[
        (BEFORE_COMMIT, "explorer", "pauses", 2), (AFTER_COMMIT, "explorer", "kills", 1),
        (BEFORE_COMMIT, "explorer", "pauses", 1), (BETWEEN, "explorer", "joins", 3),
    ] * 5)  # fmt: skip


@contextmanager
def read_uncommitted() -> Iterator[None]:
    """What the roles read; the audit reads what is committed."""
    decide, reader, member = Coordinator.decide, MemoryTransport.reader, MemoryTransport.member
    view_spans, view_read = clients._View.spans, clients._View.read
    aborted: list[MemoryTransaction] = []

    def decided(self: Coordinator, transaction: MemoryTransaction, *, committed: bool) -> None:
        decide(self, transaction, committed=committed)
        if not committed:
            aborted.append(transaction)

    def careless(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: MemoryTransport, *arguments: Any, **options: Any) -> Any:
            source = make(self, *arguments, **options)
            source._view.careless = "-" in self._process
            return source

        return made

    def spans(self: Any, partitions: Any) -> Any:
        found = view_spans(self, partitions)
        return {p: (begin, self._log.partitions[p].written if self.careless else end)
                for p, (begin, end) in found.items()}  # fmt: skip

    def read(self: Any, place: TopicPartition, offset: int, end: int, **limits: Any) -> PartitionBatch:
        if not self.careless:
            return view_read(self, place, offset, end, **limits)
        log = self._log
        found: list[Record] = log.partitions[place].records[bisect_left(log.partitions[place].offsets, offset) :]
        for transaction in [*aborted, *log.transactions._unfinished.values()]:
            own = transaction.records.get(place, [])
            if own and own[0] not in found:
                found = found + [record for record in own if record.offset >= offset]
        found = sorted(found, key=lambda record: record.offset)[: limits["max_records"]]
        return PartitionBatch(found, end if len(found) < limits["max_records"] else found[-1].offset + 1, 0)

    with (
        patch.object(Coordinator, "decide", decided),
        patch.object(MemoryTransport, "reader", careless(reader)),
        patch.object(MemoryTransport, "member", careless(member)),
        patch.object(clients._View, "spans", spans),
        patch.object(clients._View, "read", read),
    ):
        clients._View.careless = False  # type: ignore[attr-defined]
        yield


# --------------------------------------------------------------------------------------------- groups


@contextmanager
def lost_work_published() -> Iterator[None]:
    """A worker publishes what it has in hand, whoever owns the partition by now."""
    snapshot, position = MemoryMember.snapshot, MemoryMember.position
    last: dict[tuple[int, TopicPartition], int] = {}

    def follow(self: OwnedPartitions, drop: Callable[[TopicPartition], None]) -> set[TopicPartition]:
        assigned = self._member.assignment()
        for place in [place for place, (number, _) in self._owned.items() if assigned.get(place, number) != number]:
            del self._owned[place]
            drop(place)  # It came back.
        new = self._begin({place: assigned[place] for place in assigned if place not in self._owned})
        self._member.held = {place: number for place, (number, _) in self._owned.items()}  # type: ignore[attr-defined]
        return set(new)

    def careless(self: MemoryMember) -> Snapshot:
        return replace(snapshot(self), assignment=getattr(self, "held", {}))

    def known(self: MemoryMember, place: TopicPartition) -> int:
        if place in self._assignment:
            last[id(self), place] = position(self, place)
        return last.get((id(self), place), 0)

    with (
        patch.object(OwnedPartitions, "_follow_assignment", follow),
        patch.object(MemoryMember, "snapshot", careless),
        patch.object(MemoryMember, "position", known),
    ):
        yield


# --------------------------------------------------------------------------------------------- single roles


@contextmanager
def claim_read_before_start() -> Iterator[None]:
    take_over, read_control = SingleService._claim_anew, SingleReader.read_control

    def mutated(self: SingleService) -> None:
        read_control(self._reader)
        self._reader.is_blind = True  # type: ignore[attr-defined]
        try:
            take_over(self)
        finally:
            self._reader.is_blind = False  # type: ignore[attr-defined]

    def read(self: SingleReader, *, settled: bool = False) -> None:
        if not getattr(self, "is_blind", False):
            read_control(self, settled=settled)

    with patch.object(SingleService, "_claim_anew", mutated), patch.object(SingleReader, "read_control", read):
        yield


@around(SingleReader, "read_control")
def claims_hidden(read_control: Any, self: SingleReader, *, settled: bool = False) -> None:
    """`control` is read to where it can be read, whatever is open there."""
    read_control(self)


def believe(self: VersionInForce, step: StepRecord) -> bool:
    self.name, self.trained_groups, self.last = step.name, step.trained_groups, step.last
    self.trained_rollouts = step.trained_rollouts
    return True


epochs_ignored = together(
    instead(Lineage, accepts=lambda self, epoch: True), instead(VersionInForce, absorb=believe),
    instead(RoleClaim, check=lambda self: None),
)  # fmt: skip
"""Readers take what older trainers say, and who was replaced does not look."""


# --------------------------------------------------------------------------------------------- roles


def drawn_id(taskset: str, taskset_pass: int, index: int, attempt: int) -> str:
    return ids.group_id(taskset, taskset_pass, crc32(str(time.perf_counter_ns()).encode()), attempt)


@around(VerifierStep, "_judged")
def unscorable_as_zero(judged: Any, self: VerifierStep, item: Any, reply: ScoreReply) -> Any:
    return judged(self, item, reply if reply.score is not None else replace(reply, score=Score(reward=0.0)))


@around(Admission, "min_version")
def stale_tasks(least: Any, self: Admission, in_force: VersionInForce, admitted: int) -> int:
    """Each task may be sampled by one version older than those that its batch allows."""
    return max(0, least(self, in_force, admitted) - 1)


@around(FeederStep, "advance")
def partition_of_the_rollout(advance: Any, self: FeederStep) -> SingleTransaction | None:
    transaction = advance(self)
    if transaction is None:
        return None
    outputs = [
        replace(one, partition=crc32(one.message.ids.rollout_id.encode()) % self._partitions)
        if isinstance(one.message, Task)
        else one
        for one in transaction.outputs
    ]
    return SingleTransaction(tuple(outputs), transaction.positions)


def batches_alone(self: BufferStep) -> SingleTransaction | None:
    if self._progress.is_last_written and self._all_in(0):
        return None
    batch = self._choose()
    return None if batch is None else self._batch(batch)


@around(DemonstrationQueue, "begin")
def passes_forgotten(begin: Any, self: DemonstrationQueue, log_: Log, cursor: Cursor) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = begin(self, log_, Cursor(total=cursor.total))
    return found


chain_not_asked = instead(
    CommittedBatches, is_committed=lambda self, sequence: True, after=lambda self, record: iter(())
)
"""What does not fit into the next batch is its damage, whatever the buffer has committed."""


@around(summaries._Summarised, "_judge")
def summary_late(judge: Any, self: summaries._Summarised, record: Record) -> Summary | None:
    """A summary leaves out the last record before the place where it says that it ends."""
    before = self._log.rule.summary(self.name, record.offset)
    found = judge(self, record)
    return None if found is None or before is None else replace(before, through=record.offset + 1)


TRAINERS = Faults(share=0.12, roles=("trainer",), kills=20, pauses=12, takeovers=6, unknowns=4)
SINGLES = Faults(share=0.12, roles=("feeder", "buffer", "trainer"), kills=12, pauses=12, takeovers=10, unknowns=4)
WORKERS = Faults(share=0.12, roles=("explorer", "verifier"), kills=8, pauses=16, joins=4, restarts=4, aborts=8,
                 unknowns=8, silences=4)  # fmt: skip
SAVERS = Faults(share=0.12, roles=("explorer",), kills=8, pauses=20, joins=10, restarts=6, aborts=4, unknowns=8)
STRANGERS = Faults(share=0.15, strangers=30, kills=2, takeovers=2)

MUTANTS: Mapping[str, Mutant] = {
    "summary-late": Mutant("conservation", "a summary lacks the last record that it is about", summary_late),
    "positions-before-records": Mutant("lost", "commit before publish", positions_before_records),
    "refused-work-dropped": Mutant("lost", "no seek-back after an abort", refused_work_dropped),
    "refused-positions-kept": Mutant(
        "lost", "positions of a refused transaction go with the next", refused_positions_kept,
        rebalances_in_commits,
    ),
    "read-uncommitted": Mutant("twice", "readers see what is open and what was aborted", read_uncommitted),
    "unstable-positions": Mutant(
        "twice", "positions are taken while a commit of them is pending",
        instead(Coordinator, await_stable=lambda self, group: None), WORKERS,
    ),
    "lost-work-published": Mutant("twice", "ownership is not checked before publishing", lost_work_published, WORKERS),
    "values-of-neighbours": Mutant(
        "lineage", "values beside the tokens of a piece move by one", piece_mutants.values_of_neighbours, SAVERS
    ),
    "pieces-left": Mutant(
        "bounded", "a finished rollout leaves its pieces",
        instead(explorer_module, tombstones=lambda rollout_id, partition, pieces: ()),
    ),
    "pieces-of-anybody": Mutant(
        "fencing", "pieces are saved without a look at whose the partition is", piece_mutants.pieces_of_anybody, SAVERS
    ),
    "pieces-read-too-early": Mutant(
        "lost", "pieces are read before their end is certain", piece_mutants.pieces_read_too_early, SAVERS
    ),
    "pieces-saved-again": Mutant(
        "twice", "what may have been saved is saved again, after a commit with an unknown result",
        instead(SavedRecords, there=lambda self, results: set()), SAVERS,
    ),
    "states-of-anybody": Mutant(
        "lost", "orphans go without a proof of whose the partition is", piece_mutants.states_of_anybody, SAVERS
    ),
    "passes-forgotten": Mutant("order", "a restart begins the passes through demonstrations anew", passes_forgotten),
    "stages-ignored": Mutant(
        "staleness", "groups are admitted for stages that take none",
        instead(Stages, batches_of_rollouts=lambda self, first, end: end - first),
    ),
    "half-decided-kept": Mutant(
        "lost", "a role whose question failed in the middle of its work goes on",
        instead(SingleService, _advance=lambda self, in_force: self.step.advance()),
        Faults(share=0.2, roles=("buffer",), silences=30),
    ),
    "claim-read-before-start": Mutant(
        "fencing", "control is read before the producer's start", claim_read_before_start, SINGLES
    ),
    "claims-hidden": Mutant("fencing", "a claim behind an open transaction is overlooked", claims_hidden, SINGLES),
    "epochs-ignored": Mutant("fencing", "no epoch check", epochs_ignored, SINGLES),
    "ids-drawn": Mutant("derived", "ids are drawn", instead(draws_module, group_id=drawn_id)),
    "partition-of-the-rollout": Mutant(
        "derived", "a group's partition is chosen per rollout", partition_of_the_rollout
    ),
    "unscorable-as-zero": Mutant("unscorable", "what cannot be scored has the reward 0", unscorable_as_zero),
    "stale-tasks": Mutant("staleness", "tasks name a version that is too old for their batch", stale_tasks),
    "filtered-held": Mutant(
        "never-waits", "filtered outcomes wait for a batch", instead(BufferStep, _next_transaction=batches_alone)
    ),
    "checkpoint-without-positions": Mutant(
        "replay", "the checkpoint has no positions", trainers.checkpoint_without_positions, TRAINERS
    ),
    "checkpoint-of-the-next": Mutant("replay", "training goes on before the state of a checkpoint is saved",
                                     trainers.checkpoint_of_the_next, TRAINERS),
    "chains-broken": Mutant("lineage", "a kept version's parents go", trainers.chains_broken),
    "nothing-durable": Mutant(
        "lost", "checkpoints and deletions count on what a loss of power takes",
        instead(MemoryAdmin, make_durable=lambda self: None), trainers.power_after_steps,
    ),
    "claims-volatile": Mutant("fencing", "a claim may be lost with the power", trainers.claims_volatile,
                              trainers.power_after_claims),
    "deletions-given-up": Mutant("bounded", "what could not be deleted at once is not tried again",
                                 trainers.deletions_given_up, trainers.deletions_unanswered),
    "strangers-believed": Mutant(
        "fencing", "records count whoever wrote them",
        instead(RecordsInForce, check=lambda self, record, message: None), STRANGERS,
    ),
    "chain-not-asked": Mutant("fencing", "a foreign record on batches is taken for damage", chain_not_asked, STRANGERS),
    "any-checkpoint": Mutant("lineage", "a checkpoint that is not in force is taken", trainers.any_checkpoint,
                             trainers.zombie_with_a_checkpoint),
    **{
        name: Mutant(law, what, contextmanager(change), agents=True)
        for name, (law, what, change) in agent_mutants.RULES.items()
    },
    **{name: Mutant(law, what, change, pipelines=True) for name, (law, what, change) in pipeline_mutants.RULES.items()},
    **{
        name: Mutant(law, what, change, SINGLES if name in reuse_mutants.AT_RESTARTS else None, pipelines=True)
        for name, (law, what, change) in reuse_mutants.RULES.items()
    },
    **{name: Mutant(law, what, change, people=True) for name, (law, what, change) in people_mutants.RULES.items()},
    **{
        name: Mutant(law, what, change, WORKERS, compared=True)
        for name, (law, what, change) in group_mutants.RULES.items()
    },
    **{name: Mutant(law, what, change, ranks=True) for name, (law, what, change) in rank_mutants.RULES.items()},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MUTANTS)}; all by default")
    parser.add_argument("--seeds", default="0:600", help="FROM:TO, at most so many for each (%(default)s)")
    parser.add_argument("--joined", action="store_true", help="with loops of users (rftstream.join)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MUTANTS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(MUTANTS)}")
    logging.disable(logging.CRITICAL)
    first, _, end = arguments.seeds.partition(":")
    survivors = 0
    print(f"{'mutant':30} {'caught by':>9} {'seeds run':>9} {'s':>5}  failure", flush=True)
    for name in arguments.names or MUTANTS:
        began = time.process_time()
        found = caught(MUTANTS[name], range(int(first), int(end)), joined=arguments.joined)
        survivors += found is None
        seed, num, how = (found.seed, found.num_seeds, found.how) if found else ("nobody", int(end) - int(first), "-")
        print(f"{name:30} {seed:>9} {num:>9} {time.process_time() - began:5.0f}  {how[:150]}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
