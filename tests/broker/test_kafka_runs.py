"""Whole runs on a real broker, by the command: what dies, what is seen from outside, what other hosts find."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import psutil
import pytest

from rftstream.contracts.topics import TOPICS
from rftstream.runs.folder import RunFolder
from tests.broker.conftest import OwnBroker
from tests.e2e.test_kills import SLOW as SLOW_HERE
from tests.e2e.test_kills import check_the_laws, reach
from tests.e2e.workplace import Process, Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.law("lost", "twice", "conservation")]

SLOW = SLOW_HERE[: SLOW_HERE.index("[evaluations")]
"""About two steps a second, with a tail of long rollouts, until the test ends it."""


def run_file(run_id: str, servers: str) -> str:
    kafka = f'session_timeout_s = 6.0\nkind = "kafka"\nservers = "{servers}"'
    return SLOW.replace("session_timeout_s = 2.0", kafka).replace('"tiny"', f'"{run_id}"')


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Workplace]:
    """Another host, as far as a run can tell."""
    with Workplace(tmp_path / "elsewhere") as workplace:
        yield workplace


def owned(worker: Process) -> list[int]:
    """How many partitions it has had, one after the other."""
    return [int(count) for count in re.findall(r"owns (\d+) partitions", worker.err)]


@pytest.mark.sampled(1, "brokers")
@pytest.mark.heavy("ten processes, three of which are killed or stopped")
def test_workers_on_another_host_are_killed_and_stopped_and_anybody_can_read_the_topics(
    place: Workplace, elsewhere: Workplace, servers: str, run_id: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three explorers and two verifiers; one of each is killed and not replaced, one is stopped until it is declared
    dead. All that they have is the run file, the log, and the object store."""
    name, shared = run_id(), f"file://{elsewhere.folder / 'shared'}"
    place.write("tiny.toml", run_file(name, servers))
    run = place.start(
        "run", "tiny.toml", "--json", *sets("explorer.count=0", "verifier.count=0", f"weights.store={shared}")
    )
    elsewhere.write("rftstream.toml", run_file(name, servers) + f'[weights]\nstore = "{shared}"\n')
    view = place.view(f"runs/{name}")
    place.wait_for(lambda: view.control().manifest, "its first record")
    refused = elsewhere.look("run")
    assert refused.code == 2
    assert f"{name}: begun on another host and not ended yet" in refused.err
    elsewhere.write("private.toml", run_file(name, servers))
    refused = elsewhere.look("worker", "private.toml", "--role", "explorer")
    assert refused.code == 2 and "expected a store that all hosts reach" in refused.err
    workers = {
        one: elsewhere.start("worker", "--role", one[:-2], "--process", one)
        for one in ("explorer-a", "explorer-b", "explorer-c", "verifier-a", "verifier-b")
    }
    for one, worker in workers.items():
        place.wait_for(lambda: owned(worker), f"a share of the work for {one}")  # noqa: B023
    reach(place, view, 2)
    for killed in (workers.pop("explorer-a"), workers.pop("verifier-a")):
        killed.send(signal.SIGKILL)
        assert killed.finish().code == -signal.SIGKILL
    stopped = workers["explorer-b"]
    stopped.send(signal.SIGSTOP)
    for one in ("explorer-c", "verifier-b"):
        place.wait_for(lambda: owned(workers[one])[-1] == 4, f"all of the work for {one}")  # noqa: B023
    shares = len(owned(stopped))
    stopped.send(signal.SIGCONT)
    place.wait_for(lambda: 2 in owned(stopped)[shares:], "a share for the one that comes back")
    reach(place, view, view.curve().version + 1)
    status = elsewhere.look("status", "rftstream.toml", "--json")
    assert status.code == 0, status.err
    assert place.look("drain", f"runs/{name}").code == 0
    done = run.finish()
    assert done.code == 0, done.err
    version = done.result["version"]
    for one, left in workers.items():
        assert left.finish().code == 0, f"{one}: {left.err}"
    check_the_laws(view, version)
    place.assert_nobody_left()
    elsewhere.assert_nobody_left()

    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere.folder / "cache"))
    audit = elsewhere.look("audit", "rftstream.toml", "--json")
    assert audit.code == 0, audit.err
    assert list((elsewhere.folder / "cache" / "rftstream" / "index").iterdir()), "the index is kept where it may be"
    assert audit.result["version"] == version
    assert not RunFolder(elsewhere.folder / "runs" / name).exists()
    check_with_kcat(servers, name, 16 * (version - 1))


def check_with_kcat(servers: str, name: str, num_rollouts: int) -> None:
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
    assert seen["rollouts"] >= num_rollouts
    assert min(seen[topic] for topic in ("tasks", "verified", "batches", "outcomes", "weights", "steps", "control")) > 0


@pytest.mark.sampled(1, "brokers")
@pytest.mark.heavy("a run whose processes start twice, on a broker that does so, too")
def test_a_broker_that_is_gone_stops_nobody_and_what_dies_with_it_is_resumed(
    place: Workplace, own_broker: OwnBroker, run_id: Callable[[], str]
) -> None:
    """First the broker is killed alone, then at once with each process of the run: nobody has a chance to say
    anything."""
    name = run_id()
    run_dir = f"runs/{name}"
    place.write("tiny.toml", run_file(name, own_broker.address))
    # Transactions under way lose records that could not be delivered for so long: shorter than the broker is away.
    run = place.start("run", "tiny.toml", "--json", *sets("transport.options.delivery_timeout_ms=9000"))
    view = place.view(run_dir)
    reach(place, view, 2)
    own_broker.kill()
    gone_at = time.monotonic()
    place.wait_for(
        lambda: re.search(r"a Kafka broker of [\w.:,]+ cannot be reached", run.err), "a word that it is gone"
    )
    place.wait_for(lambda: time.monotonic() - gone_at > 10.0, "longer than records are tried")
    assert run.alive
    own_broker.start()
    reach(place, view, view.curve().version + 2)
    assert "KafkaConnection node_id" not in run.err, "the client's own words stay in the log files"

    view.close()
    own_broker.kill_nodes()
    for process in place.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert run.finish().code == -signal.SIGKILL
    place.assert_nobody_left()
    own_broker.await_end()
    refused = place.look("resume", run_dir)
    assert refused.code == 3
    assert "no Kafka broker answered" in refused.err
    own_broker.start()
    steps = place.view(run_dir).audit().version + 2
    done = place.call("resume", run_dir, "--json", *sets(f"run.steps={steps}"))
    assert done.code == 0, done.err
    assert done.result["reason"] == "steps"
    check_the_laws(place.view(run_dir), steps)
    place.assert_nobody_left()


@pytest.mark.sampled(1, "strays")
@pytest.mark.heavy("a run whose records are deleted while it is at work")
def test_a_log_under_other_peoples_hands(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    """Records that a broker deletes before they were read, in a run that goes on; then more partitions."""
    name = run_id()
    run_dir = f"runs/{name}"
    place.write("tiny.toml", run_file(name, servers))
    run = place.start("run", "tiny.toml", "--json", *sets("verifier.count=0"))
    view = place.view(run_dir)

    def unread() -> bool:
        return sum(view.transport.admin.end_offsets("rollouts").values()) > 3 or not run.alive

    place.wait_for(unread, "rollouts that nobody has read")
    view.transport.admin.delete_before(view.transport.admin.end_offsets("rollouts"))
    verifier = place.start("worker", f"{run_dir}/config.toml", "--role", "verifier")
    lost = verifier.finish()
    assert lost.code == 7, lost.err
    assert f"{name}: offsets were deleted that the verifier had not read: rollouts[" in lost.err
    assert f'model.init_from = "{name}"' in lost.err
    told = place.call("status", run_dir, "--json").result
    assert told["lost"].keys() == {"rollouts"}
    run.send(signal.SIGINT)
    assert run.finish().code == 0

    wider = {f"{name}.tasks": len(view.transport.admin.end_offsets("tasks")) + 2}
    view.transport.admin.connection.ask("wider", lambda client: client.create_partitions(wider))
    refused = place.call("resume", run_dir)
    assert refused.code == 2
    assert f"{name}: tasks: has {wider[f'{name}.tasks']} partitions, expected " in refused.err
    assert "begin a new run under another name" in refused.err
