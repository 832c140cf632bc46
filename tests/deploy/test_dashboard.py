"""The dashboard: generated, of metrics that there are, and every query has data when Prometheus scrapes a real run."""

from __future__ import annotations

import json
import math
import re
import runpy
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import ROOT
from tests.deploy.test_prometheus import names_in, series_names
from tests.e2e.workplace import EXAMPLES, Workplace, sets

FOLDER = ROOT / "deploy" / "grafana"
OVERVIEW = json.loads((FOLDER / "dashboards" / "overview.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in OVERVIEW["panels"] if panel["type"] != "row"]
OF_PROCESSES = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path)
    try:
        yield workplace
    finally:
        workplace.end()


def test_the_json_is_up_to_date() -> None:
    written = (FOLDER / "dashboards" / "overview.json").read_text(encoding="utf-8")
    assert runpy.run_path(str(FOLDER / "overview.py"))["to_json"]() == written, "run python deploy/grafana/overview.py"


def test_panels_are_of_metrics_that_there_are_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in OVERVIEW["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert names_in(target["expr"]) <= series_names() | OF_PROCESSES, panel["title"]
    ids = [panel["id"] for panel in OVERVIEW["panels"]]
    assert len(set(ids)) == len(ids)


def test_grafana_is_given_the_dashboard_and_its_prometheus(compose: dict[str, Any]) -> None:
    mounts = dict(reversed(mount.removesuffix(":ro").split(":")) for mount in compose["services"]["grafana"]["volumes"])
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "rftstream.yml").read_text())["providers"]
    assert (ROOT / mounts[provider["options"]["path"]] / "overview.json").is_file()


class Prometheus:
    """A real one, that reads the targets of a run as docs/operations.md says."""

    def __init__(self, place: Workplace, *targets: Path) -> None:
        told = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
        block = next(part for part in told.split("```yaml\n")[1:] if part.startswith("scrape_configs:"))
        config = yaml.safe_load(block.partition("```")[0])
        config["scrape_configs"][0]["file_sd_configs"][0]["files"] = list(map(str, targets))
        config["global"] = {"scrape_interval": "1s"}
        file = place.write("prometheus.yml", yaml.safe_dump(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.process = place.start(
            f"--config.file={file}", f"--storage.tsdb.path={place.folder / 'tsdb'}", "--log.level=warn",
            f"--web.listen-address={self.url.removeprefix('http://')}", command=("prometheus",),
        )  # fmt: skip

    def values(self, query: str) -> list[float]:
        """Those that are numbers, now; none while it does not answer yet."""
        asked = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=120) as answer:
                found = json.loads(answer.read())["data"]["result"]
        except ConnectionError:
            return []
        except urllib.error.HTTPError as error:
            assert error.code == 503, f"{query}: {error.read().decode()}"  # that is while it starts
            return []
        except urllib.error.URLError:
            assert self.process.alive, self.process.err
            return []
        return [float(one["value"][1]) for one in found if not math.isnan(float(one["value"][1]))]


@pytest.mark.slow
def test_every_panel_shows_something_of_a_run(place: Workplace) -> None:
    place.start(
        "run", EXAMPLES / "arithmetic.toml", "--run-dir", "sums", "--progress", "none",
        *sets("run.steps=1000000", "evaluations.sums.every=2", "feeder.groups_per_batch=4"),
    )  # fmt: skip
    place.view("sums")
    exporter = place.start("exporter", "sums", "--port", "0")
    address = place.wait_for(lambda: re.search(r"^http://([^/]+)/", exporter.out), "the exporter's address")
    beside = place.write("exporter.json", json.dumps([{"targets": [address.group(1)], "labels": {"job": "exporter"}}]))
    prometheus = Prometheus(place, place.folder / "sums" / "targets.json", beside)
    queries = {
        target["expr"].replace("$run", "sums").replace("$__rate_interval", "20s")
        for panel in PANELS for target in panel["targets"]
    }  # fmt: skip
    empty = set(queries)

    def all_have_data() -> bool:
        empty.difference_update([query for query in empty if prometheus.values(query)])
        return not empty

    try:
        place.wait_for(all_have_data, "data for every panel", 240)
    except AssertionError as error:
        raise AssertionError(f"no data for {empty}\n{error}") from None
    assert prometheus.values('sum(up{run="sums"})') == [6]
    assert prometheus.values('sum(rftstream_dead_letters_total{run="sums"})') == [0]
