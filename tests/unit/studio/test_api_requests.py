"""Programs ask of a run what operators ask on its pages: the same records, who asked, and nobody else may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rftstream.contracts.control import Request, RequestKind, RunState
from rftstream.studio.access import StudioRole, TokenFile
from rftstream.studio.api.routes import ENDPOINTS, ROOT, description
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import MemoryRun, Simulation
from tests.unit.studio.studio_scene import client, make_config, rules, watch

BODIES: dict[str, Any] = {
    "pause": {"reason": "the disk"},
    "unpause": {},
    "drain": {"sure": "drain"},
    "evaluate": {"versions": [1]},
    "retry": {"everything": True},
}
"""A body that is taken, of each request."""


class Asked:
    """A studio over a run, with a token for each role."""

    def __init__(self, run: MemoryRun, folder: Path) -> None:
        self.run = run
        self.watched: WatchedRun = watch(run)
        self.watched.follow_once()
        tokens = TokenFile(folder / "tokens.json")
        self.given = {role: tokens.make(role.name, role) for role in StudioRole}
        self.browser: TestClient = client([self.watched], rules(tokens.path))

    def __call__(self, what: str, body: Any, role: StudioRole = StudioRole.operator) -> Any:
        headers = {"authorization": f"Bearer {self.given[role]}"}
        return self.browser.post(f"{ROOT}/runs/demo/{what}", json=body, headers=headers)

    def control(self) -> list[Any]:
        return [one for one in self.run.messages("control") if isinstance(one, RunState | Request)]


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    run = MemoryRun(make_config(), folder=tmp_path / "run")
    run.put_manifest()
    found = Asked(run, tmp_path)
    with found.browser:
        yield found
    found.watched.stop()


def test_pause_unpause_and_drain(asked: Asked) -> None:
    assert asked("pause", {"reason": "the disk"}).json() == {"state": "paused", "changed": True}
    assert asked("pause", {}).json() == {"state": "paused", "changed": False}
    assert asked("unpause", {}).json() == {"state": "running", "changed": True}
    refused = asked("drain", {"reason": "enough"})
    assert refused.status_code == 400 and "sure" in refused.json()["error"]
    assert asked("drain", {"sure": "drain", "reason": "enough"}).json() == {"state": "draining", "changed": True}
    late = asked("pause", {})
    assert late.status_code == 400 and "not taken back" in late.json()["error"]
    paused, running, draining = asked.control()
    assert [paused.state, running.state, draining.state] == ["paused", "running", "draining"]
    assert (paused.reason, draining.reason) == ("the disk", "enough")
    assert all(one.by.startswith("operator, by the studio of ") for one in (paused, running, draining))


def test_evaluations_need_somebody_who_is_alive(asked: Asked) -> None:
    nobody = asked("evaluate", {"versions": [0]})
    assert nobody.status_code == 400 and "no evaluator is alive" in nobody.json()["error"]
    unknown = asked("evaluate", {"evaluation": "other"})
    assert unknown.status_code == 400 and "held-out" in unknown.json()["error"]
    assert not asked.control()


@pytest.mark.slow
def test_dead_groups_are_put_back(tmp_path: Path) -> None:
    config = make_config(policies={"fake": {"fail_share": 0.6}}, buffer={"min_siblings": 3})
    run = Simulation(config, folder=tmp_path / "run", seed=3)
    run.run()
    asked = Asked(run, tmp_path)
    with asked.browser:
        headers = {"authorization": f"Bearer {asked.given[StudioRole.viewer]}"}
        dead = asked.browser.get(f"{ROOT}/runs/demo/groups", params={"fate": "dead"}, headers=headers).json()["groups"]
        name = dead[0]["group_id"]
        assert "none is chosen" in asked("retry", {}).json()["error"]
        assert "no dead group has it" in asked("retry", {"groups": ["sums/0/999/0"]}).json()["error"]
        assert asked("retry", {"groups": [name]}).json() == {"asked": 1, "put_back_before": 0}
        everything = asked("retry", {"everything": True, "sample": True}).json()
        assert everything["asked"] >= len(dead) - 1
    requests = [one for one in asked.control() if isinstance(one, Request) and one.kind is RequestKind.retry_dead]
    assert requests[0].request_id == f"retry/{name}" and requests[0].by.startswith("operator, by the studio of ")
    asked.watched.stop()


@pytest.mark.parametrize("what", list(BODIES))
def test_nobody_but_operators(asked: Asked, what: str) -> None:
    for role in (StudioRole.viewer, StudioRole.annotator):
        answer = asked(what, BODIES[what], role)
        assert answer.status_code == 403 and "operator" in answer.json()["error"]
    address = f"{ROOT}/runs/demo/{what}"
    assert asked.browser.post(address, json=BODIES[what], headers={"origin": "http://testserver"}).status_code == 401
    token = {"authorization": f"Bearer {asked.given[StudioRole.operator]}"}
    foreign = asked.browser.post(address, json=BODIES[what], headers={**token, "origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert asked.browser.post(address, data={"reason": "x"}, headers=token).status_code == 415
    assert asked.browser.get(address, headers=token).status_code == 405
    assert not asked.control()


@pytest.mark.parametrize(
    ("what", "body", "said"),
    [
        ("pause", {"by": "somebody else"}, "unknown field `by`"),
        ("pause", [], "got `array`"),
        ("drain", {"sure": "yes"}, "$.sure"),
        ("evaluate", {"versions": [-1]}, "$.versions[0]"),
        ("evaluate", {"versions": "some"}, "$.versions"),
        ("evaluate", {"versions": [10**30]}, "$.versions[0]"),
        ("retry", {"groups": "sums/0/1/0"}, "$.groups"),
        ("retry", {"by": "somebody else", "everything": True}, "unknown field `by`"),
    ],
)
def test_what_is_no_request(asked: Asked, what: str, body: Any, said: str) -> None:
    answer = asked(what, body)
    assert answer.status_code == 400 and said in answer.json()["error"], answer.text
    assert not asked.control()


def test_the_description_names_the_role() -> None:
    operators = [one for one in ENDPOINTS if one.role is StudioRole.operator]
    assert {one.path.rpartition("/")[2] for one in operators} == set(BODIES)
    for one in operators:
        operation = description()["paths"][ROOT + one.path]["post"]
        assert operation["description"] == "Needs the role operator." and operation["security"] == [{"token": []}]
        assert operation["requestBody"]["required"] and operation["summary"]
