"""`check` starts each environment once, and says what is wrong with it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.environments.hosts.pool import close_pools
from rftstream.preflight.checks.check import check
from rftstream.preflight.checks.check_report import CheckReport
from tests.configs import small_run

OWN = """
import time
from rftstream.contracts.tasks import ChatMessage
from rftstream.environments.base import Reply


class Fine:
    closed = []

    def __init__(self, config, *, problem, seed):
        self.problem = problem

    async def start(self):
        return [*self.problem.messages, ChatMessage(role="user", content="Go.")]

    def tools(self):
        return [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def reply(self, said):
        return Reply(done=False, messages=(ChatMessage(role="user", content=f"{said.text} what?"),), reward=0.5)

    def close(self):
        self.closed.append(self.problem.answer)


class Broken(Fine):
    def start(self):
        return self.count() / 0

    def count(self):
        return len(self.problem.info["boxes"])


class Odd(Fine):
    def start(self):
        return "Go."


class Hangs(Fine):
    def start(self):
        time.sleep(600)


class Mute:
    def __init__(self, config, *, problem, seed):
        pass

    def start(self):
        return []

    def close(self):
        pass


class Clings(Fine):
    def close(self):
        raise OSError("it is in use")


class Deaf(Fine):
    def reply(self, said):
        return said.no_such


class Asks(Fine):
    turns = 0

    def reply(self, said):
        self.turns += 1
        right = said.text == self.problem.answer
        messages = () if right else (ChatMessage(role="user", content="Wrong. " * self.words),)
        return Reply(done=right or self.turns == 3, messages=messages, reward=self.pays(right))

    words = 3

    def pays(self, right):
        return float(right)


class Pays(Asks):
    words = 100

    def pays(self, right):
        return 1.0


class Foreign:
    def __init__(self, config, *, problem, seed):
        self.boxes = config["boxes"]

    def start(self):
        return [{"role": "user", "content": f"{self.boxes} boxes"}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_check_environments.py").write_text(OWN)
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    close_pools()


def looked(
    folder: Path,
    environment: str | dict[str, Any],
    explorer: dict[str, Any] | None = None,
    reward: str = "exact",
    **settings: Any,
) -> CheckReport:
    """`environment` and `reward`: of the taskset. `settings`: of the environment of that name."""
    name = environment if isinstance(environment, str) else environment["name"]
    name = f"own_check_environments:{name}" if name[0].isupper() else name
    named = name if isinstance(environment, str) else {**environment, "name": name}
    return check(
        loader.from_dict(
            {
                "run": {"name": "demo", "steps": 10},
                "model": {"path": "fake", "context": 400},
                "explorer": {"policy": "fake", **(explorer or {})},
                "trainer": {"backend": "fake"},
                "tasksets": {"train": {"source": "jsonl:train.jsonl", "environment": named, "reward": reward}},
                "environments": {name: settings} if settings else {},
                "base": str(folder),
            }
        )
    )


def error(
    folder: Path, environment: str | dict[str, Any], explorer: dict[str, Any] | None = None, **settings: Any
) -> str:
    (found,) = looked(folder, environment, explorer, **settings).errors
    assert "\n" not in found
    return found


def test_what_it_shows_first_and_its_tools_are_in_the_first_prompt(folder: Path) -> None:
    from own_check_environments import Fine

    Fine.closed.clear()  # its module stays for all tests of a process, and their order is any
    report = looked(folder, "Fine")
    assert report.errors == []
    (line,) = report.tasksets
    assert line.first is not None
    assert [message.content for message in line.first.messages] == ["1+1=", "Go."]
    assert "  tools: look\n" in report.to_text()
    assert report.to_json()["tasksets"][0]["tools"] == ["look"]
    assert Fine.closed == ["2"] * 3, "the answer, an empty turn, and the other problem's answer"


def test_right_and_wrong_answers_are_played_to_the_end(folder: Path) -> None:
    line = looked(folder, "Asks", reward="environment").tasksets[0]
    assert [(play.said, play.text, play.num_turns, play.reward) for play in line.plays] == [
        ("the problem's answer", "2", 1, 1.0), ("an empty turn", "", 3, 0.0), ("another problem's answer", "3", 3, 0.0),
    ]  # fmt: skip
    report = looked(folder, "Asks", reward="environment")
    assert report.warnings == []
    assert (
        "  reward: 1 for the problem's answer, 0 for an empty turn, 0 for another problem's answer\n"
        in report.to_short_text()
    )
    assert "0 for an empty turn" not in looked(folder, "Asks").to_short_text(), "the taskset's reward is another one"
    found = looked(folder, "Fine", reward="environment").to_short_text()
    assert "reward: 2 for the problem's answer (not done after 4 turns), 2 (0 expected) for an empty turn (not" in found


def test_a_reward_that_pays_for_wrong_answers_is_doubtful(folder: Path) -> None:
    report = looked(folder, "Pays", reward="environment")
    assert report.errors == []
    said = "\n".join(report.warnings)
    assert "tasksets.train.environment: an empty turn gets 3 from the environment, and the problem's answer 1: " in said
    assert "tasksets.train.environment: another problem's answer gets 3 from" in said
    assert "3 turns of it have" in said and "and the context is 400: rollouts will be cut off" in said


def test_replies_are_shown_as_the_model_sees_them(folder: Path) -> None:
    report = looked(folder, "Asks", reward="environment")
    seen = report.tasksets[0].seen
    assert seen is not None and "Wrong. Wrong. Wrong. " in seen.reply and seen.num_turns == 3
    assert seen.num_reply_tokens < seen.num_tokens < 400
    text = report.to_short_text()
    assert f"  as the model sees that to {seen.said}, {seen.num_reply_tokens} tokens: " in text
    assert f"  a conversation of 3 turns has {seen.num_tokens} tokens\n" in text
    assert report.to_json()["tasksets"][0]["seen"]["num_tokens"] == seen.num_tokens


def test_games_with_one_prompt_are_told_apart_by_what_they_hide(folder: Path) -> None:
    """All say `Guess my number.`; what is guessed is the answer."""
    rows = [{"prompt": "Guess my number.", "answer": str(number)} for number in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"source": "jsonl:train.jsonl", "environment": "attempts", "options": {"skip": 2}}
    evaluations = {
        "other": {**train, "options": {"size": 2}},
        "same": {**train, "options": {"skip": 3}},
        "at-once": {"source": "jsonl:train.jsonl", "options": {"size": 2}},
    }
    config = small_run(
        model={"path": "fake", "context": 400}, explorer={"policy": "fake"}, trainer={"backend": "fake"},
        tasksets={"train": train}, evaluations=evaluations, base=str(folder),
    )  # fmt: skip
    report = check(config)
    assert report.errors == []
    assert {line.name: line.trained for line in report.tasksets[1:]} == {"other": 0, "same": 2, "at-once": 2}


def test_it_replies_to_the_answer_once(folder: Path) -> None:
    report = looked(folder, "Fine")
    assert report.warnings == []
    assert "  the environment replies to the problem's answer: 2 what?; reward 0.5\n" in report.to_short_text()
    assert (
        "  the environment replies to the problem's answer: the rollout ends\n"
        in looked(folder, "tools").to_short_text()
    )
    deaf = looked(folder, "Deaf")
    assert deaf.errors == []
    assert "reply: AttributeError: 'AssistantMessage' object has no attribute 'no_such'" in "\n".join(deaf.warnings)


def test_an_error_is_told_with_its_line(folder: Path) -> None:
    place = OWN.splitlines().index('        return len(self.problem.info["boxes"])') + 1
    assert error(folder, "Broken") == (
        "tasksets.train.environment: 'own_check_environments:Broken': start: KeyError: 'boxes' "
        f"(own_check_environments.py:{place}, in count); mend it, and check again"
    )


def test_what_is_returned_is_looked_at(folder: Path) -> None:
    assert "start: TypeError: got str, expected a list of ChatMessage; mend it" in error(folder, "Odd")
    assert "Mute has no method reply; write one" in error(folder, "Mute")


def test_one_that_hangs_is_given_up(folder: Path) -> None:
    text = error(folder, "Hangs", {"reply_timeout_s": 0.2})
    assert "start: no answer within 0.2 s, the limit of explorer.reply_timeout_s; mend what hangs" in text


def test_one_that_does_not_close_is_a_warning(folder: Path) -> None:
    report = looked(folder, "Clings")
    assert report.errors == []
    assert "close: OSError: it is in use (own_check_environments.py:" in "\n".join(report.warnings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tools": ["search"]}, "environments.tools.options.search"),
        ({"tools": ["calculator"], "options": {"calculator": {"digits": 3}}}, "digits"),
        ({"tools": ["nowhere:tool"]}, "'nowhere:tool' cannot be imported: ModuleNotFoundError"),
        ({"tools": ["calculater"]}, "unknown tool 'calculater'; known: calculator"),
    ],
)
def test_tools_whose_settings_do_not_fit(folder: Path, settings: dict[str, Any], said: str) -> None:
    text = error(folder, "tools", **settings)
    assert text.startswith("tasksets.train.environment: environments.tools")
    assert said in text


def test_tools_are_counted_into_every_prompt(folder: Path) -> None:
    report = looked(folder, "tools")
    assert report.errors == []
    assert report.tasksets[0].tools == ("calculator",)


@pytest.mark.slow
def test_hosted_ones(folder: Path) -> None:
    def settings(**more: Any) -> dict[str, Any]:
        return {"target": "own_check_environments:Foreign", "path": [str(folder)], **more}

    report = looked(folder, "hosted", **settings(options={"boxes": 3}))
    assert report.errors == []
    (line,) = report.tasksets
    assert line.first is not None
    assert [message.content for message in line.first.messages] == ["3 boxes"]
    assert "'hosted': start: HostedCodeError: " in (text := error(folder, "hosted", **settings()))
    assert "KeyError: 'boxes'" in text
    missing = error(folder, "hosted", **settings(python="nowhere/bin/python"))
    assert "python: got 'nowhere/bin/python', expected an interpreter that can be run; make one" in missing
    assert "ModuleNotFoundError" in error(folder, "hosted", target="no_such_module:Game")
    assert "environments.hosted.target: missing" in error(folder, "hosted")


def test_errors_say_where_the_settings_stand(folder: Path) -> None:
    def said(*, usual: dict[str, Any], **own: Any) -> str:
        return error(folder, {"name": "hosted", **own}, **usual)

    base = {"target": "own_check_environments:Foreign", "path": [str(folder)]}
    place = "tasksets.train.environment"
    assert said(usual={"timeout_s": 5.0}, processes=2).startswith(f"{place}.target: missing; name the class")
    assert said(usual=base, python="nowhere/python").startswith(f"{place}.python: got 'nowhere/python', expected an")
    assert said(usual=base, target="Game").startswith(f"{place}.target: got 'Game', expected module:Thing")
    assert said(usual={**base, "python": "nowhere/python"}, processes=2).startswith(f"{place}: environments: python:")
    assert error(folder, {"name": "tools", "tools": ["calculator", "calculator"]}) == (
        f"{place}: tools has 'calculator' twice; remove one"
    )


def test_settings_of_its_own_are_shown(folder: Path) -> None:
    report = looked(folder, {"name": "hosted", "options": {"boxes": 4}}, None, path=[str(folder)],
                    target="own_check_environments:Foreign")  # fmt: skip
    assert report.errors == [] and not [one for one in report.warnings if "nothing uses it" in one]
    (part,) = [part for part in report.parts if part.kind == "environment of tasksets.train"]
    assert part.name == "hosted" and "options={'boxes': 4}" in part.settings
    (line,) = report.tasksets
    assert line.first is not None and line.first.messages[0].content == "4 boxes"


def test_an_agent_is_not_asked(folder: Path) -> None:
    report = looked(folder, "agent", {"gateway_address": "127.0.0.1:0"})
    assert report.errors == []
    assert report.tasksets[0].first is not None


def test_ports_of_several_explorers(folder: Path) -> None:
    report = looked(folder, "agent", {"count": 3, "gateway_address": "127.0.0.1:8900", "gateway_url": "https://a/v1"})
    assert report.errors == []
    assert "explorer.gateway_url: 3 explorers have this one URL" in "\n".join(report.warnings)
    report = looked(folder, "agent", {"count": 3, "gateway_address": "127.0.0.1:65535"})
    assert "explorer.gateway_address: got '127.0.0.1:65535' for 3 explorers" in "\n".join(report.errors)


def test_what_runs_agents_is_looked_at(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/agent"
        report = looked(folder, "agent", url=url)
        assert report.errors == []
        assert f"tasksets.train.environment: 'agent': nobody answers at {url} now: " in "\n".join(report.warnings)
        probe.listen()
        assert not any("nobody answers" in text for text in looked(folder, "agent", url=url).warnings)
        named = {"name": "agent", "url": url}
        assert not any("nobody answers" in text for text in looked(folder, named, url="http://127.0.0.1:9/").warnings)
    assert "environments.agent.url: got 'here', expected an address" in error(folder, "agent", url="here")
    assert error(folder, {"name": "agent", "url": "here"}).startswith("tasksets.train.environment.url: got 'here', exp")
    assert "NOBODY_SET_IT is not set" in error(folder, "agent", url=url, api_key="env:NOBODY_SET_IT")
    assert "environments.hosted_agent.target: missing" in error(folder, "hosted_agent")
