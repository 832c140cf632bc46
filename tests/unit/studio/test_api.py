"""The interface for programs: the numbers of the pages, votes under the name of the token, errors as JSON, and a
description that says what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from rftstream.contracts.feedback import FeedbackKind
from rftstream.queries.audits.audit import audit
from rftstream.queries.reference.source_text import class_docs
from rftstream.studio.access import StudioRole, TokenFile
from rftstream.studio.api import types as api_types
from rftstream.studio.api.routes import ENDPOINTS, ROOT
from rftstream.studio.app import make_app
from rftstream.studio.guard import RateLimits
from tests.suite.each import each
from tests.unit.studio.studio_scene import client, rules, shown
from tests.unit.studio.test_questions import Scene

JSON = {"content-type": "application/json"}


class ApiScene(Scene):
    """A studio with a token for each role."""

    def __init__(self, folder: Any, **feedback: Any) -> None:
        super().__init__(folder, **feedback)
        self.tokens = TokenFile(folder / "tokens.json")
        self.given = {role: self.tokens.make(role.name, role) for role in StudioRole}
        self.guard = rules(self.tokens.path)
        self.browser = client([self.watched], self.guard)

    def get(self, path: str, role: StudioRole = StudioRole.viewer, **query: Any) -> Any:
        return self.browser.get(ROOT + path, params=query, headers=self.bearer(role))

    def post(self, body: Any, role: StudioRole = StudioRole.annotator, **headers: str) -> Any:
        return self.browser.post(f"{ROOT}/runs/demo/feedback", json=body, headers={**self.bearer(role), **headers})

    def bearer(self, role: StudioRole) -> dict[str, str]:
        return {"authorization": f"Bearer {self.given[role]}"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiScene]:
    with shown(lambda: ApiScene(tmp_path_factory.mktemp("run"))) as found:
        yield found


def test_numbers_are_those_of_the_audit(scene: ApiScene) -> None:
    (run,) = scene.get("/runs").json()
    assert (run["name"], run["version"], run["error"]) == ("demo", 6, "")
    seen, report = scene.get("/runs/demo").json(), audit(scene.run.transport())
    for name in ("groups", "rollouts"):
        assert all(seen[name][fate] == getattr(getattr(report, name), fate) for fate in seen[name])
    assert seen["status"]["version"] == seen["version"] == 6
    past = scene.get("/runs/demo", as_of="v3").json()
    assert (past["version"], past["as_of"], past["status"], past["groups"]["trained"]) == (3, "v3", None, 6)


def test_groups_and_rollouts(scene: ApiScene) -> None:
    trained = scene.get("/runs/demo/groups", fate="trained").json()
    assert {one["fate"] for one in trained["groups"]} == {"trained"}
    name = trained["groups"][0]["group_id"]
    found = scene.get(f"/runs/demo/groups/{name}").json()
    assert found == trained["groups"][0] and len(found["siblings"]) == 3
    rollout = scene.get(f"/runs/demo/rollouts/{name}/1").json()
    assert rollout["rollout"] == found["siblings"][1] and rollout["turns"][-1]["role"] == "assistant"
    assert rollout["reward"] == rollout["rollout"]["reward"] and rollout["places"]["verdict"].startswith("verified[")
    older = scene.get("/runs/demo/groups", before=1).json()
    assert [one["sequence"] for one in older["groups"]] == [0] and older["before"] is None


def test_a_vote_an_edit_and_a_retract(scene: ApiScene) -> None:
    before = len(scene.votes())
    page = scene.get("/runs/demo/questions", StudioRole.annotator).json()
    asked = next(one for one in page["questions"] if one["kind"] == "pair")
    assert page["total"] == len(page["questions"]) and page["skip"] is None and not asked["answered"]
    body = {"rollouts": asked["rollouts"], "choice": "first", "order": asked["order"], "lead_time_s": 2.5}
    said = scene.post(body).json()
    assert said == {
        "question_id": asked["question_id"], "written": True, "edit": False, "expired": False, "applies": True,
    }  # fmt: skip
    assert scene.post(body).json()["written"] is False
    assert scene.post({**body, "choice": "tie"}).json()["edit"] is True
    now = scene.get("/runs/demo/questions", StudioRole.annotator).json()["questions"]
    assert next(one for one in now if one["question_id"] == asked["question_id"])["answered"]
    scene.post({"rollouts": asked["rollouts"], "retract": "pair"})
    votes = scene.votes()[before:]
    assert [one.kind for one in votes] == [FeedbackKind.pair, FeedbackKind.pair, FeedbackKind.retract]
    assert {(one.source, len(one.annotator)) for one in votes} == {("api", 32)}
    assert (votes[0].order, votes[0].lead_time_s) == (tuple(asked["order"]), 2.5)


@each(
    ("body", "said"),
    [
        ([], "got `array`"),
        ({"rollout": "sums/0/0/0/0"}, "no answer"),
        ({"rollout": "sums/0/0/0/0", "label": 1, "rating": 2}, "found label, rating"),
        ({"rollout": "sums/0/0/0/0", "label": "1"}, "$.label"),
        ({"rollout": "sums/0/0/0/0", "label": 1, "by": "eve"}, "unknown field `by`"),
        ({"rollout": "sums/0/0/0/0", "label": 1, "source": "x"}, "unknown field `source`"),
        ({"rollout": "sums/0/9999/0/0", "label": 1}, "not scored in this run"),
        ({"rollout": "<script>", "label": 1}, "expected one rollout"),
        ({"rollout": "sums/0/0/0/0", "choice": "first"}, "two siblings"),
        ({"rollouts": ["sums/0/0/0/0", "sums/0/1/0/0"], "choice": "first"}, "two siblings of one group"),
        ({"rollout": "sums/0/0/0/0", "retract": "everything"}, "$.retract"),
        ({"rollout": "sums/0/0/0/0", "correction": ""}, "correction"),
    ],
)
def test_what_is_no_vote(scene: ApiScene, body: Any, said: str) -> None:
    before = len(scene.votes())
    answer = scene.post(body)
    assert answer.status_code == 400 and said in answer.json()["error"]
    assert len(scene.votes()) == before


def test_errors_are_json(scene: ApiScene) -> None:
    address = f"{ROOT}/runs/demo/feedback"
    token = scene.bearer(StudioRole.annotator)
    answers = {
        404: [scene.get("/nothing"), scene.get("/runs/other"), scene.get("/runs/demo/groups/sums/0/999/0"),
              scene.get(f"/runs/demo/groups/sums/0/{'9' * 5000}/0")],
        400: [scene.get("/runs/demo", as_of="yesterday"), scene.get("/runs/demo", as_of="1e300"),
              scene.get("/runs/demo/groups", fate="king"), scene.get("/runs/demo/questions", state="king"),
              scene.get("/runs/demo/questions", skip="-1"), scene.get("/runs/demo/groups", before="9" * 16),
              scene.browser.post(address, content=b"{" * 50_000, headers={**token, **JSON})],
        401: [scene.browser.get(f"{ROOT}/runs"), scene.browser.post(address, headers={"origin": "http://testserver"}),
              scene.browser.get(f"{ROOT}/runs", headers={"accept": "text/html"})],
        403: [scene.post({}, StudioRole.viewer), scene.post({}, origin="http://evil.example")],
        405: [scene.browser.put(f"{ROOT}/runs", headers=token)],
        413: [scene.browser.post(address, content=b"x" * 10_000_000, headers=token)],
        415: [scene.browser.post(address, data={"label": "1"}, headers=token)],
        421: [scene.browser.get(f"{ROOT}/runs", headers={**token, "host": "evil.example"})],
    }  # fmt: skip
    for status, given in answers.items():
        for answer in given:
            assert answer.status_code == status, answer.text[:300]
            assert set(answer.json()) == {"error"} and answer.json()["error"], answer.text


def test_a_run_that_has_not_begun_says_so(tmp_path: Any) -> None:
    from rftstream.testing import MemoryRun
    from tests.unit.studio.studio_scene import make_config, watch

    watched = watch(MemoryRun(make_config(), folder=tmp_path))
    with client([watched]) as browser:
        assert browser.get(f"{ROOT}/runs").json() == [{"name": "demo", "state": None, "version": None, "error": ""}]
        answer = browser.get(f"{ROOT}/runs/demo")
        assert answer.status_code == 503 and "has not begun" in answer.json()["error"]
    watched.stop()


def test_the_description_is_that_of_the_routes(scene: ApiScene) -> None:
    found = scene.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1") and sum(map(len, found["paths"].values())) == len(ENDPOINTS)
    app = make_app([], scene.guard, follow=False)
    routes = {getattr(route, "path", "").replace(":count", "") for route in app.routes}
    assert set(found["paths"]) <= routes
    text = str(found)
    for name in found["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text
    vote = found["components"]["schemas"]["VoteBody"]
    assert vote["additionalProperties"] is False and "by" not in vote["properties"]
    for name, schema in found["components"]["schemas"].items():
        for key, under_it in class_docs(getattr(api_types, name)).items():
            told = schema.get("properties", {}).get(key, schema)["description"]
            assert under_it in told, f"{name}.{key}"


@pytest.mark.slow
@each("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_a_viewer_changes_nothing_by_any_address(scene: ApiScene, method: str) -> None:
    app = make_app([scene.watched], scene.guard, follow=False)
    before = len(scene.run.records("feedback")), len(scene.run.records("control"))
    group = scene.questions()[0].group_id
    values = dict(zip(("taskset", "taskset_pass", "problem", "attempt"), group.split("/"), strict=True))
    values |= {"run": "demo", "kind": "label", "siblings": "0", "sibling": "0", "letter": "x", "version": "1"}
    scene.guard.limits = RateLimits(burst=1e9)
    for path in {getattr(route, "path", "") for route in app.routes} - {"/login", "/logout"}:
        address = re.sub(r"\{(\w+)(:\w+)?\}", lambda part: values.get(part[1], "0"), path)
        fields = {"number": "1", "ask": "pause", "everything": "1", "label": "1"}
        for sent in ({"data": fields}, {"json": {"rollout": f"{group}/0", "label": 1}}):
            answer = scene.browser.request(method, address, headers=scene.bearer(StudioRole.viewer), **sent)  # type: ignore[arg-type]
            assert answer.status_code == 403, (method, address)
    assert (len(scene.run.records("feedback")), len(scene.run.records("control"))) == before
