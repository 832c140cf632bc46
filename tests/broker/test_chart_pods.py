"""The pods of the Helm chart, as processes: their own commands and variables bring a run to its end on a real Kafka.

Each has a run folder of its own, as pods have, and none is told of another."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import pods, render
from tests.e2e.workplace import FAKE, Process, Workplace

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]


class Pods:
    """Starts the containers of a release here."""

    def __init__(self, place: Workplace, servers: str, name: str) -> None:
        self.place, self.name = place, name
        self.file = place.write("work/run.toml", FAKE.replace('name = "tiny"', f'name = "{name}"'))
        made = render("--set", f"kafka.servers={servers},kafka.replicationFactor=1", run_file=self.file)
        self.templates = pods(made)

    def folder(self, component: str) -> Path:
        folder = self.place.folder / "pods" / component
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start(self, component: str, container: dict[str, Any]) -> Process:
        here = {
            "/work/": f"{self.file.parent}/", "/runs": str(self.folder(component)),
            "s3://rftstream/": f"file://{self.place.folder}/store/", "/tmp": str(self.folder(component)),
            "sleep 10": "sleep 0.1", "9100": "0",
        }  # fmt: skip

        def placed(text: str) -> str:
            return re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], text)

        environment = {one["name"]: placed(one["value"]) for one in container["env"]}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = [*container.get("command", ["rftstream"]), *container.get("args", ())]
        return self.place.start(command=[placed(word) for word in words], env=environment)

    def init(self, component: str) -> tuple[int, str]:
        (container,) = self.templates[component]["spec"]["initContainers"]
        done = self.start(component, container).finish()
        return done.code, done.err

    def main(self, component: str) -> Process:
        (container,) = self.templates[component]["spec"]["containers"]
        return self.start(component, container)


@pytest.mark.sampled(1, "deployed")
@pytest.mark.heavy("the broker of all tests is made for it, and each pod of the chart starts")
def test_the_pods_bring_a_run_to_its_end(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    release = Pods(place, servers, run_id())
    first = [release.main(role) for role in ("buffer", "explorer", "trainer")]  # before there is a run: they wait
    assert release.init("feeder")[0] == 0, place.report()
    first.append(release.main("feeder"))
    trainer = first.pop(2)
    logs = release.folder("trainer") / release.name / "logs"
    place.wait_for(
        lambda: any("starts from version" in log.read_text() for log in logs.glob("trainer-*.log")), "a trainer"
    )

    # Nothing is trained without a verifier, so this one is evicted before the end. Its Job must not take it for that.
    trainer.send(signal.SIGTERM)
    assert trainer.finish().code == 75, place.report()
    second = [release.main(role) for role in ("trainer", "verifier")]
    assert release.init("exporter")[0] == 0, place.report()
    assert [process.finish().code for process in (*first, *second)] == [0] * 5, place.report()

    assert (release.folder("trainer") / release.name / "final").is_dir()
    assert [path.name for path in release.folder("buffer").glob(f"{release.name}/*")] == ["logs"]
    code, said = release.init("feeder")
    assert code == 2 and "this run has ended" in said
    environment = {"RFTSTREAM__TRANSPORT__KIND": "kafka", "RFTSTREAM__TRANSPORT__SERVERS": servers}
    audit = place.call("audit", release.file, "--json", env=environment)
    assert audit.result["balanced"] and audit.result["version"] == 6, audit.out
    place.assert_nobody_left()
