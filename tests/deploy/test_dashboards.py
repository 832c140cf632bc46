"""The dashboards: generated, of metrics that there are, as Grafana takes them; and every query of a panel or an alert
has data when Prometheus scrapes a real run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from deploy.grafana import draw
from tests.deploy.conftest import ROOT
from tests.deploy.prometheus_server import Prometheus
from tests.deploy.test_prometheus import ALERTS, names_in, series_names
from tests.e2e.workplace import EXAMPLES, Workplace, sets
from tests.suite.each import each

FOLDER = ROOT / "deploy" / "grafana"
NAMES = ("explorers", "learning", "log", "overview", "people", "trainer", "verifiers")
BOARDS = {name: json.loads((FOLDER / "dashboards" / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES}
PANELS = {
    f"{name}: {panel['title']}": panel for name, board in BOARDS.items() for panel in board["panels"]
    if panel["type"] != "row"
}  # fmt: skip
UNITS = {"short", "s", "bytes", "Bps", "cps", "cpm", "percentunit"}
NOTHING_TO_TIME = {"explorers: A call of an environment"}
"""Panels whose query answers with series that have no number in a run whose environment has but one turn."""
NOT_IN_THIS_RUN = {
    "rftstream_evaluation{metric=\"canary\"}", 'rftstream_train{metric=~"metric/.+[.]apart"}',
    'rftstream_synthesised_total{result!="admitted"}', "rftstream_synthesised_total", "rftstream_server_up",
    'rftstream_server_requests_total{result="answered"}', "rftstream_lost_offsets_total", "rftstream_run_lost_offsets",
}  # fmt: skip
"""What alerts look at that only runs with a canary, a second reward, a synthesiser, a served model or lost records
have."""
SERVED = {panel["title"] for panel in BOARDS["explorers"]["panels"] if "rftstream_server_" in str(panel.get("targets"))}
"""Panels of runs with a served model."""


def test_there_is_a_file_for_each() -> None:
    """That their text is up to date, tests/docs/test_extending.py holds."""
    assert set(NAMES) == {path.stem for path in (FOLDER / "dashboards").iterdir()}
    assert len({board["uid"] for board in BOARDS.values()}) == len(NAMES)


@each("name", NAMES)
def test_panels_do_not_overlap_and_are_as_grafana_takes_them(name: str) -> None:
    board = BOARDS[name]
    assert board["schemaVersion"] == 39 and board["description"]
    assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "run"]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] in ("row", "timeseries", "stat")
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"] in draw.UNITS
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


@each("title", PANELS)
def test_a_panel_says_what_it_tells_of_metrics_that_there_are(title: str) -> None:
    panel = PANELS[title]
    assert len(panel["description"]) > 15 and panel["description"].endswith((".", "?"))
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS
    for target in panel["targets"]:
        assert 'run=~"$run"' in target["expr"]
        assert names_in(target["expr"]) or "(up{" in target["expr"]
        assert names_in(target["expr"]) <= series_names()
        assert unit_of(target["expr"]) in (None, unit), target["expr"]


def unit_of(query: str) -> str | None:
    """Return the unit that a query must have by the names in it; None if they do not say."""
    if query.startswith(("histogram_quantile(", "time() - ")):
        return "s"
    if "_bytes" in query:
        return "Bps" if "rate(" in query else "bytes"
    if " / " in query or re.search(r'metric="[^"]+_share"', query):
        return "percentunit"
    if re.search(r'metric="(step|wait|publish)_s"', query):
        return "s"
    return None


def test_a_metric_that_there_is_not_is_seen() -> None:
    assert names_in("rate(rftstream_no_such_total[5m]) / rftstream_in_hand") - series_names() == {
        "rftstream_no_such_total"
    }
    assert names_in("histogram_quantile(0.5, rate(rftstream_rollout_seconds_bucket[5m]))") <= series_names()
    assert not names_in("rftstream_rollout_seconds") <= series_names(), "that has buckets, a sum and a count"


def test_grafana_is_given_the_dashboards_and_its_prometheus(compose: dict[str, Any]) -> None:
    mounts = dict(reversed(mount.removesuffix(":ro").split(":")) for mount in compose["services"]["grafana"]["volumes"])
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "rftstream.yml").read_text())["providers"]
    assert (ROOT / mounts[provider["options"]["path"]] / "overview.json").is_file()


def selectors_in(expression: str) -> set[str]:
    """Return the metrics of an expression with what is asked of their labels."""
    return set(re.findall(r"\b(?:rftstream|process)_\w+(?:\{[^}]*\})?|\bup\{[^}]*\}", expression))


@pytest.mark.sampled(1, "deployed")
@pytest.mark.slow
def test_every_panel_and_alert_sees_something_of_a_run(place: Workplace) -> None:
    run_file = (EXAMPLES / "arithmetic.toml").read_text(encoding="utf-8")
    place.write("sums.toml", f'{run_file}\n[feedback]\nshare = 0.05\nask = "label"\n')
    place.start(
        "run", "sums.toml", "--run-dir", "sums", "--progress", "none",
        *sets("run.steps=1000000", "evaluations.sums.every=2", "feeder.groups_per_batch=4"),
    )  # fmt: skip
    run = place.view("sums")
    exporter = place.start("exporter", "sums", "--port", "0", "--every-s", "1")
    address = place.wait_for(lambda: re.search(r"^http://([^/]+)/", exporter.out), "the exporter's address")
    beside = place.write("exporter.json", json.dumps([{"targets": [address.group(1)], "labels": {"job": "exporter"}}]))
    prometheus = Prometheus(place, place.folder / "sums" / "targets.json", beside,
                            rules=[ROOT / "deploy" / "prometheus" / "alerts.yml"])  # fmt: skip
    rollout = place.wait_for(lambda: run.verified(), "a rollout to vote on")[0].ids.rollout_id
    place.write_lines("votes.jsonl", [{"rollout": rollout, "by": "ada", "label": 1.0}])
    voted = place.look("feedback", "add", "sums", "--from", "votes.jsonl")
    assert voted.code == 0, voted.err

    queries = {
        (title, target["expr"].replace("$run", "sums").replace("$__rate_interval", "5m"))
        for title, panel in PANELS.items() for target in panel["targets"] if panel["title"] not in SERVED
    }  # fmt: skip
    watched = {selector for rule in ALERTS.values() for selector in selectors_in(rule["expr"])}
    assert watched > NOT_IN_THIS_RUN, "a name that is left out is still looked at"
    queries |= {(f"alerts: {selector}", selector) for selector in watched - NOT_IN_THIS_RUN}
    empty = set(queries)

    def all_have_data() -> bool:
        for title, query in list(empty):
            if prometheus.series(query) if title in NOTHING_TO_TIME else prometheus.values(query):
                empty.discard((title, query))
        return not empty

    try:
        place.wait_for(all_have_data, "data for every query")
    except AssertionError as error:
        raise AssertionError(f"no data for {empty}\n{error}") from None
    for name, board in BOARDS.items():
        picture = draw.draw(board, prometheus.url, "sums", 5)
        drawn = {axes.get_title(): [text.get_text() for text in axes.texts] for axes in picture.axes}
        assert drawn.keys() == {panel["title"] for panel in board["panels"] if panel["type"] != "row"}
        empty_ones = {f"{name}: {title}" for title, texts in drawn.items() if "No data" in texts}
        assert empty_ones <= NOTHING_TO_TIME | {f"{name}: {title}" for title in SERVED}
    place.wait_for(lambda: prometheus.values('sum(up{run="sums"})') == [6], "an answer of every process")
    assert prometheus.values('sum(rftstream_dead_letters_total{run="sums"})') == [0]
    assert prometheus.values('count({__name__=~".+", run!="sums", job!="exporter"})') == []

    def evaluated() -> bool:
        rules = prometheus.rules()
        return len(rules) == len(ALERTS) and all(rule["health"] == "ok" for rule in rules)

    place.wait_for(evaluated, "an evaluation of every alert")
    asked = BOARDS["overview"]["templating"]["list"][1]["query"]["query"]
    selector = re.fullmatch(r"label_values\((.+), run\)", asked)
    assert selector is not None
    assert prometheus.values_of("run", selector[1]) == ["sums"]
