"""deploy/prometheus: Prometheus takes its files, and every alert is tested, told and of metrics that there are."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from rftstream.metrics import REGISTRY
from rftstream.queries.curves.exported import EXPORTED
from tests.deploy.conftest import ROOT, read_yaml
from tests.suite.each import each

FOLDER = ROOT / "deploy" / "prometheus"
ALERTS = {rule["alert"]: rule for group in read_yaml(FOLDER / "alerts.yml")["groups"] for rule in group["rules"]}
TESTS = read_yaml(FOLDER / "alerts_test.yml")["tests"]


OF_PROCESSES = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def promtool(*arguments: str) -> None:
    run = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr


def test_prometheus_takes_its_config_and_the_alerts() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")


@pytest.mark.slow
def test_alerts_fire_when_they_must_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")


@each("alert", ALERTS)
def test_each_alert_is_tested_both_ways(alert: str) -> None:
    cases = [case for test in TESTS for case in test["alert_rule_test"] if case["alertname"] == alert]
    assert any(case.get("exp_alerts") for case in cases), "never seen firing"
    assert any(not case.get("exp_alerts") for case in cases), "never seen silent"


@each("alert", ALERTS)
def test_an_alert_leads_to_its_runbook(alert: str) -> None:
    page, _, anchor = ALERTS[alert]["annotations"]["runbook"].partition("#")
    assert anchor == alert.lower()
    headed = (ROOT / page).read_text(encoding="utf-8").partition("\n## Alerts\n")[2]
    told = headed.partition(f"\n### {alert}\n\n")[2].partition("\n### ")[0]
    assert len(told.strip().split("\n\n")) >= 2, "what it means, and what to do"


def test_each_runbook_is_of_an_alert() -> None:
    told = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").partition("\n## Alerts\n")[2]
    assert set(re.findall(r"^### (\w+)$", told, re.MULTILINE)) == set(ALERTS)


def series_names() -> set[str]:
    """Of all our metrics, as Prometheus has them."""
    names = {"up", *OF_PROCESSES}
    for metric in REGISTRY.collect():
        suffixes = SUFFIXES.get(metric.type, ("",))
        names |= {metric.name + suffix for suffix in suffixes}
    return names | {one.name for one in EXPORTED}


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:rftstream|process)_\w+", expression))


@each("alert", ALERTS)
def test_alerts_look_at_metrics_that_there_are(alert: str) -> None:
    assert names_in(ALERTS[alert]["expr"]) <= series_names()


def test_all_of_the_compose_file_is_scraped_where_it_listens(compose: dict[str, Any]) -> None:
    (job,) = read_yaml(FOLDER / "prometheus.yml")["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    workers = {
        name: service["command"] for name, service in compose["services"].items()
        if service.get("command", [""])[0] == "worker"
    }  # fmt: skip
    exporter = compose["services"]["exporter"]["command"]
    assert exporter[exporter.index("--port") + 1] == str(found["port"])
    assert set(found["names"]) == {*workers, "exporter"}
    for name, command in workers.items():
        assert command[command.index("--metrics-port") + 1] == str(found["port"])
        assert compose["services"][name]["expose"] == [str(found["port"])]
