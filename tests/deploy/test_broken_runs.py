"""A real Prometheus over a run that somebody breaks: each alert fires for its cause, and none before."""

from __future__ import annotations

import json
import re

import pytest

from rftstream.contracts.records import NewRecord
from rftstream.errors import RUN_LOST
from tests.deploy.conftest import ROOT
from tests.deploy.prometheus_server import Prometheus
from tests.e2e.workplace import FAKE, Workplace, sets

NOISE = NewRecord("rollouts", 0, b"a key", b"\xff\xff", (("contract", b"rollout"), ("contract_version", b"1")))

PUT_ASIDE = 'sum(rftstream_dead_letters_total{role="verifier"})'
"""By the role that will: nothing grows that was not seen before."""


@pytest.mark.sampled(1, "deployed")
@pytest.mark.slow
@pytest.mark.heavy("a run, its exporter and a Prometheus, until three alerts have fired one after the other")
def test_alerts_tell_what_broke_a_run(place: Workplace) -> None:
    place.write("tiny.toml", FAKE)
    run = place.start(
        "run",
        "tiny.toml",
        "--json",
        *sets("run.steps=100000", "backends.fake.step_s=0.05", "trainer.max_steps_without_signal=0"),
    )
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.curve().version >= 1, "a step")
    exporter = place.start("exporter", "runs/tiny", "--port", "0", "--every-s", "1")
    address = place.wait_for(lambda: re.search(r"^http://([^/]+)/", exporter.out), "the exporter's address")
    beside = place.write("exporter.json", json.dumps([{"targets": [address.group(1)], "labels": {"job": "exporter"}}]))
    prometheus = Prometheus(
        place, place.folder / "runs/tiny/targets.json", beside, rules=[ROOT / "deploy/prometheus/alerts.yml"]
    )

    def told() -> set[str]:
        return prometheus.firing() - {"NoSignal"}  # what the fake policy is to learn is soon learnt

    place.wait_for(lambda: prometheus.values(PUT_ASIDE) == [0.0], "what was put aside")
    version = view.curve().version + 5
    place.wait_for(lambda: view.curve().version >= version, "some steps more")
    assert told() == set(), "nothing is wrong with a run that has just begun"

    view.put(NOISE)
    place.wait_for(told, "an alert")
    assert told() == {"DeadLetters"}

    def ends_by_what_somebody_deletes() -> bool:
        view.transport.admin.delete_before(view.transport.admin.end_offsets("verified"))
        return not run.alive

    place.wait_for(ends_by_what_somebody_deletes, "the end of the run")
    assert run.finish().code == RUN_LOST
    place.wait_for(lambda: prometheus.firing() >= {"RecordsLost", "RunFailed"}, "the alerts")
