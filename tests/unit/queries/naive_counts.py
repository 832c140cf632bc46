"""What an audit counts, in the simplest way: dicts over all decoded records, without an index. It checks the audit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.queries.audits.balance import AuditReport, Balance
from rftstream.queries.curves.history import read_history
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.transport.base import Transport


def naive_counts(transport: Transport) -> tuple[Balance, Balance, dict[str, list[int]]]:
    """Groups, rollouts, and the completion lengths by outcome. Of a log that does not grow meanwhile, without twins."""
    log, said = Log(transport), read_control(transport).deleted
    current = read_history(log).current
    version = 0 if current is None else current.name.version
    tasks: dict[str, Task] = {}
    there: dict[str, set[str]] = {"rollouts": set(), "verified": set()}
    tokens: dict[str, int] = {}
    of_rollouts: dict[str, str] = {}
    of_groups: dict[str, str] = {}
    gone: list[tuple[str, int]] = []
    for topic in ("outcomes", "verified", "rollouts", "tasks"):
        for _, message in log.in_force(topic):
            match message:
                case GroupOutcome():
                    fate = _fate(message, version)
                    rollouts = {one.rollout_id: _fate_of(one, message, fate) for one in message.rollouts}
                    if message.sequence < said.sequence:
                        lengths = {one.rollout_id: one.num_tokens for one in message.rollouts if _is_sampled(one)}
                        gone += [(rollouts[name], length) for name, length in lengths.items()]
                        continue
                    of_rollouts |= rollouts
                    if not message.late:
                        of_groups[message.group_id] = fate
                case Task() | Rollout() | VerifiedRollout() if message.ids.sequence >= said.sequence:
                    if isinstance(message, Task):
                        tasks[message.ids.rollout_id] = message
                        continue
                    there[topic].add(message.ids.rollout_id)
                    if isinstance(message, Rollout) and _is_sampled(message):
                        tokens[message.ids.rollout_id] = message.num_tokens
                case _:
                    pass
    stages = {name: 2 if name in there["verified"] else 1 if name in there["rollouts"] else 0 for name in tasks}
    group_stages: dict[str, int] = {}
    for name, task in tasks.items():
        group_stages[task.ids.group_id] = min(stages[name], group_stages.get(task.ids.group_id, 2))
    lengths = [(of_rollouts.get(name, "pending"), count) for name, count in tokens.items()] + gone
    by_outcome: dict[str, list[int]] = {}
    for fate, count in sorted(lengths):
        by_outcome.setdefault("pending" if fate == "batched" else fate, []).append(count)
    return _balance(group_stages, of_groups, said.groups), _balance(stages, of_rollouts, said.rollouts), by_outcome


def _is_sampled(one: Any) -> bool:
    return str(one.status) not in ("skipped", "undecodable")


def _fate(outcome: GroupOutcome, version: int) -> str:
    if outcome.result is not GroupResult.batched:
        return str(outcome.result)
    return "trained" if outcome.batch_sequence is not None and outcome.batch_sequence < version else "batched"


def _fate_of(one: RolloutSummary, outcome: GroupOutcome, fate: str) -> str:
    if outcome.result is not GroupResult.batched:
        return fate
    if outcome.late:
        return "expired"
    if one.rejected is not None:
        return "filtered"
    return fate if one.reason is None and one.reward is not None else "dead"


def _balance(stages: dict[str, int], fates: dict[str, str], said: dict[str, int]) -> Balance:
    counts = Counter(fates.values()) + Counter(said)
    waiting = Counter(stage for name, stage in stages.items() if name not in fates)
    return Balance(
        admitted=len(stages) + sum(said.values()),
        pending_by_stage={"to_be_sampled": waiting[0], "sampled": waiting[1], "verified": waiting[2],
                          "batched": counts["batched"]},
        trained=counts["trained"], expired=counts["expired"], filtered=counts["filtered"], dead=counts["dead"],
    )  # fmt: skip


def check_counts(report: AuditReport, transport: Transport) -> None:
    """Assert that the report counts what is there."""
    groups, rollouts, lengths = naive_counts(transport)
    assert (report.groups, report.rollouts) == (groups, rollouts)
    found = {name: (one.count, one.mean, one.p50, one.p95) for name, one in report.lengths.items() if one.count}
    assert found == {
        name: (len(some), np.mean(some), np.percentile(some, 50), np.percentile(some, 95))
        for name, some in lengths.items()
    }
