"""Conservation, counted from the log: `admitted = pending + trained + expired + filtered + dead`.

Topics are read from the end of the flow to its beginning, each up to the end that it has when its turn comes. What
was seen downstream then stands upstream already, so that a live run balances too. What the readers have committed as
done is asked before anything is read, so whatever it covers must be found downstream: a record that is not is lost,
and not just pending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rftstream.contracts.control import Trimmed
from rftstream.contracts.topics import TOPICS
from rftstream.queries import ledger
from rftstream.queries.balance import STAGES, AuditReport, Balance, Lengths
from rftstream.queries.demonstration_counts import count_demonstrations
from rftstream.queries.feedback import count_feedback, has_feedback
from rftstream.queries.foreign import (
    announcements_in_force,
    batches_in_force,
    outcomes_in_force,
    records_of,
    tasks_in_force,
    without_copies,
)
from rftstream.queries.formatting import plural
from rftstream.queries.index import Index, read_kept_table
from rftstream.queries.ledger import (
    BATCHED,
    DEAD,
    EXPIRED,
    FILTERED,
    PENDING,
    TRAINED,
    Digests,
    Outcomes,
    RolloutRows,
    TrainingInForce,
)
from rftstream.queries.operator_totals import read_totals
from rftstream.queries.reuse_counts import count_reuse, reuse_of, reuse_problems
from rftstream.queries.rows import TopicTable
from rftstream.queries.summary_check import Steps, read_summaries, summary_problems
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.service.control_view import read_control
from rftstream.service.losses import deleted_unsaid
from rftstream.service.role import Log
from rftstream.transport.base import Transport
from rftstream.weights.trimming import undeleted

OUTCOMES = {"trained": TRAINED, "expired": EXPIRED, "filtered": FILTERED, "dead": DEAD}

MAX_TRIES = 5

NUM_EXAMPLES = 3
"""How many names the sentence about a problem gives."""


def audit(transport: Transport, index: Index | None = None) -> AuditReport:
    """Count what became of every rollout and group. The whole log is read once, or with an index only what is new
    since.

    Only `outcomes` is read with bodies. Memory grows by some 400 bytes per rollout. Groups whose records were deleted
    count as `control` says. If a trainer deletes more during the audit, the log is read again."""
    for _ in range(MAX_TRIES):
        said = read_control(transport).deleted
        report = _audit(transport, index, said)
        if not _deleted(transport, said) or read_control(transport).deleted == said:
            break
    return report


def _audit(transport: Transport, index: Index | None, said: Trimmed) -> AuditReport:
    """Audit the log once. `said` is what `control` said of deleted records before anything else was read."""
    log = Log(transport)

    def table(topic: str) -> TopicTable:
        return read_kept_table(log, topic, index)

    def table_in_force(topic: str) -> TopicTable:
        """Return the topic's table without groups that are through, since more of their records may be deleted at any
        time."""
        return table(topic).where(lambda rows: (rows["sequence"] < 0) | (rows["sequence"] >= said.sequence))

    done_by_explorers, done_by_verifiers, done_by_buffer = map(
        log.committed, (EXPLORER.name, VERIFIER.name, BUFFER.name)
    )
    ended = read_control(transport).ended
    operators = read_totals(log)
    summaries = read_summaries(log)
    steps = ledger.read_steps(log, (summarised := Steps(summaries)).pass_)
    decided = outcomes_in_force(log, outcomes_there := table("outcomes"))
    outcomes = ledger.outcomes_of(decided.where(lambda rows: rows["sequence"] >= said.sequence), steps.version)
    through = ledger.outcomes_of(decided.where(lambda rows: rows["sequence"] < said.sequence), steps.version)
    reuse = reuse_of(decided)
    batches_table = table("batches").where(lambda rows: (rows["number"] < 0) | (rows["number"] >= said.version))
    batches_table = batches_in_force(log, batches_there := batches_table, said)
    batches, shares = ledger.rows_of("batches", batches_table), ledger.shares_of(batches_table)
    uses = ledger.uses_of(batches_table)
    verified = ledger.rows_of("verified", table_in_force("verified"), done_by_buffer)
    rollouts = ledger.rows_of("rollouts", table_in_force("rollouts"), done_by_verifiers)
    partials = ledger.rows_of("partials", table_in_force("partials"))
    tasks_table = tasks_in_force(log, tasks_there := table_in_force("tasks"))
    tasks = ledger.rows_of("tasks", tasks_table, done_by_explorers)
    there = transport.admin.topics()
    written = ("questions", "judgements") if has_feedback(log) else ()
    others = [topic for topic in ("problems", *written) if topic in there]
    rest = [ledger.rows_of(topic, table(topic)) for topic in ("experts", *others)]
    announced = announcements_in_force(log, announced_there := table("weights"))
    rest.append(ledger.rows_of("weights", announced))

    rows = (tasks, rollouts, verified, batches)
    fates = _fates(tasks, rollouts, verified, outcomes, said, through)
    twins = {
        "steps": steps.twins,
        "outcomes": np.concatenate([through.twins, outcomes.twins, reuse.twins]),
        **{one.topic: one.twins for one in (*rows, partials, *rest)},
    }
    twins, copies = without_copies(log, twins)
    foreign = {
        "tasks": len(tasks_there.rows) - len(tasks_table.rows),
        "weights": len(announced_there.rows) - len(announced.rows),
        "batches": len(batches_there.rows) - len(batches_table.rows),
        "outcomes": records_of(outcomes_there) - records_of(decided),
    }
    foreign = {topic: foreign.get(topic, 0) + copies.get(topic, 0) for topic in TOPICS}
    contradictions = [
        *_deleted(transport, said),
        *_counted(said, through),
        *(f"{text}; it was left out" for text in outcomes.broken),
        *_foreign(log, rows, partials, outcomes),
        *_lost(log, rows, outcomes),
        *_incomplete(log, tasks),
        *_outcomes_against_batches(log, outcomes, batches, reuse.in_batches(said.version), said.version),
        *reuse_problems(reuse, outcomes, through),
        *_batches_against_steps(steps, outcomes, shares, said, num_shares=len(log.ends("batches"))),
    ]
    demonstrations, more = count_demonstrations(
        log, rest[0], uses, shares, steps.version, num_shares=len(log.ends("batches"))
    )
    contradictions += more
    people, more = count_feedback(log)
    contradictions += more
    if ended is not None and fates.groups.admitted < ended.admitted:
        found = plural(fates.groups.admitted, "group")
        contradictions.append(f"tasks: {found}, expected {ended.admitted:,} as `end` says")
    contradictions += operators.problems(fates.groups.admitted) if operators is not None else []
    contradictions += summary_problems(log, summaries, decided, announced, summarised)
    return AuditReport(
        operators=operators,
        reuse=count_reuse(reuse, steps.version),
        people=people,
        trainer_epoch=steps.trainer_epoch,
        version=steps.version,
        rollouts=fates.rollouts,
        groups=fates.groups,
        demonstrations=demonstrations,
        deleted_groups=said.sequence,
        deleted_rollouts=sum(said.rollouts.values()),
        earliest_version=said.version,
        undeleted=undeleted(said, transport),
        twins={topic: len(twins[topic]) for topic in TOPICS if topic in twins},
        foreign={topic: count for topic, count in foreign.items() if count},
        lengths=fates.lengths,
        unreadable={one.topic: one.num_unreadable for one in rows if one.num_unreadable},
        problems=(*contradictions, *_twin_sentences(log, twins)),
        balanced=fates.rollouts.balanced
        and fates.groups.balanced
        and not contradictions
        and (demonstrations is None or demonstrations.balanced),
    )


# --------------------------------------------------------------------------------------------- fates


@dataclass(frozen=True, slots=True)
class _Fates:
    rollouts: Balance
    groups: Balance
    lengths: dict[str, Lengths]


def _fates(
    tasks: RolloutRows,
    rollouts: RolloutRows,
    verified: RolloutRows,
    outcomes: Outcomes,
    said: Trimmed,
    through: Outcomes,
) -> _Fates:
    """Return the balances of all who were admitted or got an outcome, so that an outcome too many does not balance.
    Groups of which the log only keeps the number are added."""
    known = ledger.distinct(np.concatenate([tasks.rollout_R, outcomes.rollout_N]))
    fate = np.full(len(known), PENDING, np.int8)
    named, first = np.unique(outcomes.rollout_N, return_index=True)
    fate[np.searchsorted(known, named)] = outcomes.fate_N[first]
    stage = ledger.isin(known, rollouts.rollout_R).astype(np.int64)
    stage[ledger.isin(known, verified.rollout_R)] = 2

    groups = ledger.distinct(np.concatenate([tasks.group_R, outcomes.group_G]))
    group_fate = np.full(len(groups), PENDING, np.int8)
    decided, first = np.unique(outcomes.group_G, return_index=True)
    group_fate[np.searchsorted(groups, decided)] = outcomes.fate_G[first]
    group_stage = np.full(len(groups), 2)
    siblings = np.searchsorted(known, tasks.rollout_R)
    np.minimum.at(group_stage, np.searchsorted(groups, tasks.group_R), stage[siblings])
    return _Fates(
        rollouts=_balance(len(ledger.distinct(tasks.rollout_R)), fate, stage, said.rollouts),
        groups=_balance(len(ledger.distinct(tasks.group_R)), group_fate, group_stage, said.groups),
        lengths=_lengths(rollouts, known, fate, through),
    )


def _balance(admitted: int, fate: Any, stage: Any, counted: Mapping[str, int]) -> Balance:
    by_stage = {name: int(np.sum((fate == PENDING) & (stage == i))) for i, name in enumerate(STAGES[:3])}
    return Balance(
        admitted=admitted + sum(counted.values()),
        pending_by_stage={**by_stage, "batched": int(np.sum(fate == BATCHED))},
        **{name: int(np.sum(fate == code)) + counted.get(name, 0) for name, code in OUTCOMES.items()},
    )


def _lengths(rollouts: RolloutRows, known: Digests, fate: Any, through: Outcomes) -> dict[str, Lengths]:
    """Return completion lengths by outcome, from the headers of `rollouts`, or from the outcomes of groups that are
    through."""
    sampled, first = np.unique(rollouts.rollout_R, return_index=True)
    tokens = rollouts.number_R[first]
    keep = (tokens >= 0) & ledger.isin(sampled, known)
    tokens, codes = tokens[keep], fate[np.searchsorted(known, sampled[keep])]
    with_length = through.tokens_N >= 0
    tokens = np.concatenate([tokens, through.tokens_N[with_length]])
    codes = np.concatenate([codes, through.fate_N[with_length]])
    picked = {name: tokens[codes == code] for name, code in OUTCOMES.items()}
    picked["pending"] = tokens[(codes == PENDING) | (codes == BATCHED)]
    return {
        name: Lengths(
            count=len(some), mean=float(some.mean()), p50=float(np.median(some)), p95=float(np.percentile(some, 95))
        )
        if len(some)
        else Lengths(count=0)
        for name, some in picked.items()
    }


# --------------------------------------------------------------------------------------------- promises


def _deleted(transport: Transport, said: Trimmed) -> list[str]:
    """Return a sentence for each topic whose records were deleted without a word on `control`."""
    topics = ("tasks", "rollouts", "verified", "batches", "outcomes")
    return [
        f"{topic}: {plural(count, 'offset')} at the beginning deleted of which `control` says nothing, "
        "expected all records; what they held cannot be counted"
        for topic, count in deleted_unsaid(transport, said, topics).items()
    ]


def _counted(said: Trimmed, through: Outcomes) -> list[str]:
    """Compare what `control` says of groups whose records are gone with their outcomes, which stay."""
    sentences = []
    if sum(said.groups.values()) != said.sequence:
        sentences.append(f"control: trimmed counts {sum(said.groups.values()):,} groups, expected {said.sequence:,}")
    for what, told, fates in (("group", said.groups, through.fate_G), ("rollout", said.rollouts, through.fate_N)):
        for name, code in OUTCOMES.items():
            if (found := int(np.sum(fates == code))) != told.get(name, 0):
                sentences.append(
                    f"outcomes: {plural(found, f'{name} {what}')} below sequence {said.sequence}, expected "
                    f"{told.get(name, 0):,} as `trimmed` says"
                )
    return sentences


def _foreign(log: Log, rows: tuple[RolloutRows, ...], partials: RolloutRows, outcomes: Outcomes) -> list[str]:
    """Return a sentence for each kind of id without an origin: an id must stand on the topic before, a group must be
    admitted."""
    tasks, rollouts, verified, batches = rows
    sentences = []
    for here, before in ((rollouts, tasks), (partials, tasks), (verified, rollouts), (batches, verified)):
        if len(strangers := ledger.missing(here.rollout_R, before.rollout_R)):
            sentences.append(
                f"{here.topic}: {plural(len(strangers), 'rollout')} that {before.topic} does not have: "
                + _examples(log, here.topic, strangers, "rollout_id")
            )
    if len(strangers := ledger.missing(outcomes.group_G, tasks.group_R)):
        sentences.append(
            f"outcomes: {plural(len(strangers), 'group')} that was never admitted: "
            + _examples(log, "outcomes", strangers, "group_id")
        )
    if len(strangers := ledger.missing(outcomes.rollout_N, verified.rollout_R)):
        sentences.append(f"outcomes: {plural(len(strangers), 'rollout')} named that verified does not have")
    if len(double := ledger.distinct(ledger.repeated(outcomes.rollout_N))):
        sentences.append(
            f"outcomes: {plural(len(double), 'rollout')} named by more than one record: "
            + _examples(log, "verified", double, "rollout_id")
        )
    return sentences


def _lost(log: Log, rows: tuple[RolloutRows, ...], outcomes: Outcomes) -> list[str]:
    """Return a sentence for each topic with records that their reader has finished and of which nothing came out."""
    tasks, rollouts, verified, _ = rows
    sentences = []
    for here, readers, after, found in (
        (tasks, "the explorers", "rollouts", rollouts.rollout_R),
        (rollouts, "the verifiers", "verified", verified.rollout_R),
        (verified, "the buffer", "outcomes", outcomes.rollout_N),
    ):
        if len(lost := ledger.missing(here.rollout_R[here.passed_R], found)):
            sentences.append(
                f"{here.topic}: {plural(len(lost), 'rollout')} that {readers} passed, with nothing on "
                f"{after}: {_examples(log, here.topic, lost, 'rollout_id')}"
            )
    return sentences


def _incomplete(log: Log, tasks: RolloutRows) -> list[str]:
    """Return a sentence about groups without all their siblings: a group is admitted as a whole."""
    _, first = np.unique(tasks.rollout_R, return_index=True)
    groups, sizes, counts = np.unique(tasks.group_R[first], return_index=True, return_counts=True)
    wrong = groups[counts != tasks.number_R[first][sizes]]
    if not len(wrong):
        return []
    return [
        f"tasks: {plural(len(wrong), 'group')} with other than group_size siblings: "
        + _examples(log, "tasks", wrong, "group_id")
    ]


def _outcomes_against_batches(
    log: Log, outcomes: Outcomes, batches: RolloutRows, reused: Digests, first: int
) -> list[str]:
    """Compare outcomes with batches. Both are written in one transaction, so a batch holds exactly the rollouts that
    outcomes name, and those that it has once more (`reused`). Batches below `first` are deleted."""
    sentences = []
    batched = outcomes.batch_N >= first
    promised = ledger.in_batch(outcomes.rollout_N[batched], outcomes.batch_N[batched])
    held = ledger.in_batch(batches.rollout_R, batches.number_R)
    absent = ~ledger.isin(promised, held)
    if absent.any():
        sentences.append(
            f"batches: {plural(int(absent.sum()), 'rollout')} not in the batch that the outcome says: "
            + _examples(log, "verified", outcomes.rollout_N[batched][absent], "rollout_id")
        )
    if lacking := len(ledger.missing(reused, held)):
        sentences.append(f"batches: {plural(lacking, 'rollout')} not in the batch that is said to have it once more")
    newest = int(outcomes.batch_G.max(initial=-1))  # outcomes of later batches were written after we looked
    early = batches.number_R <= newest
    unnamed = early & ~ledger.isin(batches.rollout_R, outcomes.rollout_N[batched]) & ~ledger.isin(held, reused)
    if unnamed.any():
        strangers = ledger.distinct(batches.rollout_R[unnamed])
        sentences.append(
            f"batches: {plural(len(strangers), 'rollout')} that no outcome batched: "
            + _examples(log, "batches", strangers, "rollout_id")
        )
    again = early & ~unnamed & ~ledger.isin(held, np.concatenate([promised, reused]))
    if again.any():
        strangers = ledger.distinct(batches.rollout_R[again])
        sentences.append(
            f"batches: {plural(len(strangers), 'rollout')} in a batch for which neither its outcome nor a reuse is "
            "there: " + _examples(log, "batches", strangers, "rollout_id")
        )
    return sentences


def _batches_against_steps(
    steps: TrainingInForce, outcomes: Outcomes, shares: ledger.Shares, said: Trimmed, *, num_shares: int
) -> list[str]:
    """Every version stands on whole batches."""
    sentences = []
    places = ((share, batch) for batch in range(said.version, steps.version) for share in range(num_shares))
    if absent := [place for place in places if place not in shares.announced]:
        sentences.append(
            f"batches: {plural(len(absent), 'manifest')} missing below version {steps.version}, first of "
            f"batch {absent[0][1]}, share {absent[0][0]}"
        )
    wrong = [place for place in sorted(shares.announced) if shares.announced[place] != shares.counted[place]]
    orphans = [place for place in sorted(shares.counted) if place not in shares.announced]
    for share, batch in (wrong + orphans)[:NUM_EXAMPLES]:
        expected = shares.announced.get((share, batch), "a manifest")
        sentences.append(
            f"batches[{share}]: {plural(shares.counted[share, batch], 'experience')} of batch {batch}, "
            f"expected {expected}"
        )
    trained = len(ledger.distinct(outcomes.group_G[outcomes.fate_G == TRAINED])) + said.groups.get("trained", 0)
    if trained != steps.trained_groups:
        sentences.append(
            f"steps: {plural(steps.trained_groups, 'trained group')} by version {steps.version}, "
            f"expected {trained:,} as outcomes says"
        )
    return sentences


def _twin_sentences(log: Log, twins: Mapping[str, Digests]) -> list[str]:
    return [
        f"{topic}: {plural(len(keys), 'twin')}: " + _examples(log, topic, keys, *(TOPICS[topic].twin or ()))
        for topic, keys in twins.items()
        if len(keys)
    ]


def _examples(log: Log, topic: str, digests: Digests, *headers: str) -> str:
    """Return the first names behind the digests, with the places of their records."""

    def text(found: Mapping[str, bytes]) -> bytes | None:
        return b"\0".join(found[name] for name in headers) if all(name in found for name in headers) else None

    places: dict[str, list[str]] = {}
    for name, record in ledger.named(log.read(topic, bodies=False), ledger.distinct(digests).tolist(), text):
        if name in places or len(places) < NUM_EXAMPLES:
            places.setdefault(name, []).append(str(record))
    more = len(ledger.distinct(digests)) - len(places)
    shown = [f"{name} ({', '.join(where[:4])})" for name, where in places.items()]
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 and shown else "")
