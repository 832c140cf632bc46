"""A run on Kafka without a supervisor: each role is started by itself, as containers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rftstream.queries.audit import audit
from rftstream.runs.folder import open_run
from tests.e2e.test_workers_alone import ROLES, port_of, scrape
from tests.e2e.workplace import FAKE, Workplace
from tests.exporters import check_exporter

pytestmark = pytest.mark.broker


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path)
    try:
        yield workplace
    finally:
        workplace.end()


@pytest.mark.law("lost", "twice", "conservation")
def test_workers_alone_bring_a_run_to_its_end(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    """By the environment, as the compose file has it. Two verifiers share the work."""
    name = run_id()
    file = place.write("tiny.toml", FAKE)
    environment = {
        "RFTSTREAM_CONFIG": str(file), "RFTSTREAM__RUN__NAME": name,
        "RFTSTREAM__RUN__FOLDER": str(place.folder / "all"),
        "RFTSTREAM__TRANSPORT__KIND": "kafka", "RFTSTREAM__TRANSPORT__SERVERS": servers,
    }  # fmt: skip
    made = place.call("run", "--no-workers", env=environment)
    assert made.code == 0, made.err
    again = place.call("run", "--no-workers", env=environment)
    assert "has not ended" in again.out

    first = place.start("worker", "--role", "verifier", "--metrics-port", "0", "--process", "v", env=environment)
    # Without a buffer the run goes only so far, and a second verifier might be done before the first has begun.
    others = [role for role in ROLES if role not in ("buffer", "verifier")]
    workers = [first, *(place.start("worker", "--role", role, env=environment) for role in others)]
    port = port_of(place, place.folder / "all" / name / "logs" / "v.port")

    def is_idle() -> bool:
        found = scrape(port)
        scored, lag = (
            'rftstream_verdicts_total{result="scored"}',
            'rftstream_lag_offsets{role="verifier",topic="rollouts"}',
        )
        return found.get(scored, 0) > 0 and found.get(lag) == 0

    place.wait_for(is_idle, "a lag of 0 after its work: markers of transactions are none")
    workers += [place.start("worker", "--role", role, env=environment) for role in ("verifier", "buffer")]
    assert [worker.finish().code for worker in workers] == [0] * len(workers), place.report()
    place.assert_nobody_left()

    run = open_run(place.folder / "all" / name)
    try:
        report = audit(run.transport)
    finally:
        run.transport.close()
    assert report.balanced and report.version == 6, report.to_text()
    assert (run.folder.final).is_dir()


@pytest.mark.law("conservation")
def test_the_exporters_backlog_is_that_of_the_audit(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    """Markers of transactions are none of it."""
    name = run_id()
    place.write("tiny.toml", FAKE.replace('name = "tiny"', f'name = "{name}"').replace(
        "[transport]", f'[transport]\nkind = "kafka"\nservers = "{servers}"'
    ))  # fmt: skip
    check_exporter(place, name, {})
