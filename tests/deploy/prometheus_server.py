"""A real Prometheus for tests."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.conftest import ROOT
from tests.e2e.workplace import Workplace
from tests.loopback import free_ports


class Prometheus:
    """Scrapes the targets of files each second, with the settings that docs/monitoring.md shows. A test makes it."""

    def __init__(self, place: Workplace, *targets: Path, rules: Sequence[Path] = ()) -> None:
        told = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
        block = next(part for part in told.split("```yaml\n")[1:] if part.startswith("scrape_configs:"))
        config = yaml.safe_load(block.partition("```")[0])
        config["scrape_configs"][0]["file_sd_configs"][0]["files"] = list(map(str, targets))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "2s"}
        config["rule_files"] = list(map(str, rules))
        file = place.write("prometheus.yml", yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.process = place.start(
            f"--config.file={file}", f"--storage.tsdb.path={place.folder / 'tsdb'}", "--log.level=warn",
            f"--web.listen-address={self.url.removeprefix('http://')}", command=("prometheus",),
        )  # fmt: skip

    def values(self, query: str) -> list[float]:
        """Return those of the answer that are numbers, now; none while it does not answer yet."""
        return [value for value in self.series(query) if not math.isnan(value)]

    def series(self, query: str) -> list[float]:
        """Return the value of each series of the answer; none while it does not answer yet. A query that Prometheus
        does not understand fails."""
        found = self._ask("query", query=query)
        return [] if found is None else [float(one["value"][1]) for one in found["result"]]

    def values_of(self, label: str, selector: str) -> list[str]:
        """Return the values of a label over all series of a selection, as choices of a dashboard are found."""
        return list(self._ask(f"label/{label}/values", **{"match[]": selector}) or ())

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules with their health; none while it does not answer yet."""
        found = self._ask("rules") or {"groups": []}
        return [rule for group in found["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that somebody is told of now."""
        found = self._ask("alerts") or {"alerts": []}
        return {one["labels"]["alertname"] for one in found["alerts"] if one["state"] == "firing"}

    def _ask(self, what: str, **parameters: str) -> Any:
        try:
            address = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(address, timeout=120) as answer:
                return json.loads(answer.read())["data"]
        except ConnectionError:
            return None
        except urllib.error.HTTPError as error:
            assert error.code == 503, f"{parameters}: {error.read().decode()}"  # that is while it starts
            return None
        except urllib.error.URLError:
            assert self.process.alive, self.process.err
            return None
