"""The worked examples of docs/environments-hosts.md, and the agent of docs/agents.md that rftstream runs, do what they
say, each in a process of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.hosted import HostedEnvironment
from rftstream.environments.hosts.agents import AgentResult, AgentWork, HostedAgent, HostedAgentConfig
from rftstream.environments.hosts.pool import close_pools
from rftstream.environments.served import ServedEnvironment
from rftstream.runs.folder import open_run
from rftstream.service.role import Log
from tests.loopback import Asked, HttpServer

EXAMPLES = Path(__file__).parent / "examples"
PROBLEM = Problem(messages=(ChatMessage(role="system", content="Play."),), answer="42")


pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_hosts() -> Iterator[None]:
    yield
    close_pools()


async def play(game: HostedEnvironment | ServedEnvironment) -> list[Reply]:
    first = await game.start()
    assert [message.content for message in first] == ["Play.", "Find my number, 1 to 8."]
    replies = [await game.reply(AssistantMessage(content="eight?"))]
    assert game.save() is not None
    for guess in range(1, 9):
        replies.append(await game.reply(AssistantMessage(content=str(guess))))
        if replies[-1].done:
            break
    await game.close()
    return replies


def check(replies: list[Reply]) -> None:
    assert (replies[0].reward, replies[0].messages[0].content) == (-0.1, "A number, please.")
    assert [reply.messages[0].content for reply in replies[1:-1]] == ["colder", *["warmer"] * (len(replies) - 3)]
    assert (replies[-1].reward, replies[-1].parts) == (1.0, {"found": 1.0})
    assert replies[-1].metrics == {"guesses": len(replies) - 1}


def test_a_game_in_a_host() -> None:
    config = HostedEnvironment.Config(target="my_games:HotOrCold", options={"highest": 8})
    replies = asyncio.run(play(HostedEnvironment(config, problem=PROBLEM, seed=3)))
    check(replies)


def test_a_game_on_a_server() -> None:
    command = [sys.executable, str(EXAMPLES / "my_server.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        url = server.stdout.readline().split()[-1]
        config = ServedEnvironment.Config(url=url, options={"highest": 8})
        try:
            check(asyncio.run(play(ServedEnvironment(config, problem=PROBLEM, seed=3))))
        finally:
            server.kill()


def answered(asked: Asked) -> object:
    text = "42" if "Somebody says" in asked.value["messages"][0]["content"] else "It may be 41."
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_an_agent_in_a_host() -> None:
    agent = HostedAgent(HostedAgentConfig(target="my_agents:draft_and_check"))
    with HttpServer(answered) as server:
        result = asyncio.run(
            agent.run(AgentWork(problem=PROBLEM, base_url=f"{server.url}/v1", api_key="a key", seed=0))
        )
    assert result == AgentResult(reward=1.0, parts={"draft": 0.0})


def test_a_run_with_an_agent(tmp_path: Path) -> None:
    for name in ("my_agents.py", "hosted_agent.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    command = [str(Path(sys.executable).with_name("rftstream")), "run", "hosted_agent.toml"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    opened = open_run(tmp_path / "runs" / "hosted_agent")
    try:
        found = [one.message for one in Log(opened.transport).messages("rollouts")]
    finally:
        opened.transport.close()
    ended = [one for one in found if isinstance(one, Rollout) and one.status == "completed"]
    assert ended and all(len(one.calls) == 2 for one in ended)
    assert all(one.posted is not None and one.posted.parts.keys() == {"draft"} for one in ended)


STAND_IN = """#!{python}
import json, os, sys
with open("{folder}/" + os.path.basename(sys.argv[0]) + ".json", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], file)
if "fail" in " ".join(sys.argv):
    sys.exit("no such model")
print(42)
"""


def test_coding_agents_are_commands_with_an_address_and_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that say what they were given stand in for the agents; tests/e2e/test_coding_agents.py has these."""
    for name in ("claude", "codex", "node"):
        (tmp_path / name).write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    agents = importlib.import_module("my_coding_agents")
    problem, url = {"messages": [{"role": "user", "content": "40+2="}], "answer": "42"}, "http://127.0.0.1:9/v1"

    async def called(work: Any, name: str, **more: Any) -> tuple[list[str], dict[str, str], str]:
        found = await work(problem, url, "rft-key", 1, **more)
        assert found == {"reward": 1.0, "metrics": {"characters": 3}}
        arguments, variables, folder = json.loads((tmp_path / f"{name}.json").read_text())
        assert "rft-key" not in " ".join(arguments), "command lines can be read by others"
        assert variables["HOME"] == folder and not Path(folder).exists()
        assert arguments[-1].startswith("What is 40+2=") or arguments[:1] == ["-p"]
        return arguments, variables, folder

    async def all_of_them() -> None:
        _, variables, _ = await called(agents.claude_code, "claude")
        assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_AUTH_TOKEN"]) == (url, "rft-key")
        arguments, variables, _ = await called(agents.codex, "codex")
        setting = next(one for one in arguments if one.startswith("model_providers"))
        assert variables["RFT_KEY"] == "rft-key"
        assert tomllib.loads(setting)["model_providers"]["rftstream"]["base_url"] == url
        arguments, variables, _ = await called(agents.ai_sdk, "node", options={"api": "chat"})
        assert arguments[1] == "chat" and (variables["RFT_BASE_URL"], variables["RFT_KEY"]) == (url, "rft-key")
        with pytest.raises(RuntimeError, match="no such model"):
            await agents.said_by(["claude", "fail"], {})

    asyncio.run(all_of_them())
