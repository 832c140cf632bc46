"""Conservation, counted from the log: `admitted = pending + trained + expired + filtered + dead`.

The ends of all topics are asked for in one go, from the end of the flow to its beginning, and everything is read up to
them. Every record seen downstream is then already upstream, so that a live run balances too, and what is pending was in
flight at that moment, however long the reading takes. The committed positions of the readers are read before everything
else. So a record that they cover must be found downstream; if it is not, it is lost and not just pending.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rftstream.contracts.control import Trimmed
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.topics import TOPICS
from rftstream.queries.audits.balance import STAGES, AuditReport, Balance, Lengths, count_demonstrations, count_reuse
from rftstream.queries.audits.foreign import (
    claimed_tasks,
    note_foreign_announcements,
    note_foreign_experiences,
    note_foreign_outcomes,
    without_copies,
)
from rftstream.queries.audits.laws import (
    BATCHED,
    DEAD,
    EXPIRED,
    FILTERED,
    NUM_EXAMPLES,
    PENDING,
    TEMPORARY,
    TRAINED,
    broken_laws,
    make_views,
    note_done,
    twin_sentences,
    twins_on,
)
from rftstream.queries.audits.operator_totals import count_totals
from rftstream.queries.audits.rows import headers_of, twin_key
from rftstream.queries.audits.summary_check import (
    Steps,
    TrainingInForce,
    follow_training,
    read_summaries,
    summary_problems,
)
from rftstream.queries.facts.database import Doing, Index, StoreError
from rftstream.queries.formatting import plural
from rftstream.queries.people.feedback import count_feedback, has_feedback
from rftstream.roles.buffer import BUFFER
from rftstream.roles.explorer import EXPLORER
from rftstream.roles.verifier import VERIFIER
from rftstream.service.control_view import read_control
from rftstream.service.records.losses import deleted_unsaid
from rftstream.service.role import Log
from rftstream.transport.base import Transport
from rftstream.weights.trimming import undeleted

OUTCOMES = {"trained": TRAINED, "expired": EXPIRED, "filtered": FILTERED, "dead": DEAD}
_NAMES = {fate: name for name, fate in OUTCOMES.items()} | dict.fromkeys((PENDING, BATCHED), "pending")

MAX_TRIES = 5


def audit(transport: Transport, index: Index | None = None, *, doing: Doing = lambda phase: None) -> AuditReport:
    """Count every rollout and group by its fate. The whole log is read once; with an index, only its new records are.

    Only `outcomes` is read with bodies. Memory does not grow with the run. Groups whose records were deleted are
    counted by the numbers on `control`. If a trainer deletes more during the audit, the log is read again. `doing` is
    told each phase, and how far it is.
    """
    with contextlib.ExitStack() as stack:
        if index is None:
            index = stack.enter_context(contextlib.closing(Index()))
        for _ in range(MAX_TRIES):
            said = read_control(transport).deleted
            try:
                report = _audit(transport, index, said, doing)
            except StoreError as error:
                if index.folder is None:
                    raise
                index.give_up(error)
                report = _audit(transport, index, said, doing)
            if not _deleted(transport, said) or read_control(transport).deleted == said:
                break
    return report


def _audit(transport: Transport, index: Index, said: Trimmed, doing: Doing) -> AuditReport:
    """Audit the log once. `said` is the state of deletions on `control`, read before everything else."""
    log = Log(transport)
    for table, columns in TEMPORARY.items():
        index.execute(f"CREATE TEMP TABLE IF NOT EXISTS {table}({columns})")
        index.execute(f"DELETE FROM temp.{table}")
    for role, topic in ((EXPLORER, "tasks"), (VERIFIER, "rollouts"), (BUFFER, "verified")):
        note_done(index, topic, log.committed(role.name))
    control = read_control(transport, log=log)
    ended = control.ended
    summaries = read_summaries(log)
    log = LogAtMoment(log)
    steps = _read_steps(index, log, summarised := Steps(summaries))
    foreign, rest = _read(index, log, said, doing)
    doing("counting what became of them")
    make_views(index, said, version=steps.version, claimed=claimed_tasks(log))
    of_tasks = f"SELECT count(*) FROM on_tasks WHERE (sequence < 0 OR sequence >= {said.sequence})"
    foreign["tasks"] = index.number(of_tasks) - index.number("SELECT count(*) FROM all_tasks")
    fates, operators = _count_fates(index, said), count_totals(index, control)
    flow = ("tasks", "rollouts", "verified", "batches")
    doing("looking for twins")
    repeated = {topic: twins_on(index, topic) for topic in ("steps", "outcomes", *flow, "partials", *rest)}
    twins, copies = without_copies(log, repeated)
    num_shares = len(log.ends("batches"))
    demonstrations, of_demonstrations = count_demonstrations(index, log, steps.version, num_shares=num_shares)
    people, of_people = count_feedback(log)
    doing("looking for contradictions")
    contradictions = [
        *_deleted(transport, said),
        *_counted(index, said),
        *(f"{text}; it was left out" for text in _broken(index)),
        *broken_laws(index, said),
        *_batches_against_steps(index, steps, said, num_shares=num_shares),
        *of_demonstrations,
        *of_people,
    ]
    if ended is not None and fates.groups.admitted < ended.admitted:
        found = plural(fates.groups.admitted, "group")
        contradictions.append(f"tasks: {found}, expected {ended.admitted:,} as `end` says")
    contradictions += operators.problems(fates.groups.admitted) if operators is not None else []
    contradictions += summary_problems(index, log, summaries, summarised)
    return AuditReport(
        operators=operators,
        reuse=count_reuse(index, steps.version),
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
        twins={topic: twins[topic].total() for topic in TOPICS if topic in twins},
        foreign={topic: count for topic in TOPICS if (count := foreign.get(topic, 0) + copies.get(topic, 0))},
        lengths=fates.lengths,
        filtered=dict(index.rows(_FILTERED_GROUPS)),
        unreadable={topic: count for topic in flow if (count := _count_unreadable(index, topic))},
        problems=(*contradictions, *twin_sentences(log, twins)),
        balanced=fates.rollouts.balanced
        and fates.groups.balanced
        and not contradictions
        and (demonstrations is None or demonstrations.balanced),
    )


FLOW = ("steps", "outcomes", "batches", "verified", "rollouts", "partials", "tasks")
"""The topics of the flow, from its end to its beginning."""


class LogAtMoment(Log):
    """A log up to the ends that its topics have when it is made. `control` and summaries are read up to their present
    ends."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.transport, log.rule)
        there = log.transport.admin.topics()
        beside = ("judgements", "questions", "feedback", "experts", "problems", "weights", "dead")
        self._ends = {topic: log.ends(topic) for topic in (*FLOW, *beside) if topic in there}

    def ends(
        self, topic: str, *, settled: bool = False, partitions: Collection[int] | None = None
    ) -> dict[TopicPartition, int]:
        """Return the ends at the moment."""
        if topic not in self._ends:
            return super().ends(topic, settled=settled, partitions=partitions)
        found = self._ends[topic].items()
        return {place: end for place, end in found if partitions is None or place.partition in partitions}


def _read(index: Index, log: Log, said: Trimmed, doing: Doing) -> tuple[dict[str, int], list[str]]:
    """Read the new records of every topic, from the end of the flow to its beginning. Return the number of foreign
    records of some topics, and the topics beside the flow."""
    foreign = {}
    index.read(log, "outcomes", doing)
    foreign["outcomes"] = note_foreign_outcomes(index, log)
    index.read(log, "batches", doing)
    foreign["batches"] = note_foreign_experiences(index, log, said)
    for topic in ("verified", "rollouts", "partials", "tasks"):
        index.read(log, topic, doing)
    there = log.transport.admin.topics()
    written = ("questions", "judgements") if has_feedback(log) else ()
    rest = ["experts", *(topic for topic in ("problems", *written) if topic in there), "weights"]
    for topic in rest:
        index.read(log, topic, doing)
    foreign["weights"] = note_foreign_announcements(index, log)
    index.keep()
    return foreign, rest


def _read_steps(index: Index, log: Log, summarised: Steps) -> TrainingInForce:
    newest = TrainingInForce()
    for record, newest in follow_training(log):
        index.insert("step_keys", 2, [(twin_key("steps", headers_of(record)), record.offset)])
        summarised.pass_(record.offset, newest)
    return newest


# --------------------------------------------------------------------------------------------- fates


@dataclass(frozen=True, slots=True)
class _Fates:
    rollouts: Balance
    groups: Balance
    lengths: dict[str, Lengths]


_VERIFIED = "EXISTS (SELECT 1 FROM verified v WHERE v.rollout = t.rollout)"
_SAMPLED = "EXISTS (SELECT 1 FROM rollouts r WHERE r.rollout = t.rollout)"
_STAGE = f"CASE WHEN {_VERIFIED} THEN 2 WHEN {_SAMPLED} THEN 1 ELSE 0 END"
_ROLLOUTS = f"""
SELECT admitted, coalesce(fate, 0), CASE WHEN fate IS NULL THEN {_STAGE} ELSE 2 END, tokens, count(*) FROM (
    SELECT rollout, admitted,
        (SELECT fate FROM named n WHERE n.rollout = k.rollout ORDER BY offset, place LIMIT 1) AS fate,
        (SELECT number FROM rollouts r WHERE r.rollout = k.rollout ORDER BY partition, offset LIMIT 1) AS tokens
    FROM (
        SELECT rollout, 1 AS admitted FROM tasks GROUP BY rollout
        UNION ALL SELECT rollout, 0 AS admitted FROM named n
            WHERE NOT EXISTS (SELECT 1 FROM tasks a WHERE a.rollout = n.rollout) GROUP BY rollout
    ) k
) t GROUP BY 1, 2, 3, 4
"""
"""Everything that was admitted or got an outcome, so that an extra outcome does not balance."""
_PENDING_GROUPS = f"""
SELECT stage, count(*) FROM (
    SELECT grp, min({_STAGE}) AS stage FROM tasks t
    WHERE NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.grp = t.grp) GROUP BY grp
) GROUP BY stage
"""
_FILTERED_GROUPS = (
    f"SELECT reason, count(*) AS found FROM (SELECT grp, fate, reason, min(offset) FROM decided GROUP BY grp)"
    f" WHERE fate = {FILTERED} GROUP BY reason ORDER BY found DESC, reason"
)
_DECIDED_GROUPS = "SELECT fate, count(*) FROM (SELECT grp, fate, min(offset) FROM outcomes GROUP BY grp) GROUP BY fate"


def _count_fates(index: Index, said: Trimmed) -> _Fates:
    """Return the balances of rollouts and groups. Groups of which the log keeps only the number are added."""
    fates, stages, num_admitted = Counter[int](), Counter[int](), 0
    lengths = {name: Counter[int]() for name in (*OUTCOMES, "pending")}
    for admitted, fate, stage, tokens, count in index.rows(_ROLLOUTS):
        num_admitted += admitted * count
        fates[fate] += count
        if fate == PENDING:
            stages[stage] += count
        if tokens is not None and tokens >= 0:
            lengths[_NAMES[fate]][tokens] += count
    of_deleted = "SELECT fate, tokens, count(*) FROM all_named WHERE sequence < ? AND tokens >= 0 GROUP BY 1, 2"
    for fate, tokens, count in index.rows(of_deleted, (said.sequence,)):
        lengths[_NAMES[fate]][tokens] += count
    group_fates, group_stages = Counter(dict(index.rows(_DECIDED_GROUPS))), Counter(dict(index.rows(_PENDING_GROUPS)))
    return _Fates(
        rollouts=_balance(num_admitted, fates, stages, said.rollouts),
        groups=_balance(index.number("SELECT count(*) FROM admitted"), group_fates, group_stages, said.groups),
        lengths={name: _lengths(counts) for name, counts in lengths.items()},
    )


def _balance(admitted: int, fates: Counter[int], stages: Counter[int], counted: Mapping[str, int]) -> Balance:
    return Balance(
        admitted=admitted + sum(counted.values()),
        pending_by_stage={**{name: stages[i] for i, name in enumerate(STAGES[:3])}, "batched": fates[BATCHED]},
        **{name: fates[code] + counted.get(name, 0) for name, code in OUTCOMES.items()},
    )


def _lengths(counts: Mapping[int, int]) -> Lengths:
    """Return statistics of completion lengths. `counts`: length -> number of completions."""
    num = sum(counts.values())
    if not num:
        return Lengths(count=0)
    ordered = sorted(counts.items())

    def at(place: int) -> int:
        for tokens, count in ordered:
            if place < count:
                return tokens
            place -= count
        raise IndexError(place)

    def quantile(share: float) -> float:
        """Return the same as np.quantile."""
        place = (num - 1) * share
        low = int(place)
        below, above, weight = at(low), at(min(low + 1, num - 1)), place - low
        return float(above - (above - below) * (1 - weight) if weight >= 0.5 else below + (above - below) * weight)

    mean = sum(tokens * count for tokens, count in ordered) / num
    return Lengths(count=num, mean=mean, p50=quantile(0.5), p95=quantile(0.95))


# --------------------------------------------------------------------------------------------- promises


def _deleted(transport: Transport, said: Trimmed) -> list[str]:
    """Return a sentence for each topic whose records were deleted without a record on `control`."""
    topics = ("tasks", "rollouts", "verified", "batches", "outcomes")
    return [
        f"{topic}: {plural(count, 'offset')} at the beginning deleted of which `control` says nothing, "
        "expected all records; what they held cannot be counted"
        for topic, count in deleted_unsaid(transport, said, topics).items()
    ]


def _counted(index: Index, said: Trimmed) -> list[str]:
    """Compare the groups on `control` whose records are gone with their outcomes, which are kept."""
    sentences = []
    if sum(said.groups.values()) != said.sequence:
        sentences.append(f"control: trimmed counts {sum(said.groups.values()):,} groups, expected {said.sequence:,}")
    for what, told, table in (("group", said.groups, "decided"), ("rollout", said.rollouts, "all_named")):
        rows = index.rows(f"SELECT fate, count(*) FROM {table} WHERE sequence < ? GROUP BY fate", (said.sequence,))
        fates = dict(rows)
        for name, code in OUTCOMES.items():
            if (found := fates.get(code, 0)) != told.get(name, 0):
                sentences.append(
                    f"outcomes: {plural(found, f'{name} {what}')} below sequence {said.sequence}, expected "
                    f"{told.get(name, 0):,} as `trimmed` says"
                )
    return sentences


def _broken(index: Index) -> list[str]:
    """Return a problem for outcomes that are in force by their headers but cannot be decoded."""
    rows = index.rows(
        "SELECT why FROM broken WHERE offset NOT IN (SELECT offset FROM foreign_places WHERE topic = 'outcomes')"
        " ORDER BY offset"
    )
    return [why for (why,) in rows]


def _count_unreadable(index: Index, topic: str) -> int:
    return index.number(
        "SELECT count(*) FROM unreadable u WHERE topic = ? AND NOT EXISTS (SELECT 1 FROM foreign_places f"
        " WHERE f.topic = u.topic AND f.partition = u.partition AND f.offset = u.offset)",
        (topic,),
    )


_COUNTED = "SELECT share, number, count(*) AS found FROM all_batches WHERE kind != 2 GROUP BY share, number"
_ANNOUNCED = "SELECT share, number, max(count) AS told FROM manifests GROUP BY share, number"
_WRONG_SHARES = (
    f"SELECT a.share, a.number, coalesce(found, 0), told FROM ({_ANNOUNCED}) a LEFT JOIN ({_COUNTED}) c"
    " ON c.share = a.share AND c.number = a.number WHERE coalesce(found, 0) != told",
    f"SELECT c.share, c.number, found, NULL FROM ({_COUNTED}) c"
    " WHERE NOT EXISTS (SELECT 1 FROM manifests m WHERE m.share = c.share AND m.number = c.number)",
)
"""Shares of batches that have no manifest, or whose content differs from it."""


def _batches_against_steps(index: Index, steps: TrainingInForce, said: Trimmed, *, num_shares: int) -> list[str]:
    """Check that every version stands on whole batches."""
    sentences = []
    batches = range(said.version, steps.version)
    there = (
        "SELECT count(*) FROM (SELECT DISTINCT share, number FROM manifests"
        " WHERE share >= 0 AND share < ? AND number >= ? AND number < ?)"
    )
    num_there = index.number(there, (num_shares, batches.start, batches.stop))
    if num_absent := len(batches) * num_shares - num_there:
        one = "SELECT count(*) FROM manifests WHERE share = ? AND number = ?"
        batch, share = next(
            (batch, share) for batch in batches for share in range(num_shares) if not index.number(one, (share, batch))
        )
        sentences.append(
            f"batches: {plural(num_absent, 'manifest')} missing below version {steps.version}, first of "
            f"batch {batch}, share {share}"
        )
    wrong = [row for query in _WRONG_SHARES for row in index.rows(f"{query} ORDER BY 1, 2 LIMIT {NUM_EXAMPLES}")]
    sentences += [
        f"batches[{share}]: {plural(found, 'experience')} of batch {batch}, "
        f"expected {'a manifest' if told is None else told}"
        for share, batch, found, told in wrong[:NUM_EXAMPLES]
    ]
    trained = index.number(f"SELECT count(DISTINCT grp) FROM outcomes WHERE fate = {TRAINED}")
    trained += said.groups.get("trained", 0)
    if trained != steps.trained_groups:
        sentences.append(
            f"steps: {plural(steps.trained_groups, 'trained group')} by version {steps.version}, "
            f"expected {trained:,} as outcomes says"
        )
    return sentences
