"""The model of many explorers: numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks._scale_model import Costs, Plan, fit, load

COSTS = Costs(
    member_ms_per_s=2.0, commit_ms=5.0, replicas=3, kilobyte_ms=0.1, requests_per_s=20.0, requests_per_commit=5.0,
    client_commit_ms=6.0, member_bytes=1e6,
)  # fmt: skip
PLAN = Plan(explorers=100, partitions=400, places=10, rollout_s=20.0, rollout_tokens=1_000)


def use(seconds: float, broker: float, member: float, commits: int, rss: float, **requests: int) -> dict[str, object]:
    return {
        "seconds": seconds, "broker_cpu_s": broker, "member_cpu_s": member, "broker_rss_bytes": rss,
        "commits": commits, "requests": requests,
    }  # fmt: skip


def test_costs_are_what_lies_above_waiting() -> None:
    measured = {
        "members": 10,
        "brokers": 3,
        "ours": {
            "alone": use(5.0, 0.5, 0.0, 0, 1e9),
            "idle": use(10.0, 3.0, 2.0, 0, 1.1e9, Fetch=150, Heartbeat=200),
            "short": use(10.0, 8.0, 14.0, 1000, 1.2e9, Fetch=900, Produce=1000, EndTxn=1000) | {"num_tokens": 1000},
            "long": use(10.0, 10.0, 16.0, 500, 1.2e9, Fetch=900, Produce=500, EndTxn=500) | {"num_tokens": 2000},
        },
    }
    costs = fit(measured)
    assert costs.member_ms_per_s == pytest.approx(20.0)  # 0.3 - 0.1 cores, of 10 members
    assert costs.commit_ms == pytest.approx(5.0)  # 5 s for 1,000
    assert costs.kilobyte_ms == pytest.approx((14.0 - 5.0) / 9.0)  # 9 KB more each
    assert costs.requests_per_s == pytest.approx(3.5)
    assert costs.requests_per_commit == pytest.approx(2.0)
    assert costs.client_commit_ms == pytest.approx(14.0)
    assert costs.member_bytes == pytest.approx(1e7)
    mixed = fit(measured | {"bare": 5, "session_s": 40.0})
    # 200 ms of CPU a second for 35 counted requests and 5 bare members' heartbeats, one in 2 s each.
    assert mixed.requests_per_s == pytest.approx(35 / 5 + 1.5), "as they would be with a session of 10 s"
    assert mixed.member_ms_per_s == pytest.approx(200 / 37.5 * 8.5)


def test_what_is_finished_together_is_committed_together() -> None:
    found = load(PLAN, COSTS)
    assert found.rollouts_per_s == 50.0
    assert found.commits_per_s == pytest.approx(100 * 0.5 / 1.01)
    assert found.bytes_in_per_s == 50 * 9_000
    crowded = load(replace(PLAN, places=10_000), COSTS)
    assert crowded.commits_per_s < 100 / 0.02, "one transaction at a time"
    assert crowded.rollouts_per_s == 50_000.0


def test_markers_are_the_partitions_that_were_written_to() -> None:
    found = load(replace(PLAN, partitions=100), COSTS)
    assert found.markers_per_s == pytest.approx(2 * found.commits_per_s), "one partition each, and that of positions"


def test_cores_and_brokers() -> None:
    found = load(PLAN, COSTS)
    by_hand = (100 * 2.0 + found.commits_per_s * 5.0 + 450.0 * 0.1) / 1e3
    assert found.busy_cores == pytest.approx(by_hand)
    assert found.brokers_needed == 3
    assert found.connections == 100 * (4 + 2 * 3)
    more = load(PLAN, replace(COSTS, replicas=1))
    assert more.busy_cores - more.waiting_cores == pytest.approx(3 * (found.busy_cores - found.waiting_cores))
    assert load(replace(PLAN, explorers=10_000, partitions=40_000), COSTS).brokers_needed == 13


def test_explorers_without_a_partition_do_nothing() -> None:
    found = load(replace(PLAN, explorers=1_000), COSTS)
    assert found.idle_explorers == 600
    assert found.rollouts_per_s == load(replace(PLAN, explorers=400), COSTS).rollouts_per_s


def test_a_cache_on_a_host_reads_once() -> None:
    plan = replace(PLAN, weights_bytes=1e9, smaller=100.0, version_s=50.0, store_bytes_per_s=1e9)
    alone, shared = load(plan, COSTS), load(replace(plan, explorers_per_cache=8), COSTS)
    assert alone.delta_egress_per_s == 100 * 1e7 / 50
    assert alone.fetch_s == 1.0
    assert alone.staleness == 0.02
    assert shared.delta_egress_per_s == 13 * 1e7 / 50


def test_each_asks_for_its_own_positions() -> None:
    few, many = load(PLAN, COSTS), load(replace(PLAN, explorers=200, partitions=800), COSTS)
    assert many.positions_bytes == 2 * few.positions_bytes, "it grows with the partitions alone"


def test_a_longer_session_has_fewer_heartbeats() -> None:
    short, long = load(PLAN, COSTS), load(replace(PLAN, session_s=40.0), COSTS)
    assert short.coordinator_per_s - long.coordinator_per_s == pytest.approx(100 * (20 / 10 - 20 / 40))
    assert short.requests_per_s - long.requests_per_s == pytest.approx(100 * (20 / 10 - 20 / 40))
    assert long.waiting_cores == pytest.approx(short.waiting_cores * (20.0 - 1.5) / 20.0)
