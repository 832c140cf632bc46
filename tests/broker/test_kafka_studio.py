"""The studio over a run on a real broker: its numbers are those of the audit, and a vote given there is judged."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.workplace import FAKE, Workplace, sets

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PEOPLE = ("feedback.pairs=0.9", "feedback.quorum=1", "feedback.expires_s=100000", "run.steps=4")
PAGES = ("/groups", "/charts", "/versions/2", "/questions", "/dead", "?as_of=v2")


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    own = url.partition("/api")[0]  # who has no token says whose page it is
    request = urllib.request.Request(url, data, {"content-type": "application/json", "origin": own} if data else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return json.loads(text) if "json" in answer.headers["content-type"] else text


def test_pages_and_votes(place: Workplace, servers: str, run_id: Callable[[], str]) -> None:
    name = run_id()
    place.write("tiny.toml", FAKE.replace('"tiny"', f'"{name}"') + f'kind = "kafka"\nservers = "{servers}"\n')
    done = place.call("run", "tiny.toml", *sets(*PEOPLE))
    assert done.code == 0, done.err
    studio = place.start("studio", f"runs/{name}", "--port", "0", "--local-role", "annotator", "--local-name", "ada")
    place.wait_for(lambda: "ctrl-C ends it" in studio.out, "the studio to listen")
    found = re.search(r"http://\S+?/", studio.out)
    assert found is not None
    url = found[0].rstrip("/")

    report = place.look("audit", f"runs/{name}", "--json").result
    place.wait_for(
        lambda: get(f"{url}/api/v1/runs/{name}")["groups"]["trained"] == report["groups"]["trained"], "the whole log"
    )
    shown = get(f"{url}/api/v1/runs/{name}")
    assert shown["version"] == report["version"] == 4
    for what in ("groups", "rollouts"):
        assert all(shown[what][fate] == report[what][fate] for fate in ("trained", "filtered", "dead", "pending"))
    for address in PAGES:
        assert "<h1" in get(f"{url}/runs/{name}{address}"), address

    asked = get(f"{url}/api/v1/runs/{name}/questions")["questions"][0]
    body = {"rollouts": asked["rollouts"], "choice": "first", "order": asked["order"]}
    assert get(f"{url}/api/v1/runs/{name}/feedback", body)["written"]
    assert not get(f"{url}/api/v1/runs/{name}/feedback", body)["written"], "the same again"
    more = place.call("resume", f"runs/{name}", *sets("run.steps=6"))
    assert more.code == 0, more.err
    judged = {one["question_id"]: one for one in place.look("feedback", "judgements", f"runs/{name}", "--json").result}
    assert judged[asked["question_id"]]["recorded"]
    place.wait_for(lambda: get(f"{url}/api/v1/runs/{name}")["version"] == 6, "the studio to follow")
    studio.send(signal.SIGINT)
    studio.finish()
    assert place.view(f"runs/{name}").assert_nothing_lost().version == 6
