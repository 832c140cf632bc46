"""A run without a supervisor: its workers are started one by one, as a system of containers does."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.workplace import RunView, Workplace

ROLES = ("feeder", "explorer", "verifier", "buffer", "trainer")


def exposition(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text: bytes = answer.read()
    return text.decode()


def scrape(port: int) -> dict[str, float]:
    """Series without the label of the run -> value."""
    plain = re.sub(r'(?<=[{,])run="[^"]*",?', "", exposition(port)).replace(",}", "}").replace("{}", "")
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:{.*})?) (\S+)$", plain, re.MULTILINE)}


def port_of(place: Workplace, file: Path) -> int:
    return int(place.wait_for(lambda: _text(file), f"a port in {file}").partition(" ")[0])


@pytest.mark.law("lost", "twice", "conservation")
def test_workers_alone_bring_a_run_to_its_end(place: Workplace) -> None:
    made = place.look("run", "tiny.toml", "--no-workers", "--json")
    assert made.code == 0, made.err
    folder = str(place.folder / "runs" / "tiny")
    assert made.result == {"run_dir": folder, "created": True}
    again = place.look("run", "tiny.toml", "--no-workers", "--json")
    assert again.result == {"run_dir": folder, "created": False}, "a system that starts anew goes on with its run"

    run = place.view("runs/tiny")
    workers = [
        place.start("worker", "tiny.toml", "--role", role, "--process", role, "--metrics-port", "0")
        for role in ("feeder", "verifier")
    ]
    place.wait_for(lambda: run.records("tasks"), "tasks")
    check_what_is_told(place, run)
    workers += [place.start("worker", "tiny.toml", "--role", role) for role in ("explorer", "buffer", "trainer")]
    assert [worker.finish().code for worker in workers] == [0] * len(ROLES), place.report()
    place.assert_nobody_left()
    assert [step.name.version for step in run.steps()] == [1, 2, 3, 4, 5, 6]
    run.assert_nothing_lost()
    assert (run.folder.final).is_dir()

    after = place.look("run", "tiny.toml", "--no-workers")
    assert "runs/tiny-2: created" in after.out, "the first one has ended"


def check_what_is_told(place: Workplace, run: RunView) -> None:
    """Feeder and verifier are there. Prometheus gets counters with 0 before anything happened; the lag is that of a
    topic nobody else reads."""
    ports = {role: port_of(place, run.folder.logs / f"{role}.port") for role in ("feeder", "verifier")}
    place.wait_for(
        lambda: scrape(ports["verifier"]).get('rftstream_lag_offsets{role="verifier",topic="rollouts"}') == 0, "lag"
    )
    verifier = scrape(ports["verifier"])
    assert verifier['rftstream_dead_letters_total{reason="timeout",role="verifier"}'] == 0
    assert verifier['rftstream_verdicts_total{result="scored"}'] == 0
    assert verifier['rftstream_transactions_total{result="aborted",role="verifier"}'] == 0
    assert verifier['rftstream_disk_free_bytes{role="verifier"}'] > 0
    assert verifier["process_resident_memory_bytes"] > 1e6
    checked = subprocess.run(["promtool", "check", "metrics"], input=exposition(ports["verifier"]), text=True,
                             capture_output=True, timeout=240)  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    lines = [line for line in exposition(ports["verifier"]).splitlines() if not line.startswith("#")]
    assert [line for line in lines if 'run="tiny"' not in line or "_created" in line] == []
    feeder = scrape(ports["feeder"])
    assert feeder["rftstream_max_staleness"] == 1
    assert feeder['rftstream_dead_letters_total{reason="undecodable",role="feeder"}'] == 0


def test_a_supervised_run_says_where_its_workers_are(place: Workplace) -> None:
    place.start("run", "tiny.toml", "--set", "run.steps=1000000")
    targets = place.folder / "runs" / "tiny" / "targets.json"
    place.wait_for(lambda: _text(targets).count('"job"') == len(ROLES), "a target of every role")
    ports = {}
    for group in json.loads(targets.read_text()):
        role, instance = group["labels"]["job"], group["labels"]["instance"]
        assert instance == f"{role}-0"
        ports[role] = int(group["targets"][0].rpartition(":")[2])
    place.wait_for(lambda: scrape(ports["trainer"]).get('rftstream_steps_total{result="trained"}', 0) > 0, "steps")
    assert scrape(ports["explorer"])['rftstream_rollouts_total{status="completed"}'] > 0
    for role, port in ports.items():
        assert f'rftstream_step_seconds_count{{role="{role}"}}' in scrape(port)
    place.processes("run")[0].terminate()
    place.assert_nobody_left()
    assert not targets.exists()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
