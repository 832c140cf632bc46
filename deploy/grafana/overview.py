"""The dashboard dashboards/overview.json, as a table of panels: what an operator asks, the queries, the unit.

    python deploy/grafana/overview.py     writes the JSON

A test holds the two together and runs every query against a Prometheus that scraped a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dashboards" / "overview.json"
COLUMNS = 3
HEIGHT = 8
RUN = '{run=~"$run"}'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    title: str
    queries: tuple[tuple[str, str], ...]
    """PromQL and legend. RUN stands for the selection of the run, RATE for the time that rates are taken over."""
    about: str = ""
    unit: str = "short"
    stacked: bool = False


def train(metric: str, legend: str | None = None) -> tuple[str, str]:
    return f'max by (run) (rftstream_train{{metric="{metric}", run=~"$run"}})', legend or metric


def seconds(name: str, share: float) -> tuple[str, str]:
    rate = f"sum by (role, le) (rate({name}_bucket{RUN}{RATE}))"
    return f"histogram_quantile({share}, {rate})", f"{{{{role}}}} p{share * 100:.0f}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward", (train("reward"),), "Of all scored rollouts of groups decided since the step before."),
        Panel(
            "Evaluations",
            (('max by (evaluation, metric) (rftstream_evaluation{metric=~"mean|pass@.+", run=~"$run"})',
              "{{evaluation}} {{metric}}"),),
        ),
        Panel("Version", ((f"max by (role) (rftstream_policy_version{RUN})", "{{role}}"),),
              "Trained, and sampled with: the gap is staleness in the making."),
        Panel("Loss", (train("loss"),)),
        Panel("Gradient norm", (train("grad_norm"),), "Before clipping."),
        Panel("Entropy and length", (train("entropy"), train("length_mean", "tokens of a rollout"))),
    ),
    "Flow": (
        Panel("Steps a minute", ((f"60 * sum by (result) (rate(rftstream_steps_total{RUN}{RATE}))", "{{result}}"),),
              "Skipped ones gave a NaN or an infinite value."),
        Panel("Sampled tokens a second", ((f"sum(rate(rftstream_sampled_tokens_total{RUN}{RATE}))", "tokens/s"),)),
        Panel("Staleness of a batch",
              (train("staleness_mean", "mean"), train("staleness_max", "max"),
               (f"max by (run) (rftstream_max_staleness{RUN})", "bound")), "In versions."),
        Panel("Backlog by role", ((f"max by (role) (rftstream_backlog_rollouts{RUN})", "{{role}}"),),
              "Rollouts whose next step is this role's.", stacked=True),
        Panel("In flight", ((f"sum by (role) (rftstream_in_hand{RUN})", "{{role}}"),), "Taken, and not yet committed."),
        Panel("Rollouts a second", ((f"sum by (status) (rate(rftstream_rollouts_total{RUN}{RATE}))", "{{status}}"),),
              stacked=True),
        Panel("Groups a second by outcome", ((f"sum by (result) (rate(rftstream_groups_total{RUN}{RATE}))",
                                              "{{result}}"),), stacked=True),
        Panel("Verdicts a second", ((f"sum by (result) (rate(rftstream_verdicts_total{RUN}{RATE}))", "{{result}}"),),
              "Scored, or why not.", stacked=True),
        Panel("Dead letters", ((f"sum by (role, reason) (rftstream_dead_letters_total{RUN})", "{{role}}: {{reason}}"),),
              "Since the processes began."),
    ),
    "Times": (
        Panel("Publishing and taking over weights",
              (seconds("rftstream_weights_seconds", 0.5), seconds("rftstream_weights_seconds", 0.95)), unit="s"),
        Panel("Held up by weights",
              (seconds("rftstream_held_up_seconds", 0.5), seconds("rftstream_held_up_seconds", 0.95)),
              "For so long training or sampling stood still for a version.", unit="s"),
        Panel("A step of the trainer", (train("step_s", "training"), train("wait_s", "waiting for a batch"),
                                        train("publish_s", "publishing")), unit="s", stacked=True),
        Panel("Commits", (seconds("rftstream_commit_seconds", 0.95),), unit="s"),
    ),
    "Processes": (
        Panel("Up by role", (('sum by (job) (up{job=~"feeder|explorer|verifier|buffer|trainer|evaluator|synthesiser", '
                              'run=~"$run"})', "{{job}}"),)),
        Panel("CPU by role", ((f"sum by (job) (rate(process_cpu_seconds_total{RUN}{RATE}))", "{{job}}"),),
              "Cores; children of verifiers not counted."),
        Panel("Memory by role", ((f"sum by (job) (process_resident_memory_bytes{RUN})", "{{job}}"),), unit="bytes"),
        Panel("Restarts in the last hour",
              ((f"sum by (job) (changes(process_start_time_seconds{RUN}[1h]))", "{{job}}"),)),
        Panel("Transactions a second",
              ((f"sum by (role, result) (rate(rftstream_transactions_total{RUN}{RATE}))", "{{role}} {{result}}"),)),
        Panel("Room on the disk", ((f"min by (run) (rftstream_disk_free_bytes{RUN})", "free"),), unit="bytes"),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """As Grafana loads it."""
    panels: list[dict[str, Any]] = []
    width, y = 24 // COLUMNS, 0
    for row, members in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(members):
            column = index % COLUMNS
            place = {"x": column * width, "y": y + index // COLUMNS * HEIGHT, "w": width, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        y += -(-len(members) // COLUMNS) * HEIGHT
    return {
        "uid": "rftstream-overview",
        "title": "rftstream: overview",
        "tags": ["rftstream"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_choice(), _run_choice()]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"lineWidth": 1, "fillOpacity": 20 if panel.stacked else 0, "showPoints": "auto",
              "stacking": {"mode": "normal" if panel.stacked else "none"}}  # fmt: skip
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"},
                    "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _datasource_choice() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _run_choice() -> dict[str, Any]:
    """Metrics of containers have no run: all of them are those of the one that there is."""
    query = "label_values(rftstream_step_seconds_count, run)"
    return {
        "name": "run", "type": "query", "label": "Run", "refresh": 2, "includeAll": True, "allValue": ".*",
        "multi": False, "current": {"text": "All", "value": "$__all"}, "query": {"query": query, "refId": "run"},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
    }  # fmt: skip


def to_json() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(to_json(), encoding="utf-8")
    print(FILE)
