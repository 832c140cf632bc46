"""What docs/scale.md says of many explorers: measured by `make bench ONLY=scale` (docs/measured/scale.json), or
computed by the model that is fitted to it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks._scale_model import LARGE, MEASURED, PLAN, Load, Plan, costs, figures, load
from pages.markdown import table

PLANS = {
    "200": replace(PLAN, explorers=200, partitions=1_000),
    "1,000": PLAN,
    "10,000": replace(PLAN, explorers=10_000, partitions=20_000),
    "10,000, set for it": replace(
        PLAN,
        explorers=1_250,
        partitions=2_500,
        places=512,
        session_s=30.0,
        explorers_per_cache=1,
        explorer_hour=8 * PLAN.explorer_hour,
    ),
}
"""The heads of the table's columns -> plans. The last one has the engines of the one before, eight to an explorer."""


def measured() -> str:
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    columns = {kind: figures(found[kind], found["members"]) for kind in ("ours", "by hand") if kind in found}
    first = next(iter(columns.values()))
    heads = {"ours": "explorers", "by hand": "by hand, with kafka-python"}
    return table(
        ("what", "unit", *(heads[kind] for kind in columns)),
        [(what, unit, *(_shown(one[what, unit]) for one in columns.values())) for what, unit in first],
    )


def measured_on() -> str:
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    return textwrap.fill(
        f"{found['members']} members in one group, {found['partitions']:,} partitions of each topic, "
        f"{_brokers(found['brokers'])}, "
        f"{found['cores']} cores for brokers and members together, which others used as well: the 1-minute load was "
        f"about {found['load']:.0f}. Times are upper bounds; CPU of brokers and members is what they used themselves.",
        120,
    )


def large() -> str:
    """Return the figures of a group of which most members are bare."""
    found = json.loads(LARGE.read_text(encoding="utf-8"))
    return table(
        ("what", "unit", f"{found['members']} members"),
        [(what, unit, _shown(value)) for (what, unit), value in figures(found["ours"], found["members"]).items()],
    )


def large_on() -> str:
    found = json.loads(LARGE.read_text(encoding="utf-8"))
    return textwrap.fill(
        f"{found['members']} members in one group, of which {found['bare']} are bare and "
        f"{found['members'] - found['bare']} are explorers; {found['partitions']:,} partitions of each topic; "
        f"{_brokers(found['brokers'])}; `session_timeout_s = {found['session_s']:g}`; {found['cores']} cores for all, "
        f"with a 1-minute load of {found['load']:.0f} before.",
        120,
    )


def _brokers(count: int) -> str:
    return "one broker" if count == 1 else f"{count} brokers"


def fitted() -> str:
    cost = costs()
    return table(
        ("cost", "fitted"),
        [
            ("brokers, for a member that waits", f"{cost.member_ms_per_s:.2f} ms of CPU a second"),
            ("brokers, for a transaction of 9 KB", f"{cost.commit_ms:.1f} ms of CPU"),
            ("brokers, for a KB more", f"{1e3 * cost.kilobyte_ms:.0f} µs of CPU"),
            ("requests of a member that waits", f"{cost.requests_per_s:.1f} a second"),
            ("requests of a transaction", f"{cost.requests_per_commit:.1f}"),
            ("brokers' memory for a member", f"{cost.member_bytes / 1e3:.0f} KB"),
            ("explorer, for a transaction, all in all", f"{cost.client_commit_ms:.1f} ms of CPU"),
        ],
    )


def modelled() -> str:
    loads = {name: load(plan, costs()) for name, plan in PLANS.items()}
    plans: dict[str, Callable[[Plan], str]] = {
        "explorers": lambda one: f"{one.explorers:,}",
        "partitions": lambda one: f"{one.partitions:,}",
        "rollouts at once in each": lambda one: str(one.places),
    }
    rows: dict[str, Callable[[Load], str]] = {
        "rollouts a second": lambda one: _shown(one.rollouts_per_s),
        "transactions a second": lambda one: _shown(one.commits_per_s),
        "requests a second": lambda one: _shown(one.requests_per_s),
        "transaction markers a second": lambda one: _shown(one.markers_per_s),
        "written, before replicas": lambda one: _size(one.bytes_in_per_s) + "/s",
        "sent by brokers": lambda one: _size(one.bytes_out_per_s) + "/s",
        "... of these outcomes, by one broker": lambda one: _size(one.outcomes_out_per_s) + "/s",
        "connections": lambda one: _shown(one.connections),
        "brokers' cores that are busy": lambda one: _shown(one.busy_cores),
        "... of these for members that wait": lambda one: _shown(one.waiting_cores),
        "brokers of 8 cores, at half of these": lambda one: str(one.brokers_needed),
        "requests a second at the coordinator": lambda one: _shown(one.coordinator_per_s),
        "... its busy cores": lambda one: _shown(one.coordinator_cores),
        "rebalances an hour": lambda one: _shown(one.rebalances_per_hour),
        "sent to the leader in each round": lambda one: _size(one.join_bytes),
        "positions sent when all begin": lambda one: _size(one.positions_bytes),
        "tasks of a dead one wait": lambda one: f"{one.redone_s:g} s",
        "store, deltas": lambda one: _size(one.delta_egress_per_s) + "/s",
        "store, anchors for late ones": lambda one: _size(one.anchor_egress_per_s) + "/s",
        "until all have a new version": lambda one: f"{_shown(one.fetch_s)} s",
        "versions of staleness for that": lambda one: _shown(one.staleness),
        "brokers' price beside engines'": lambda one: f"{100 * one.cost_share:.2g} %",
    }
    lines: list[tuple[Any, ...]] = [(name, *(show(plan) for plan in PLANS.values())) for name, show in plans.items()]
    lines += [(name, *(show(one) for one in loads.values())) for name, show in rows.items()]
    return table(("", *loads), lines)


def _shown(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{_shown(value)} {unit}"
        value /= 1000
    return f"{_shown(value)} TB"
