"""The bridge to Label Studio as a process: killed, and ended while the server does not answer; and the real server."""

from __future__ import annotations

import json
import random
import re
import signal
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.feedback import Feedback, PairChoice
from rftstream.contracts.questions import Question
from rftstream.faults import VARIABLE
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys
from rftstream.integrations.label_studio.client import TOKEN_VARIABLE
from tests.e2e.label_studio import ACCESS_S, Person, RealLabelStudio
from tests.e2e.workplace import FAKE, Process, RunView, Workplace
from tests.label_studio_server import PERSONAL, choice, running, words

SECRET = "a secret of at least sixteen bytes"
PEOPLE = FAKE + '[feedback]\nask = "rating"\nshare = 0.4\npairs = 0.6\nquorum = 2\n'
COMMAND = ("feedback", "label-studio", "runs/tiny")


def asked(run: RunView, kind: str) -> list[Question]:
    return [one for one in run.messages("questions") if isinstance(one, Question) and one.kind == kind]


def votes(run: RunView) -> list[Feedback]:
    return [one for one in run.messages("feedback") if isinstance(one, Feedback)]


def said(run: RunView, question_id: str) -> list[tuple[Any, int]]:
    return [
        (one.choice if one.choice is not None else one.correction or one.reward, one.revision)
        for one in votes(run)
        if one.question_id == question_id
    ]


def assert_no_twin(run: RunView) -> None:
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in votes(run):
        found[one.question_id, one.annotator].append(one.revision)
    assert all(revisions == list(range(len(revisions))) for revisions in found.values()), found


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@pytest.mark.sampled(5, "kills")
@pytest.mark.law("lost", "twice")
@pytest.mark.slow
def test_the_process_is_killed_and_ended(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    place.write("tiny.toml", PEOPLE)
    assert place.call("run", "tiny.toml").code == 0
    run = place.view("runs/tiny")
    with running() as (fake, url):
        token = place.write("token", PERSONAL)
        token.chmod(0o600)
        arguments = (*COMMAND, "--url", url, "--token-file", str(token), "--every-s", "0.2")
        env = {SECRET_VARIABLE: SECRET}
        killed = place.start(*arguments, env={**env, VARIABLE: "label-studio:before_commit:1"})
        name = asked(run, "rating")[0].question_id
        place.wait_for(lambda: fake.tasks_of(name), "tasks")
        fake.annotate(name, 7, choice("rating", "4"))
        assert killed.finish().code == -signal.SIGKILL
        assert said(run, name) == [], "read, and not committed"

        bridge = place.start(*arguments, "--port", "0", "--timeout-s", "600", env=env)
        place.wait_for(lambda: said(run, name) == [(4.0, 0)], "the vote")
        address = place.wait_for(lambda: re.search(r"http\S+/livez", bridge.out), "the address")
        place.wait_for(lambda: health(address[0]).get("annotations") == 1, "a round's figures")  # type: ignore[index]
        second = place.look(*arguments)
        assert second.code == 2 and "another bridge to Label Studio works on this run" in second.err
        fake.faults = ["slow"]
        place.wait_for(lambda: not fake.faults, "a request that hangs")
        bridge.send(signal.SIGTERM)
        assert bridge.finish().code == 0, "it does not wait for the answer"
        fake.released.set()
        done = place.look(*arguments, "--once", "--json")
        assert (done.code, done.result["votes"], done.result["annotations"]) == (0, {}, 1)
        monkeypatch.setenv(TOKEN_VARIABLE, "x.y.z")
        refused = place.look(*arguments[:-4], "--once")
        assert refused.code == 2 and "refuses the personal access token" in refused.err
    gone = place.look(*arguments, "--once")
    assert gone.code == 1 and "is Label Studio up, and is --url right?" in gone.err
    assert_no_twin(run)
    texts = [path.read_text(errors="replace") for path in place.folder.rglob("*.err")]
    assert not any(PERSONAL in text or "access-" in text for text in texts)


# --------------------------------------------------------------------------------------------- the real one


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealLabelStudio]:
    folder = tmp_path / "label-studio"
    folder.mkdir()
    server = RealLabelStudio(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Bridges:
    """Starts bridges, one after the other, and kills them."""

    def __init__(self, place: Workplace, url: str, token: str) -> None:
        self._place = place
        (place.folder / "token").touch(0o600)
        place.write("token", token)
        self._arguments = (*COMMAND, "--url", url, "--token-file", str(place.folder / "token"))
        self.env = {SECRET_VARIABLE: SECRET}

    def start(self, **env: str) -> Process:
        return self._place.start(*self._arguments, "--every-s", "0.3", env={**self.env, **env})

    def once(self) -> Any:
        done = self._place.call(*self._arguments, "--once", "--json", env=self.env)
        assert done.code == 0, done.err
        return done.result


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_real_server(place: Workplace, real: RealLabelStudio) -> None:
    figures: dict[str, Any] = {"started_in_s": round(real.started_in_s)}
    place.write("tiny.toml", PEOPLE)
    assert place.call("run", "tiny.toml").code == 0
    run = place.view("runs/tiny")
    ada, bob = Person(real.url, "ada@example.org"), Person(real.url, "bob@example.org", is_new=True)
    bridges = Bridges(place, real.url, ada.token())
    ratings, pairs = asked(run, "rating"), asked(run, "pair")
    keys = GatewayKeys(SECRET.encode(), "tiny")
    swapped = next(one for one in pairs if one.order == (1, 0))

    # ------------------------------------------------------------------ questions become tasks, a token expires
    bridge = bridges.start()
    tasks = place.wait_for(lambda: found if len(found := ada.tasks()) == len(ratings) + len(pairs) else None, "tasks")
    figures["questions"] = len(tasks)
    time.sleep(2 * ACCESS_S)  # the access token of the first round has expired
    rated, other = ratings[0], ratings[1]

    def task_of(question: Question) -> int:
        return int(tasks[question.question_id]["id"])

    # ------------------------------------------------------------------ pair, rating, correction
    ada.annotate(task_of(swapped), choice("choice", "A"))
    first = ada.annotate(task_of(rated), choice("rating", "4"), words("correction", "42"))
    original = tasks[other.question_id]["data"]["original"]
    second = ada.annotate(task_of(other), choice("rating", "2"), words("correction", original))
    bob.annotate(task_of(rated), choice("rating", "5"))
    place.wait_for(lambda: len(votes(run)) == 5, "votes")
    (pair,) = [one for one in votes(run) if one.question_id == swapped.question_id]
    assert (pair.choice, pair.order, pair.lead_time_s) == (PairChoice.second, (1, 0), 3.5)
    assert pair.annotator == keys.annotator(f"label-studio:{ada.user}")
    correction = f"correction/{rated.rollouts[0]}"
    assert said(run, correction) == [("42", 0)]
    assert said(run, f"correction/{other.rollouts[0]}") == [], "left as it was"
    place.wait_for(lambda: ada.tasks()[rated.question_id]["data"]["state"] == "judged", "a mark")
    assert ada.tasks()[rated.question_id]["is_labeled"]
    assert not ada.tasks()[other.question_id]["is_labeled"]

    # ------------------------------------------------------------------ edit, deletion, the same person twice
    ada.edit(first, choice("rating", "3"), words("correction", "42"))
    ada.delete(second)
    place.wait_for(lambda: len(votes(run)) == 7, "an edit and a deletion")
    assert {one.reward for one in votes(run) if one.question_id == rated.question_id} == {4.0, 5.0, 3.0}
    assert said(run, other.question_id) == [(2.0, 0), (None, 1)]
    again = ada.annotate(task_of(other), choice("rating", "1"))
    twice = ada.annotate(task_of(other), choice("rating", "5"))
    place.wait_for(lambda: said(run, other.question_id)[-1][0] == 5.0, "the newest")
    ada.delete(twice)
    place.wait_for(lambda: said(run, other.question_id)[-1][0] == 1.0, "the one that is left")
    place.wait_for(lambda: not ada.tasks()[other.question_id]["is_labeled"], "one person is no quorum")
    assert len({one.annotator for one in votes(run)}) == 2

    # ------------------------------------------------------------------ killed between reading and the commit
    bridge.send(signal.SIGKILL)
    bridge.finish()
    for point in ("before_commit", "in_commit", "after_commit"):
        before = len(votes(run))
        ada.edit(again, choice("rating", str(2 + before % 3)))
        killed = bridges.start(**{VARIABLE: f"label-studio:{point}:1"})
        assert killed.finish().code == -signal.SIGKILL
        assert len(votes(run)) == before + (point == "after_commit"), point
        assert bridges.once()["votes"] == ({} if point == "after_commit" else {"rating": 1})
        assert_no_twin(run)

    # ------------------------------------------------------------------ killed at any time, while people go on
    dice, live = random.Random(5), dict[int, tuple[str, Person]]()
    figures["actions"], figures["kills"] = 0, 3
    for _ in range(8):
        bridge, before = bridges.start(), len(votes(run))
        place.wait_for(lambda bridge=bridge: "follow each other" in bridge.out, "a bridge")  # type: ignore[misc]
        while figures["actions"] < 6 or len(votes(run)) < before + 3:
            question, person, value = dice.choice(ratings[2:8]), dice.choice((ada, bob)), str(dice.randint(1, 5))
            action = dice.random()
            if action < 0.5 or not live:
                made = person.annotate(task_of(question), choice("rating", value))
                live[made] = (question.question_id, person)
            elif action < 0.75:
                annotation = dice.choice(list(live))
                live[annotation][1].edit(annotation, choice("rating", value))
            else:
                annotation = dice.choice(list(live))
                live.pop(annotation)[1].delete(annotation)
            figures["actions"] += 1
            time.sleep(dice.uniform(0, 0.5))
        bridge.send(signal.SIGKILL)
        bridge.finish()
        figures["kills"] += 1
        assert_no_twin(run)
    bridges.once()
    assert not bridges.once()["votes"]
    assert_no_twin(run)
    stands = newest_on_the_log(run)
    assert stands == newest_there(ada.tasks(), keys)
    figures |= {"standing": len(stands), "votes": len(votes(run))}

    # ------------------------------------------------------------------ the server is away, then the token is revoked
    bridge = bridges.start()
    real.stop()
    place.wait_for(lambda: "is Label Studio up" in bridge.err, "a warning")
    real.start()
    name = pairs[-1].question_id
    ada.annotate(task_of(pairs[-1]), choice("choice", "tie"))
    place.wait_for(lambda: said(run, name)[-1:] == [(PairChoice.tie, 0)] or len(said(run, name)) > 1, "a vote after it")
    place.wait_for(lambda: "all can be reached again" in bridge.err, "the word that it goes on")
    shown = ada.call("GET", "/api/token/")[0]["token"]
    ada.call("POST", "/api/token/blacklist/", {"refresh": shown})
    done = bridge.finish()
    assert done.code == 2 and "refuses the personal access token" in done.err
    assert_no_twin(run)
    assert place.call("audit", "runs/tiny", "--json").result["people"]["votes"] == len(votes(run))
    print(json.dumps(figures))


def newest_on_the_log(run: RunView) -> dict[tuple[str, str], float]:
    """What stands of each rating, by question and annotator."""
    found: dict[tuple[str, str], float | None] = {}
    for one in votes(run):
        if one.question_id.startswith("rating/"):
            found[one.question_id, one.annotator] = one.reward
    return {name: value for name, value in found.items() if value is not None}


def newest_there(tasks: dict[str, dict[str, Any]], keys: GatewayKeys) -> dict[tuple[str, str], float]:
    """The same in Label Studio."""
    found: dict[tuple[str, str], tuple[str, int, float]] = {}
    for name, task in tasks.items():
        for one in task["annotations"] if name.startswith("rating/") else ():
            value = next(r["value"]["choices"][0] for r in one["result"] if r["from_name"] == "rating")
            annotator = keys.annotator(f"label-studio:{one['completed_by']}")
            stands = (one["updated_at"], one["id"], float(value))
            found[name, annotator] = max(found.get((name, annotator), stands), stands)
    return {name: value for name, (_, _, value) in found.items()}
