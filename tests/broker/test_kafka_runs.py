"""Whole runs on a real broker, by the command: what dies, what is seen from outside, what other hosts find."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import msgpack
import psutil
import pytest
from kafka import KafkaAdminClient

from rftstream.contracts.topics import TOPICS
from rftstream.runs.folder import consumer_groups
from rftstream.transport.kafka.transport import KafkaTransport
from tests.broker.conftest import SCRIPT, kill_broker, start_broker
from tests.e2e.workplace import FAKE, RunView, Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]

SLOW = (
    FAKE.replace("groups_per_batch = 2\ngroup_size = 3", "groups_per_batch = 4\ngroup_size = 4").replace(
        "max_tokens = 8", "max_tokens = 40"
    )
    + """
kind = "kafka"
servers = "{servers}"
[policies.fake]
tokens_per_s = 40.0
mean_tokens = 14.0
sigma = 0.6
"""
)
"""About two steps a second, with a tail of long rollouts."""


def run_file(run_id: str, servers: str) -> str:
    return SLOW.format(servers=servers).replace('"tiny"', f'"{run_id}"')


@pytest.fixture
def name(servers: str, run_id: object, place: Workplace) -> str:
    """Of a run whose file is in the place."""
    chosen: str = run_id()  # type: ignore[operator]
    place.write("tiny.toml", run_file(chosen, servers))
    return chosen


def reach(place: Workplace, view: RunView, version: int) -> None:
    place.wait_for(lambda: view.curve().version >= version, f"version {version}")


def check_the_laws(view: RunView, steps: int) -> None:
    report = view.assert_nothing_lost()
    assert report.version == steps
    assert report.rollouts.trained == 16 * steps
    assert (report.groups.dead, report.groups.expired, report.groups.filtered) == (0, 0, 0)
    trained = Counter(one.ids.rollout_id for one in view.experiences() if one.batch_sequence < steps)
    assert len(trained) == 16 * steps
    assert set(trained.values()) == {1}, "none is trained twice"


def test_workers_are_killed_and_stopped_and_anybody_can_read_the_topics(
    place: Workplace, name: str, servers: str
) -> None:
    """Three explorers and two verifiers by hand; one of each is killed and not replaced, one is stopped for 20 s."""
    steps = 45
    run = place.start("run", "tiny.toml", "--json", *sets(f"run.steps={steps}", "explorer.count=0", "verifier.count=0"))
    view = place.view(f"runs/{name}")
    env = {"RFTSTREAM_CONFIG": str(place.folder / "tiny.toml")}
    explorers = [place.start("worker", "--role", "explorer", "--process", f"explorer-{letter}", env=env)
                 for letter in "abc"]  # fmt: skip
    verifiers = [place.start("worker", "--role", "verifier", "--process", f"verifier-{letter}", env=env)
                 for letter in "ab"]  # fmt: skip
    for process in ("explorer-a", "explorer-b", "explorer-c", "verifier-a", "verifier-b"):
        place.wait_for(lambda: "owns" in view.log_of(process), f"a share of the work for {process}")  # noqa: B023
    reach(place, view, 3)
    for killed in (explorers[0], verifiers[0]):
        killed.send(signal.SIGKILL)
        assert killed.finish().code == -signal.SIGKILL
    explorers[1].send(signal.SIGSTOP)
    stopped_at = time.monotonic()
    place.wait_for(lambda: time.monotonic() - stopped_at >= 20.0, "the end of the stop")
    assert run.alive, "the stopped one comes back into a live run"
    explorers[1].send(signal.SIGCONT)
    done = run.finish()
    assert done.code == 0, done.err
    assert (done.result["steps"], done.result["reason"]) == (steps, "steps")
    check_the_laws(view, steps)
    for left in (explorers[1], explorers[2], verifiers[1]):
        assert left.finish().code == 0, left.err
    place.assert_nobody_left()
    check_with_kcat(servers, name)


def check_with_kcat(servers: str, name: str) -> None:
    """A client that is not ours lists the topics; every value is msgpack, every header is one of the protocol."""
    listed = json.loads(subprocess.run(["kcat", "-b", servers, "-L", "-J"], capture_output=True, check=True).stdout)
    widths = {one["topic"]: len(one["partitions"]) for one in listed["topics"] if one["topic"].startswith(f"{name}.")}
    assert set(widths) == {f"{name}.{topic}" for topic in TOPICS}
    seen: Counter[str] = Counter()
    for topic in TOPICS:
        # Offset, then the lengths of key, value and headers; -1 is none.
        form = "%o %K %S %h\\n"
        headers = subprocess.run(
            ["kcat", "-b", servers, "-C", "-t", f"{name}.{topic}", "-e", "-q", "-X", "isolation.level=read_committed",
             "-f", form], capture_output=True, check=True, text=True,
        ).stdout.splitlines()  # fmt: skip
        values = subprocess.run(
            ["kcat", "-b", servers, "-C", "-t", f"{name}.{topic}", "-e", "-q", "-X", "isolation.level=read_committed",
             "-f", "%R%s"], capture_output=True, check=True,
        ).stdout  # fmt: skip
        at = 0
        for line in headers:
            size, found = (
                int(line.split()[2]),
                dict(one.partition("=")[::2] for one in line.split(" ", 3)[3].split(",")),
            )
            at += 4
            if size >= 0:  # else a tombstone, which has no headers
                assert found["run"] == name
                value = msgpack.unpackb(values[at : at + size], strict_map_key=True)
                assert isinstance(value, dict)
                assert {"contract", "contract_version"} <= set(found)
                at += size
            seen[topic] += 1
        assert at == len(values)
    assert seen["rollouts"] >= 45 * 16
    assert min(seen[topic] for topic in ("tasks", "verified", "batches", "outcomes", "weights", "steps", "control")) > 0


def test_hosts_that_see_no_run_folder_take_part(place: Workplace, name: str, servers: str, tmp_path: Path) -> None:
    """All that they have is the run file, the log, and the object store."""
    shared = ["--set", f"weights.store=file://{tmp_path / 'shared'}"]
    run = place.start(
        "run", "tiny.toml", "--json", *sets("run.steps=12", "explorer.count=0", "verifier.count=0"), *shared
    )
    elsewhere = Workplace(tmp_path / "elsewhere")
    try:
        text = run_file(name, servers) + f'[weights]\nstore = "file://{tmp_path / "shared"}"\n'
        elsewhere.write("rftstream.toml", text)
        view = place.view(f"runs/{name}")
        place.wait_for(lambda: view.control().manifest, "its first record")
        refused = elsewhere.call("run")
        assert refused.code == 2
        assert f"{name}: begun on another host and not ended yet" in refused.err
        workers = [elsewhere.start("worker", "--role", role) for role in ("explorer", "verifier")]
        reach(place, view, 2)
        status = elsewhere.call("status", "rftstream.toml", "--json")
        assert status.code == 0, status.err
        done = run.finish()
        assert done.code == 0, done.err
        for worker in workers:
            left = worker.finish()
            assert left.code == 0, left.err
        cache = {"XDG_CACHE_HOME": str(elsewhere.folder / "cache")}
        audit = elsewhere.call("audit", "rftstream.toml", "--json", env=cache)
        assert audit.code == 0, audit.err
        assert list((elsewhere.folder / "cache" / "rftstream" / "index").iterdir()), "the index is kept where it may be"
        assert audit.result["version"] == 12
        assert not (elsewhere.folder / "runs" / name / "config.toml").exists()
        elsewhere.assert_nobody_left()
    finally:
        elsewhere.end()


@pytest.mark.timeout(900)
def test_a_broker_that_is_gone_for_a_while_stops_nobody(place: Workplace, own_broker: tuple[Path, str]) -> None:
    folder, address = own_broker
    place.write("tiny.toml", run_file("tiny", address))
    # Transactions under way lose records that could not be delivered for so long: shorter than the broker is away.
    hasty = "transport.options.delivery_timeout_ms=9000"
    run = place.start("run", "tiny.toml", "--json", *sets("run.steps=24", hasty))
    view = place.view("runs/tiny")
    reach(place, view, 4)
    kill_broker(folder)
    gone_at = time.monotonic()
    place.wait_for(lambda: time.monotonic() - gone_at > 12.0, "a while")
    assert run.alive
    assert start_broker(folder, os.getpid(), "--port", address.rpartition(":")[2]) == address
    done = run.finish(240.0)
    assert done.code == 0, done.err
    assert "a Kafka broker cannot be reached" in done.err
    assert "KafkaConnection node_id" not in done.err, "the client's own words stay in the log files"
    check_the_laws(view, 24)
    place.assert_nobody_left()
    view.close()


@pytest.mark.timeout(900)
def test_everything_dies_at_once_and_the_run_is_resumed(place: Workplace, own_broker: tuple[Path, str]) -> None:
    """`kill -9` of each process of the run and of the broker: nobody has a chance to say anything."""
    folder, address = own_broker
    place.write("tiny.toml", run_file("tiny", address))
    run = place.start("run", "tiny.toml", "--json", *sets("run.steps=12"))
    view = place.view("runs/tiny")
    reach(place, view, 4)
    view.close()
    for pid in json.loads((folder / "nodes.json").read_text()):
        psutil.Process(pid).kill()
    for process in place.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert run.finish().code == -signal.SIGKILL
    place.assert_nobody_left()
    place.wait_for(lambda: not (folder / "keeper.pid").exists(), "the end of the broker")

    refused = place.call("resume", "runs/tiny")
    assert refused.code == 3
    assert "no Kafka broker answered" in refused.err
    assert start_broker(folder, os.getpid(), "--port", address.rpartition(":")[2]) == address
    done = place.call("resume", "runs/tiny", "--json", timeout_s=240.0)
    assert done.code == 0, done.err
    assert done.result["reason"] == "steps"
    again = place.view("runs/tiny")
    check_the_laws(again, 12)
    again.close()
    place.assert_nobody_left()


def coordinator_of(servers: str, group: str) -> int:
    """Number of the node that keeps the positions of a group."""
    client = KafkaAdminClient(bootstrap_servers=servers.split(","))
    try:
        client.list_group_offsets({group: None})
        return int(client._manager.cluster.get_coordinator(group))
    finally:
        client.close()


@pytest.mark.timeout(900)
def test_a_cluster_that_loses_a_broker_goes_on(place: Workplace, tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    address = start_broker(folder, os.getpid(), "--nodes", "3")
    try:
        place.write("tiny.toml", run_file("tiny", address))
        run = place.start("run", "tiny.toml", "--json", *sets("run.steps=30"))
        view = place.view("runs/tiny")
        reach(place, view, 4)
        assert isinstance(view.transport, KafkaTransport)
        groups = {group: view.transport.admin.committed(group) for group in consumer_groups(view.config)}
        lost = coordinator_of(address, "tiny.verifier")
        psutil.Process(json.loads((folder / "nodes.json").read_text())[lost - 1]).kill()
        reach(place, view, view.curve().version + 2)
        for group, positions in groups.items():
            assert set(view.transport.admin.committed(group)) == set(positions), "its new coordinator is asked"
        done = run.finish(240.0)
        assert done.code == 0, done.err
        check_the_laws(view, 30)
        place.assert_nobody_left()
        view.close()
    finally:
        subprocess.run(["python3", str(SCRIPT), "stop", "--dir", str(folder)], check=True, capture_output=True)
        shutil.rmtree(folder)
