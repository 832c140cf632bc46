"""Whether a run stands still, and for what it is said to wait."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rftstream.config.loader import from_dict
from rftstream.config.sections import RunConfig
from rftstream.queries.state.elsewhere import Elsewhere, look_elsewhere
from rftstream.queries.state.standstill import Movement, find_standstill, look_at_movement
from rftstream.queries.state.workers import WorkerStatus
from rftstream.transport.memory.transport import MemoryLog
from tests.suite.each import each
from tests.unit.synthetic import SyntheticLog

ALL = {"feeder": 1, "explorer": 2, "verifier": 1, "buffer": 1, "trainer": 1}
STILL = Movement(now=1000.0, moved_at=760.0, waiting={}, alive=ALL, expected=ALL, published=[(1, 700.0), (2, 750.0)],
                 taken=2)  # fmt: skip


def without(role: str) -> dict[str, int]:
    return {**ALL, role: 0}


def text_of(**changes: Any) -> str | None:
    found = find_standstill(replace(STILL, **changes))
    return None if found is None else found.to_text()


# --------------------------------------------------------------------------------------------- the judgement


@pytest.mark.parametrize("moved_at", [None, 1000.0, 821.0])
def test_a_run_that_moves(moved_at: float | None) -> None:
    assert find_standstill(replace(STILL, moved_at=moved_at)) is None


@each(("changes", "says"), [
    ({"waiting": {"tasks": 64}, "alive": without("explorer")},
     "64 tasks wait for an explorer, and no explorer is alive"),
    ({"waiting": {"tasks": 1}}, "1 task waits for an explorer (2 alive)"),
    ({"waiting": {"tasks": 8}, "alive": {}, "expected": {"explorer": 0}},
     "8 tasks wait for an explorer, and `run` starts none: `rftstream worker --role explorer` does"),
    ({"waiting": {"batches": 1, "tasks": 64, "verified": 8}},
     "1 batch waits for the trainer (1 alive); 64 tasks wait for an explorer (2 alive)"),
    ({"waiting": {"rollouts": 2000, "verified": 3}, "alive": without("verifier")},
     "2,000 rollouts wait for a verifier, and no verifier is alive"),
    ({"waiting": {"verified": 16}, "alive": without("buffer")},
     "16 verified rollouts wait for the buffer, and no buffer is alive"),
    ({"alive": without("feeder")},
     "nothing waits on any topic, the feeder admits no task, and no feeder is alive"),
    ({"waiting": {"tasks": 2, "batches": 1}, "alive": {"explorer": 2}, "hosts": {"trainer": "n1", "feeder": "n2"}},
     "1 batch waits for the trainer on n1, which is not asked from here (if it is lost, "
     "`rftstream worker --role trainer` takes the role over); 2 tasks wait for an explorer (2 alive); "
     "no verifier is alive; no buffer is alive"),
    ({"waiting": {"tasks": 2}, "alive": without("trainer")},
     "2 tasks wait for an explorer (2 alive); no trainer is alive"),
    ({"waiting": {"rollouts": 2}, "alive": without("verifier"), "silent": ("trainer-0", "verifier-0")},
     "2 rollouts wait for a verifier, and verifier-0 does not answer: it hangs or is stopped; `run` starts another "
     "after `kill -9`"),
    ({"waiting": {"tasks": 2}, "stuck": ("explorer-0",)},
     "2 tasks wait for an explorer (2 alive); explorer-0 is stuck"),
])  # fmt: skip
def test_what_it_waits_for(changes: dict[str, Any], says: str) -> None:
    assert text_of(**changes) == f"nothing has moved for 4 min: {says}"


def test_versions_that_nobody_takes_over_while_the_rest_moves() -> None:
    published = [(version, 600.0 + version) for version in range(50, 75)]
    found = find_standstill(replace(STILL, moved_at=1000.0, published=published, taken=60))
    assert found is not None
    assert found.to_text() == (
        "the trainer has published version 74, explorers are at 60 for 5 min since there is a newer one"
    )
    assert (found.published, found.taken, found.behind_s, found.still_s) == (74, 60, 339.0, None)
    assert find_standstill(replace(STILL, moved_at=1000.0, published=published, taken=74)) is None
    late = [(74, 900.0), (75, 990.0)]
    assert find_standstill(replace(STILL, moved_at=1000.0, published=late, taken=73)) is None, "they may be fetching it"


def test_explorers_elsewhere_are_judged_by_what_they_sampled_last_if_tasks_wait() -> None:
    behind = {"taken": None, "sampled": 1, "published": [(1, 700.0), (2, 750.0)]}
    assert "explorers are at 1" in (text_of(**behind, waiting={"tasks": 4}) or "")
    assert "explorers are at" not in (text_of(**behind) or "")
    assert text_of(**behind, waiting={"tasks": 4}, moved_at=1000.0) is None


# --------------------------------------------------------------------------------------------- looking


class Log(SyntheticLog):
    """A synthetic log with a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(MemoryLog(lambda: self.now).connect())


@pytest.fixture
def log() -> Log:
    log = Log()
    log.step(0, resumed=True, at=100.0)
    return log


def config(**explorer: Any) -> RunConfig:
    return from_dict({"run": {"name": "r", "steps": 8}, "model": {"path": "fake"}, "explorer": explorer,
                      "tasksets": {"sums": {"source": "arithmetic"}}})  # fmt: skip


def worker(role: str, **health: Any) -> WorkerStatus:
    return WorkerStatus(process=f"{role}-0", port=1, host="here", health={"ok": True, "role": role, **health})


def look(log: Log, *workers: WorkerStatus, now: float, **more: Any) -> Movement:
    from rftstream.queries.curves.history import read_history
    from rftstream.service.role import Log as Reading

    steps = read_history(Reading(log.transport)).steps
    return look_at_movement(config(), log.transport, steps=steps, lag={"tasks": 4}, workers=workers, now=now, **more)


@pytest.mark.parametrize("topic", ["tasks", "rollouts", "verified", "partials"])
def test_any_new_record_is_a_movement(log: Log, topic: str) -> None:
    log.now = 900.0
    match topic:
        case "tasks":
            log.admit(1)
        case "rollouts":
            log.sample(1)
        case "verified":
            log.verify(1)
        case "partials":
            log.put("partials", partial(log))
    assert look(log, now=1000.0).moved_at == 900.0
    assert find_standstill(look(log, now=1000.0)) is None
    found = find_standstill(look(log, now=1200.0))
    assert found is not None
    assert found.still_s == 300.0


def partial(log: Log) -> Any:
    from rftstream.contracts.rollouts import PartialRollout

    return PartialRollout(ids=log.siblings(1)[0], piece=0, turns=(), segments=(), num_tokens=1)


def test_before_it_was_begun_here_nothing_can_be_told(log: Log) -> None:
    log.admit(1)
    assert find_standstill(look(log, now=5000.0, began_at=4900.0)) is None
    found = find_standstill(look(log, now=5000.0, began_at=4760.0))
    assert found is not None
    assert found.still_s == 240.0


def test_the_log_says_what_waits_for_the_trainer_and_which_version_sampled(log: Log) -> None:
    log.flow(0, 1, 2)
    for number in (0, 1):
        log.batch(number, [number])
    log.trained[1] = 1
    log.step(1, at=100.0)
    found = look(log, worker("trainer"), worker("explorer", version=None), now=1000.0)
    assert found.waiting["batches"] == 1
    assert (found.taken, found.sampled) == (None, 0)
    assert found.alive == {"trainer": 1, "explorer": 1}
    assert find_standstill(found).to_json()["text"] == (  # type: ignore[union-attr]
        "nothing has moved for 15 min: 1 batch waits for the trainer (1 alive); 4 tasks wait for an explorer (1 alive);"
        " no feeder is alive; no verifier is alive; no buffer is alive; the trainer has published version 1, explorers"
        " are at 0 for 15 min since there is a newer one"
    )


def test_a_failure_that_is_tried_again_is_what_all_wait_for(log: Log) -> None:
    failing = [worker(role, failure="the disk is full") for role in ("explorer", "buffer")]
    for workers, says in ((failing, "explorer-0, buffer-0 try again"), (failing[:1], "explorer-0 tries again")):
        found = find_standstill(look(log, worker("feeder", failure=""), *workers, now=1000.0))
        assert found is not None and found.to_text() == f"nothing has moved for 15 min: {says}: the disk is full"


def test_workers_of_other_hosts_count_and_those_asked_here_count_once(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = {"explorer": ["explorer-0 at 10.0.0.1", "explorer-B-0 at 10.0.0.2"]}
    monkeypatch.setattr("rftstream.queries.state.standstill.hear_members", lambda transport: heard)
    assert look(log, now=1000.0).alive["explorer"] == 2
    assert look(log, worker("explorer"), now=1000.0).alive["explorer"] == 2


def test_roles_that_a_process_of_this_host_holds_are_not_called_dead(log: Log) -> None:
    claim = SimpleNamespace(host=socket.gethostname(), pid=os.getpid(), claimed_at=time.time())
    found = look_elsewhere(SimpleNamespace(claims={"trainer": claim}), log.transport, 1000.0)  # type: ignore[arg-type]
    assert found is not None and found.holders == {"trainer": claim.host}
    waits = find_standstill(look(log, now=1000.0, elsewhere=found))
    assert waits is not None and "no buffer is alive" in waits.to_text() and "no trainer" not in waits.to_text()


def test_workers_say_which_version_they_have_and_whether_they_are_stuck(log: Log) -> None:
    log.trained[1] = 1
    log.step(1, at=950.0)
    found = look(log, worker("explorer", version=1), worker("explorer", version=0, ok=False),
                 WorkerStatus(process="verifier-0", port=1, host="here", health=None), now=1000.0)  # fmt: skip
    assert (found.taken, found.alive, found.stuck) == (1, {"explorer": 1}, ("explorer-0",))
    assert found.sampled is None, "the log is not asked while steps come"


def test_a_run_whose_workers_send_heartbeats_goes_on_though_nothing_is_written() -> None:
    """Such as one whose trainer takes long for a step."""
    found = Elsewhere(hosts=("n1",), silent_s=1800.0, holders={}, members={})
    assert (found.goes_on, found.to_text()) == (False, "workers on n1 (newest record 30 min ago)")
    found = replace(found, members={"explorer": ["a", "b"], "verifier": ["c"]})
    heard = "workers on n1 (newest record 30 min ago, the log hears 2 explorers and 1 verifier)"
    assert (found.goes_on, found.to_text()) == (True, heard)
    for silent_s, writes, said in ((-3600.0, False, "60 min ahead of"), (3600.0, True, "60 min behind")):
        found = replace(found, silent_s=silent_s, writes=writes)
        assert found.goes_on and f"records come {said} this machine's clock" in found.to_text(), found.to_text()
