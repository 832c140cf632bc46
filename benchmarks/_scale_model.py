"""What a number of explorers asks of brokers, object store and network: a model, fitted to what `scale.py` measured.

Nothing here is measured itself. `fit` takes the costs of one request, one commit and one byte out of scale.json; `load`
multiplies them by what a plan says. Everything is a pure function of numbers. docs/scale.md shows the results, and
`python -m benchmarks._scale_model` prints its tables.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parents[1] / "docs" / "measured" / "scale.json"
"""A copy of the scale.json of the benchmark with explorers alone."""
LARGE = MEASURED.with_name("scale-large.json")
"""What the costs are fitted to: a copy of the scale.json of a group that is too large for the machine, with bare
members."""

HEARTBEATS, MEASURED_SESSION_S = 20, 10.0
"""Of a member: heartbeats in a session time-out, and the session time-out that its costs are given for."""
LINGER_S = 0.02
"""So long a finished rollout waits for others, which then share a transaction."""
FOLLOWED = 3
"""Topics of one partition that every explorer reads: control, weights, outcomes."""
CLIENTS = 4
"""Clients of an explorer: its member, its producer, the reader of what it follows, and the one that asks."""
POSITION_BYTES = 24
"""Of a partition in the answer to a member that asks for positions; nothing finished out of order."""
JOIN_BYTES, OWNED_BYTES = 120, 4
"""Of a member's request to join, and for each partition that it names as its own."""
OUTCOME_BYTES = 400
"""Of a group of eight on `outcomes`, compressed, with its headers."""
TOKEN_BYTES = 9
"""Of a token in a rollout: id, logprob, mask."""
HEADROOM = 0.5
"""Share of a broker's cores that it should be busy at most, so that it also bears the loss of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one of each costs the brokers, all together, in CPU milliseconds of the machine that was measured."""

    member_ms_per_s: float
    """A member that waits: its heartbeats and fetches."""
    commit_ms: float
    """A transaction of one small rollout and its position, with all its requests, markers and replicas."""
    replicas: int
    """Number of these. Others are taken to cost in proportion, which is more than they do: a replica is fetched in
    larger pieces than it was written in."""
    kilobyte_ms: float
    """A KB of rollouts more in it."""
    requests_per_s: float
    """Requests of a member that waits."""
    requests_per_commit: float
    client_commit_ms: float
    """CPU of the explorer for a commit, waiting and fetching included."""
    member_bytes: float
    """Memory of the brokers for a member with its connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run at some size."""

    explorers: int
    partitions: int
    cores: int = 8
    """Of each broker."""
    replicas: int = 3
    places: int = 64
    """Rollouts that an explorer samples at once: `explorer.max_concurrent`."""
    rollout_s: float = 60.0
    rollout_tokens: int = 2_000
    group_size: int = 8
    lifetime_s: float = 24 * 3600.0
    """After so long an explorer is gone, and another one comes."""
    session_s: float = 10.0
    """`transport.session_timeout_s`."""
    version_s: float = 60.0
    """From one version of the weights to the next."""
    weights_bytes: float = 16e9
    smaller: float = 335.0
    """Times that a delta is smaller than the weights."""
    deltas: float = 10.0
    """Deltas that a late joiner applies beside an anchor: half of `weights.anchor_every`."""
    explorers_per_cache: int = 1
    """Explorers that read a version together, through one cache."""
    store_bytes_per_s: float = 10e9
    broker_hour: float = 0.40
    """Price of a broker, with its disk, for an hour; an assumption, as is the next one."""
    explorer_hour: float = 2.50
    """Price of an explorer's GPU for an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a plan asks for. Rates are those of all brokers together, but for the coordinator's."""

    commits_per_s: float
    rollouts_per_s: float
    requests_per_s: float
    markers_per_s: float
    """Records that end a transaction in a partition: one for each partition of `rollouts` that it wrote to, and one for
    that of `__consumer_offsets`."""
    bytes_in_per_s: float
    """Rollouts that are written, before they are replicated."""
    bytes_out_per_s: float
    """What brokers send: to verifiers, to replicas, and outcomes to every explorer."""
    outcomes_out_per_s: float
    """Of these, outcomes: one broker leads their one partition, and every explorer reads it."""
    connections: int
    busy_cores: float
    waiting_cores: float
    """Of these, what members cost that wait."""
    brokers_needed: int
    coordinator_per_s: float
    """Requests a second at the one broker that coordinates the group: heartbeats and positions."""
    coordinator_cores: float
    rebalances_per_hour: float
    positions_bytes: float
    """Sent by the coordinator when all explorers begin at once: each asks for the positions of its own partitions."""
    join_bytes: float
    """Sent to the group's leader in each round of a rebalance."""
    idle_explorers: int
    """Those that get no partition."""
    redone_s: float
    """Seconds for which a dead explorer's tasks wait before somebody else has them."""
    delta_egress_per_s: float
    anchor_egress_per_s: float
    fetch_s: float
    """Until all have a version that was just announced, where the store is the limit."""
    staleness: float
    """Versions that this adds."""
    cost_share: float
    """What the brokers cost, as a share of what explorers cost."""


PLAN = Plan(explorers=1_000, partitions=2_000)
"""The plan that docs/scale.md begins with; the others differ by what they name."""


@functools.cache
def costs() -> Costs:
    """Return the costs of the machine that docs/measured/scale-large.json was measured on."""
    return fit(json.loads(LARGE.read_text(encoding="utf-8")))


def fit(measured: Mapping[str, Any]) -> Costs:
    """Return the costs that a scale.json shows: what working members cost above waiting ones, and waiting ones above no
    members, shared out by requests. Those of bare members are their heartbeats."""
    members, ours = measured["members"], measured["ours"]
    bare, session_s = measured.get("bare", 0), measured.get("session_s", MEASURED_SESSION_S)
    alone, idle, short, long = (ours[name] for name in ("alone", "idle", "short", "long"))
    commit_ms = _commit_ms(short, idle, "broker_cpu_s")
    kilobytes = (long["num_tokens"] - short["num_tokens"]) * TOKEN_BYTES / 1e3
    transactional = ("Produce", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
    waiting_ms = 1e3 * (_cores(idle, "broker_cpu_s") - _cores(alone, "broker_cpu_s"))
    counted_per_s = sum(idle["requests"].values()) / idle["seconds"]
    request_ms = waiting_ms / (counted_per_s + bare * HEARTBEATS / session_s)
    requests_per_s = counted_per_s / (members - bare) + HEARTBEATS / MEASURED_SESSION_S - HEARTBEATS / session_s
    return Costs(
        member_ms_per_s=request_ms * requests_per_s,
        commit_ms=commit_ms,
        replicas=min(3, measured["brokers"]),
        kilobyte_ms=max(0.0, _commit_ms(long, idle, "broker_cpu_s") - commit_ms) / kilobytes,
        requests_per_s=requests_per_s,
        requests_per_commit=sum(short["requests"].get(name, 0) for name in transactional) / short["commits"],
        client_commit_ms=1e3 * short["member_cpu_s"] / short["commits"],
        member_bytes=(idle["broker_rss_bytes"] - alone["broker_rss_bytes"]) / members,
    )


def figures(found: Mapping[str, Any], members: int) -> dict[tuple[str, str], float]:
    """Return the figures of one kind of members in a scale.json: what, unit -> value."""
    alone, idle, short, long = (found[name] for name in ("alone", "idle", "short", "long"))
    waiting = _cores(idle, "broker_cpu_s") - _cores(alone, "broker_cpu_s")
    bare, explorers = found.get("bare", 0), members - found.get("bare", 0)
    result: dict[tuple[str, str], float] = {
        ("topics made", "s"): found["topics_s"],
        ("all join", "s"): found["join_all_s"],
        ("commits, of 9 KB each", "transactions/s"): short["commits"] / short["seconds"],
        ("commits, of 72 KB each", "transactions/s"): long["commits"] / long["seconds"],
        ("a commit, from done to on the log", "ms"): 1e3 * found["commit_s"],
        ("a member that waits", "requests/s"): sum(idle["requests"].values()) / idle["seconds"] / explorers,
        ("a member that waits, brokers", "ms CPU/s"): 1e3 * waiting / members,
        ("a member that waits, itself", "ms CPU/s"): 1e3 * _cores(idle, "member_cpu_s") / explorers,
        ("a commit of 9 KB, brokers", "ms CPU"): _commit_ms(short, idle, "broker_cpu_s"),
        ("a commit of 9 KB, all of the member", "ms CPU"): 1e3 * short["member_cpu_s"] / max(1, short["commits"]),
        ("connections to the brokers", "count"): idle["connections"],
        ("memory of the brokers", "MB"): long["broker_rss_bytes"] / 1e6,
    }
    if bare:
        result["a bare member, itself", "ms CPU/s"] = 1e3 * _cores(idle, "bare_cpu_s") / bare
    for count, one in found["churn"].items():
        result |= {
            (f"{count} killed", "s"): one["killed_s"],
            (f"{count} join", "s"): one["joined_s"],
            (f"{count} join, first work, median", "s"): statistics.median(one["first_work_s"]),
        }
    return result


def _cores(one: Mapping[str, Any], name: str) -> float:
    return float(one[name]) / float(one["seconds"])


def _commit_ms(busy: Mapping[str, Any], idle: Mapping[str, Any], name: str) -> float:
    """Return what a commit costs above what the members cost that wait."""
    return 1e3 * (_cores(busy, name) - _cores(idle, name)) * float(busy["seconds"]) / max(1.0, float(busy["commits"]))


def load(plan: Plan, cost: Costs) -> Load:
    """Return what the plan asks for."""
    working = min(plan.explorers, plan.partitions)
    rollouts_per_s = working * plan.places / plan.rollout_s
    own_rate = plan.places / plan.rollout_s
    # An explorer makes one transaction at a time: what is finished while it lingers shares the next one.
    commits_per_s = working * own_rate / (1.0 + own_rate * LINGER_S)
    per_commit = rollouts_per_s / commits_per_s
    owned = plan.partitions / working
    touched = owned * (1.0 - (1.0 - 1.0 / owned) ** per_commit)
    bytes_in = rollouts_per_s * plan.rollout_tokens * TOKEN_BYTES
    outcomes_out = rollouts_per_s / plan.group_size * OUTCOME_BYTES * plan.explorers
    beats_per_s = HEARTBEATS / plan.session_s
    waiting_per_s = cost.requests_per_s - HEARTBEATS / MEASURED_SESSION_S + beats_per_s
    requests = plan.explorers * waiting_per_s + commits_per_s * cost.requests_per_commit
    rollout_ms = cost.commit_ms * commits_per_s + cost.kilobyte_ms * bytes_in / 1e3
    request_ms = cost.member_ms_per_s / cost.requests_per_s
    waiting_cores = plan.explorers * waiting_per_s * request_ms / 1e3
    busy_cores = waiting_cores + rollout_ms / 1e3 * plan.replicas / cost.replicas
    coordinator = plan.explorers * beats_per_s + commits_per_s
    readers = math.ceil(plan.explorers / plan.explorers_per_cache)
    delta_bytes = plan.weights_bytes / plan.smaller
    joins_per_s = plan.explorers / plan.lifetime_s
    positions_bytes = float(plan.partitions) * POSITION_BYTES
    fetch_s = readers * delta_bytes / plan.store_bytes_per_s
    brokers = max(plan.replicas, math.ceil(busy_cores / (plan.cores * HEADROOM)))
    return Load(
        commits_per_s=commits_per_s,
        rollouts_per_s=rollouts_per_s,
        requests_per_s=requests,
        markers_per_s=commits_per_s * (touched + 1.0),
        bytes_in_per_s=bytes_in,
        bytes_out_per_s=bytes_in * plan.replicas + outcomes_out,
        outcomes_out_per_s=outcomes_out,
        connections=round(plan.explorers * (CLIENTS + 2 * min(brokers, owned))),
        busy_cores=busy_cores,
        waiting_cores=waiting_cores,
        brokers_needed=brokers,
        coordinator_per_s=coordinator,
        coordinator_cores=coordinator * request_ms / 1e3,
        rebalances_per_hour=2.0 * joins_per_s * 3600.0,
        positions_bytes=positions_bytes,
        join_bytes=float(plan.explorers * JOIN_BYTES + plan.partitions * OWNED_BYTES),
        idle_explorers=plan.explorers - working,
        redone_s=plan.session_s,
        delta_egress_per_s=readers * delta_bytes / plan.version_s,
        anchor_egress_per_s=joins_per_s * (plan.weights_bytes + plan.deltas * delta_bytes),
        fetch_s=fetch_s,
        staleness=fetch_s / plan.version_s,
        cost_share=brokers * plan.broker_hour / (plan.explorers * plan.explorer_hour),
    )
