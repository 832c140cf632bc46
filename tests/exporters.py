"""What the exporter serves of a run without a supervisor, on either log: tests of both use it."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request
from collections.abc import Mapping

from tests.e2e.workplace import Workplace

SETTINGS = {"RFTSTREAM__VERIFIER__MAX_CONCURRENT": "5"}
BACKLOG = 12
"""Rollouts of (1 + max_staleness) batches of FAKE: so much is admitted while nobody trains."""


def check_exporter(place: Workplace, name: str, environment: Mapping[str, str]) -> None:
    """Its backlog is that of the audit, with workers and without; it outlives them, and ends when it is told to."""
    env, run_dir = {**environment, **SETTINGS}, f"runs/{name}"

    def read() -> dict[str, float]:
        return read_metrics(url, name)

    made = place.call("run", "tiny.toml", "--no-workers", env=env)
    assert made.code == 0, made.err
    run = place.view(run_dir)
    exporter = place.start("exporter", run_dir, "--port", "0", "--every-s", "0.2", env=env)
    url = place.wait_for(lambda: re.search(r"^http\S+", exporter.out), "the exporter's address").group()  # type: ignore[union-attr]
    assert read().get("rftstream_backlog_rollouts") is None, "there is nothing yet"

    first = [place.start("worker", "tiny.toml", "--role", role, env=env) for role in ("feeder", "explorer", "trainer")]
    place.wait_for(lambda: len(run.rollouts()) == BACKLOG, "rollouts")
    for one in first:
        one.send(signal.SIGTERM)
        assert one.finish().code == 0
    waiting = 'rftstream_backlog_rollouts{role="verifier"}'
    found = place.wait_for(lambda: served if (served := read()).get(waiting) == BACKLOG else None, "the backlog")
    assert_as_audited(place, run_dir, found)
    assert found['rftstream_backlog_rollouts{role="explorer"}'] == 0
    assert found['rftstream_workers_wanted{role="verifier"}'] == 3
    assert found["rftstream_run_oldest_open_timestamp_seconds"] > 0
    (explorer, verifier) = place.look("scale-plan", run_dir, "--json").result
    assert (explorer["wanted"], verifier["wanted"]) == (0, 3)
    assert verifier == {"role": "verifier", "backlog": 12, "max_concurrent": 5, "most": 4, "wanted": 3}

    for role in ("feeder", "explorer", "verifier", "buffer", "trainer"):
        place.start("worker", "tiny.toml", "--role", role, env=env)
    ended = 'rftstream_run_state{state="finished"}'
    found = place.wait_for(lambda: served if (served := read()).get(ended) == 1 else None, "the end")
    assert_as_audited(place, run_dir, found)
    assert found["rftstream_run_version"] == found["rftstream_run_steps_planned"] == 6
    exporter.send(signal.SIGTERM)
    assert exporter.finish().code == 0, exporter.err
    place.assert_nobody_left()


def assert_as_audited(place: Workplace, run_dir: str, found: Mapping[str, float]) -> None:
    rollouts = place.look("audit", run_dir, "--json").result["rollouts"]
    stages = zip(("explorer", "verifier", "buffer", "trainer"), rollouts["pending_by_stage"].values(), strict=True)
    for role, count in stages:
        assert found[f'rftstream_backlog_rollouts{{role="{role}"}}'] == count, role
    assert found["rftstream_run_rollouts_admitted_total"] == rollouts["admitted"]
    for result in ("trained", "expired", "filtered", "dead"):
        assert found[f'rftstream_run_rollouts_total{{result="{result}"}}'] == rollouts[result]


def read_metrics(url: str, run: str) -> dict[str, float]:
    """Series without the label of this run -> value, of what promtool finds no fault with."""
    with urllib.request.urlopen(url, timeout=120) as answer:
        text = answer.read()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    plain = text.decode().replace(f'{{run="{run}"}}', "").replace(f'run="{run}",', "").replace(f',run="{run}"', "")
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:{.*})?) (\S+)$", plain, re.MULTILINE)}
