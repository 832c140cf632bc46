"""Agents ask for answers in a form, by each dialect; a real model is trained on them, and its explorer is killed."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import jsonschema
import pytest

from rftstream.contracts.token_values import ALLOWED
from rftstream.gateway.keys import SECRET_VARIABLE, GatewayKeys
from tests.e2e.test_agents import SECRET, free_port
from tests.e2e.workplace import Workplace

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow

RUN = """
[run]
name = "forms"
steps = 3
[model]
dtype = "float32"
[model.make]
characters = '0123456789+={}":,abny'
layers = 1
width = 16
heads = 2
context = 128
[tasksets.sums]
source = "arithmetic"
environment = "agent"
reward = "environment"
[sampling]
max_tokens = 60
top_p = 0.9
[feeder]
groups_per_batch = 2
group_size = 3
[explorer]
policy = "hf"
gateway_address = "127.0.0.1:PORT"
idle_timeout_s = 200.0
[trainer]
lr = 1e-3
checkpoint_every = 2
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["yab", "nan"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "name": "answer", "schema": SCHEMA}


def ask(base_url: str, key: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {key}", "idempotency-key": path}
    with urlopen(Request(base_url + path, json.dumps(body).encode(), headers), timeout=120) as answer:
        return json.loads(answer.read())


def answered(number: int, base_url: str, key: str, messages: list[Any]) -> tuple[str, bool]:
    """The text of an answer, and whether it is whole."""
    if number % 3 == 0:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        found = ask(base_url, key, "/chat/completions", {"messages": messages, "response_format": form})
        [choice] = found["choices"]
        return choice["message"]["content"], choice["finish_reason"] == "stop"
    if number % 3 == 1:
        found = ask(base_url, key, "/responses", {"input": messages, "text": {"format": FORM}})
        return found["output"][0]["content"][0]["text"], found["status"] == "completed"
    body = {"messages": messages, "max_tokens": 60, "output_format": FORM}
    found = ask(base_url.removesuffix("/v1"), key, "/v1/messages", body)
    return found["content"][0]["text"], found["stop_reason"] == "end_turn"


@pytest.mark.heavy("a model answers in several forms and is trained on what it said")
@pytest.mark.timeout(900)
def test_each_answer_has_its_form_and_what_was_left_is_trained(place: Workplace) -> None:
    port = free_port()
    place.write("forms.toml", RUN.replace("PORT", str(port)))
    run = place.start("run", "forms.toml", "--json", env={SECRET_VARIABLE: SECRET})
    view = place.view("runs/forms")
    base_url, told, over = f"http://127.0.0.1:{port}/v1", list[tuple[str, bool]](), threading.Event()
    token = GatewayKeys(SECRET.encode(), view.folder.run_id).session_token()
    refused: list[str] = []

    def work(number: int) -> None:
        while not over.is_set():
            with contextlib.suppress(URLError, ConnectionError, TimeoutError):
                try:
                    session = ask(base_url, token, "/sessions", {})
                    messages = session["problem"]["messages"]
                    if not refused:
                        wrong = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
                        try:
                            body = {"messages": messages, "response_format": wrong}
                            ask(session["base_url"], session["api_key"], "/chat/completions", body)
                        except HTTPError as error:
                            refused.append(f"{error.code} {error.read().decode()}")
                    found = answered(number, session["base_url"], session["api_key"], messages)
                    told.append(found)
                    ask(session["base_url"], session["api_key"], "/rollouts/end", {"reward": float("9" in found[0])})
                except HTTPError:
                    over.wait(0.2)
            over.wait(0.05)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        place.wait_for(lambda: len(told) >= 4, "some answers")
        place.kill_worker("explorer-0")
        done = run.finish()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert done.code == 0, done.err
    assert refused[0].startswith("400 ") and "not" in refused[0]
    whole = [json.loads(text) for text, is_whole in told if is_whole]
    assert len(whole) >= 10
    for answer in whole:
        jsonschema.validate(answer, SCHEMA)
    for experience in view.experiences():
        assert all(ALLOWED in segment.beside for segment in experience.segments)
    first = view.steps()[0].metrics
    assert first["mismatch_k3"] < 1e-9, "the same weights, and the same sets"
    view.assert_nothing_lost()
    replayed = place.call("replay", "runs/forms")
    assert replayed.code == 0 and "equal bit for bit" in replayed.out + replayed.err
    place.assert_nobody_left()
