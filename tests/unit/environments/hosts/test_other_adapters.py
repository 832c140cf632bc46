"""The adapters of textarena, openenv, openreward and verifiers, each with its package in an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.hosted import HostedEnvironment
from rftstream.environments.hosts.agents import AgentResult, AgentWork, HostedAgent, HostedAgentConfig
from rftstream.environments.hosts.pool import close_pools, list_tasks, pool_of
from rftstream.errors import HostedCodeError
from tests.loopback import Asked, HttpServer
from tests.unit.environments.hosts.scene import CALL, PROBLEM, say
from tests.unit.environments.hosts.venvs import interpreter
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture(scope="module", autouse=True)
def no_hosts() -> Iterator[None]:
    """Tests share hosts, which take long to start. None is left in the end."""
    yield
    close_pools()


def hosted(target: str, python: str, options: dict[str, Any], *, seed: int = 5, **settings: Any) -> HostedEnvironment:
    config = HostedEnvironment.Config(python=python, target=target, options=options, timeout_s=300.0, **settings)
    return HostedEnvironment(config, problem=PROBLEM, seed=seed)


async def play(own: HostedEnvironment, *words: str) -> tuple[str, list[Reply]]:
    first = (await own.start())[-1].content
    replies = [await own.reply(say(word)) for word in words]
    await own.close()
    return first, replies


# textarena


@pytest.fixture(scope="module")
def arena() -> str:
    return interpreter("textarena==0.7.4")


GUESS = {"id": "GuessTheNumber-v0"}


async def find_the_number(own: HostedEnvironment, *, kill: bool = False) -> tuple[int, Reply]:
    """Halve the range until the number is found; kill the host on the way."""
    first = await own.start()
    assert "between 1 and 20" in first[-1].content
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        reply = await own.reply(say(f"[{guess}]"))
        if reply.done:
            await own.close()
            return guess, reply
        low, high = (guess + 1, high) if "higher" in reply.messages[0].content else (low, guess - 1)
        assert "You have to guess" not in reply.messages[0].content, "only what is new is said"
        if kill:
            kill = False
            [host] = own._pool.hosts
            os.kill(host.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: own._pool.hosts == ())


def test_games_of_textarena(arena: str) -> None:
    async def games() -> list[tuple[int, Reply]]:
        own = [hosted("textarena", arena, GUESS, seed=seed) for seed in (5, 6, 7, 5)]
        together = await asyncio.gather(*(find_the_number(one) for one in own))
        return [*together, await find_the_number(hosted("textarena", arena, GUESS), kill=True)]

    results = asyncio.run(games())
    numbers = [number for number, _ in results]
    assert numbers[0] == numbers[3] == numbers[4], "the seed decides, whoever else plays and however often a host dies"
    assert len(set(numbers)) > 1
    assert all(reply.reward == 1.0 for _, reply in results)
    assert results[0][1].metrics == results[4][1].metrics
    assert results[0][1].metrics["invalid_moves"] == 0.0


def test_a_game_of_two(arena: str, tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text(
        "import re\n"
        "def first_free(observation, player, seed):\n"
        "    return re.findall(r\"'(\\[\\d\\])'\", observation.rpartition('Available Moves')[2])[0]\n"
    )
    options = {"id": "TicTacToe-v0", "num_players": 2, "seat": 1, "opponent": "players:first_free"}
    own = hosted("textarena", arena, options, path=(str(tmp_path),))
    first, replies = asyncio.run(play(own, "[3]", "[4]"))
    assert "Player 0 placed their symbol (O) in cell 0" in first
    assert [(reply.done, reply.reward) for reply in replies] == [(False, None), (True, -1.0)]


def test_a_policy_plays_against_itself(arena: str) -> None:
    """Each player has a conversation of its own, in a role of its own, and the game's reward for it."""
    busy: list[str] = []

    def first_free(asked: Asked) -> object:
        busy.append(asked.value["model"])
        if len(busy) == 2:
            return 503, {"error": "not now"}, {"retry-after": "0"}
        text = asked.value["messages"][-1]["content"]
        move = re.findall(r"'(\[\d\])'", text.rpartition("Available Moves")[2])[0]
        return 200, {"choices": [{"message": {"role": "assistant", "content": move}}]}

    options = {"id": "TicTacToe-v0", "instructions": "Be bold."}
    agent = HostedAgent(HostedAgentConfig(target="textarena_self_play", python=arena, options=options))
    with HttpServer(first_free) as server:
        work = AgentWork(problem=PROBLEM, base_url=f"{server.url}/v1", api_key="key", seed=3)
        result = asyncio.run(agent.run(work))
    assert result == AgentResult(
        reward=None, roles={"player_0": 1.0, "player_1": -1.0}, metrics={"moves": 7.0, "invalid_moves": 0.0}
    )
    models = [one.value["model"] for one in server.asked]
    assert models == [f"policy:player_{number}" for number in (0, 1, 1, 0, 1, 0, 1, 0)], "a call is made again"
    begun = [one.value["messages"] for one in server.asked[:2]]
    assert all(len(messages) == 1 and "Be bold." in messages[0]["content"] for messages in begun)
    assert [one["role"] for one in server.asked[-1].value["messages"]] == ["user", "assistant"] * 3 + ["user"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "missing id"),
        ({"id": "Nothing-v0"}, "Environment Nothing-v0 not found"),
        ({"id": "TicTacToe-v0", "num_players": 2}, "missing opponent"),
        ({"id": "x", "name": "y"}, "unknown key 'name'"),
    ],
)
def test_wrong_options_of_textarena(arena: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(HostedCodeError, match=expected):
        asyncio.run(play(hosted("textarena", arena, options)))


# openenv

ECHO_SERVER = '''
import socket, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Word(Action):
    message: str
    loud: bool = False

class Heard(Observation):
    text: str

class Echo(Environment):
    """Ends after three words."""
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **more):
        self._state = State(episode_id="e", step_count=0)
        return Heard(text=f"seed {seed}, {more}", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        done = self._state.step_count == 3
        text = action.message.upper() if action.loud else action.message
        return Heard(text=text, done=done, reward=float(done))

    @property
    def state(self):
        return self._state

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(64)
print(listener.getsockname()[1], flush=True)
app = create_fastapi_app(Echo, Word, Heard, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
'''


@pytest.fixture(scope="module")
def openenv() -> str:
    return interpreter("openenv==0.10.0")


@pytest.fixture
def echo_server(openenv: str, tmp_path: Path) -> Iterator[str]:
    with served(openenv, tmp_path / "echo_server.py", ECHO_SERVER) as url:
        yield url


async def test_an_openenv_server(openenv: str, echo_server: str) -> None:
    options = {"url": echo_server, "observation": "text", "reset": {"level": 2}, "fields": {"loud": True}}
    own = [hosted("openenv", openenv, options, seed=seed) for seed in (5, 6)]
    for seed, (first, replies) in zip((5, 6), await asyncio.gather(*(play(one, *"abc") for one in own)), strict=True):
        assert first == f"Begin.\n\nseed {seed}, {{'level': 2}}"
        assert [reply.messages[0].content for reply in replies] == ["A", "B", "C"]
        assert [(reply.done, reply.reward) for reply in replies] == [(False, 0.0), (False, 0.0), (True, 1.0)]
    whole = hosted("openenv", openenv, {"url": echo_server, "action": "json"})
    first, replies = await play(whole, "a {", 'so: {"x": 1} or {"message": "hm", "loud": true}')
    assert json.loads(first.partition("\n\n")[2])["text"] == "seed 5, {}"
    assert replies[0].messages[0].content.startswith("This holds no JSON object")
    assert json.loads(replies[1].messages[0].content)["text"] == "HM"
    with pytest.raises(HostedCodeError, match="the server said to 'step'"):
        await play(whole, '{"wrong": 1}')
    await whole.close()


COUNTER_APP = '''
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Counter(MCPEnvironment):
    """Counts by MCP tools to three. One session at a time, as the class says by saying nothing."""

    begun = 0

    def __init__(self):
        tools = FastMCP("counter")

        @tools.tool
        def count(by: int) -> str:
            """Count on."""
            if by < 0:
                raise ValueError("only upwards")
            self.sum += by
            return f"now {self.sum}"

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **more):
        self.sum = 0
        Counter.begun += 1
        return Observation(done=False, reward=None, metadata={"goal": 3, "begun": Counter.begun})

    async def step_async(self, action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        seen.reward, seen.done = float(self.sum == 3), self.sum >= 3
        return seen

    def _step_impl(self, action, timeout_s=None, **more):
        raise NotImplementedError

    @property
    def state(self):
        return State(episode_id="e", step_count=0)

app = create_app(Counter, CallToolAction, CallToolObservation, env_name="counter")
'''


def call(**arguments: Any) -> AssistantMessage:
    return say("", tool_calls=(replace(CALL, name="count", arguments=arguments),))


async def test_packages_of_openenv(openenv: str, tmp_path: Path) -> None:
    """One as `openenv init` makes it, and one whose MCP tools are the policy's. Each allows one session at a time."""
    command = [str(Path(openenv).parent / "openenv"), "init", "echo_env", "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "counter" / "server").mkdir(parents=True)
    (tmp_path / "counter" / "server" / "app.py").write_text(COUNTER_APP)
    path = (str(tmp_path),)
    made = hosted("openenv", openenv, {"url": "echo-env", "observation": "echoed_message"}, path=path)
    _, [reply] = await play(made, "hello")
    assert reply.messages[0].content == "hello"
    assert reply.reward is not None
    assert reply.reward > 0
    options, logs = {"url": "counter", "reset": {"seed": 1}}, str(tmp_path / "logs")
    own, other = (hosted("openenv", openenv, options, seed=seed, path=path, log_folder=logs) for seed in (5, 6))
    assert '"goal": 3' in (await own.start())[-1].content
    [tool] = await own.tools()
    assert (tool["function"]["name"], tool["function"]["description"]) == ("count", "Count on.")
    assert tool["function"]["parameters"]["properties"] == {"by": {"type": "integer"}}
    waiting = asyncio.create_task(other.start())
    replies = [await own.reply(say("", tool_calls=(*call(by=1).tool_calls, *call(by=-1).tool_calls)))]
    replies += [await own.reply(call(to=1)), await own.reply(call(by=2))]
    said = [[message.content for message in reply.messages] for reply in replies]
    assert said[0][0] == "now 1"
    assert "only upwards" in said[0][1]
    assert "Error: " in said[1][0]
    assert said[2] == ["now 3"]
    assert [(reply.done, reply.reward) for reply in replies] == [(False, 0.0), (False, 0.0), (True, 1.0)]
    assert not waiting.done(), "the only session is taken"
    await own.close()
    await waiting
    [log] = Path(logs).iterdir()
    await asyncio.to_thread(
        wait_until, lambda: "counter: two episodes of one seed begin differently" in log.read_text()
    )
    assert (await other.reply(say("I count no further."))).done
    await other.close()
    full = [hosted("openenv", openenv, {"url": "counter", "wait_s": 0.3}, path=path) for _ in range(2)]
    await full[0].start()
    with pytest.raises(HostedCodeError, match=r"no free session within 0\.3 s; raise processes or wait_s"):
        await full[1].start()
    with pytest.raises(HostedCodeError, match="got 'nowhere', expected http"):
        await play(hosted("openenv", openenv, {"url": "nowhere"}, path=path))
    await asyncio.gather(*(one.close() for one in full))


# openreward

ORS_SERVER = '''
import socket, sys
import uvicorn
from pydantic import BaseModel
from openreward.environments import Environment, ImageBlock, Server, TextBlock, ToolOutput, terminal, tool

class Guess(BaseModel):
    number: int

class Said(BaseModel):
    text: str

class Numbers(Environment):
    """Guess a number, or say it."""

    @classmethod
    def list_splits(cls):
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split):
        return [{"number": number} for number in range(250 if split == "train" else 3)]

    def get_prompt(self):
        return [TextBlock(text=f"Guess, below {self.task_spec['number'] + 2}.")]

    @tool
    def guess(self, inputs: Guess) -> ToolOutput:
        """Make a guess."""
        if inputs.number == 99:
            raise LookupError("no such number")
        right = inputs.number == self.task_spec["number"]
        picture = ImageBlock(data="aGk=", mimeType="image/png")
        said = TextBlock(text="yes" if right else "no")
        return ToolOutput(blocks=[said, picture], reward=right - 0.5, finished=right)

    @tool
    def rules(self) -> ToolOutput:
        return ToolOutput(blocks=[TextBlock(text="none")])

class Spoken(Numbers):
    @terminal
    @tool
    def end(self, inputs: Said) -> ToolOutput:
        right = inputs.text == str(self.task_spec["number"])
        return ToolOutput(blocks=[], reward=float(right), finished=True)

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(64)
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(Server([Numbers, Spoken]).app, log_level="warning")).run(sockets=[listener])
'''


@contextlib.contextmanager
def served(python: str, path: Path, text: str) -> Iterator[str]:
    path.write_text(text)
    with subprocess.Popen([python, str(path)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


async def test_a_server_of_ors(tmp_path: Path) -> None:
    python = interpreter("openreward==0.1.167")
    with served(python, tmp_path / "ors_server.py", ORS_SERVER) as url:
        tasks = list_tasks(pool_of(HostedEnvironment.Config(python=python).hosts()), "ors", {"url": url}, 200, 60, 60)
        assert len(tasks) == 200
        info = json.loads(tasks[120])["info"]
        assert info == {"options": {"task": {"number": 120}, "environment": "numbers"}}

        def opened(number: int, environment: str) -> HostedEnvironment:
            return hosted("ors", python, {"url": url, "task": {"number": number}, "environment": environment})

        guessed = opened(7, "numbers")
        assert [one.content for one in await guessed.start()] == ["Begin.", "Guess, below 9."]
        names = [tool["function"]["name"] for tool in await guessed.tools()]
        assert sorted(names) == ["guess", "rules"]
        turns: list[list[tuple[str, dict[str, Any]]]] = [
            [("rules", {})],
            [("guess", {"number": 1}), ("guess", {"x": 1}), ("no", {})],
            [("guess", {"number": 7})],
        ]
        replies = []
        for turn in turns:
            calls = tuple(replace(CALL, name=name, arguments=arguments) for name, arguments in turn)
            replies.append(await guessed.reply(say("", tool_calls=calls)))
        said = [[message.content for message in reply.messages] for reply in replies]
        assert (said[0], said[1][0], said[2]) == (["none"], "no", ["yes"])
        assert all(text.startswith("Error: ") for text in said[1][1:])
        assert replies[2].messages[0].media[0].url == "data:image/png;base64,aGk="
        assert [(reply.done, reply.reward) for reply in replies] == [(False, None), (False, -0.5), (True, 0.5)]
        spoken, silent, broken = opened(7, "spoken"), opened(7, "numbers"), opened(7, "numbers")
        _, [reply] = await play(spoken, "7")
        assert (reply.done, reply.reward) == (True, 1.0)
        _, [reply] = await play(silent, "7")
        assert (reply.done, reply.reward) == (True, None)
        await broken.start()
        with pytest.raises(HostedCodeError, match="no such number"):
            await broken.reply(say("", tool_calls=(replace(CALL, name="guess", arguments={"number": 99}),)))
        await asyncio.gather(guessed.close(), broken.close())


# verifiers

SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def polite(self, trace) -> float:
        if self.data.answer == "1":
            raise LookupError("no rule for this")
        return float("please" in trace.last_reply)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for number in range(5):
            yield SumTask(SumData(prompt=f"{number}+1?", answer=str(number + 1)), self.config.task)

__all__ = ["SumTaskset"]
"""


def streamed(asked: Asked) -> object:
    assert asked.value["stream"]
    choice = {"index": 0, "delta": {"role": "assistant", "content": "It is 3."}, "finish_reason": "stop"}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy", "choices": [choice]}
    return 200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", {"Content-Type": "text/event-stream"}


def test_an_episode_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs are run by uv, which must be found."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UV_SYSTEM_CERTS", "1")
    (tmp_path / "sums_taskset.py").write_text(SUMS)
    python = interpreter("verifiers==0.4.0")
    env = {"taskset": {"id": "sums_taskset"}, "agent": {"harness": {"id": "null"}}}
    agent = HostedAgent(
        HostedAgentConfig(target="verifiers", python=python, path=(str(tmp_path),), options={"env": env})
    )

    async def one(number: int) -> AgentResult:
        problem = Problem(messages=(ChatMessage(role="user", content=""),), info={"idx": number})
        work = AgentWork(problem=problem, base_url=f"{server.url}/v1", api_key=f"key {number}", seed=0)
        return await agent.run(work)

    async def both() -> list[AgentResult | BaseException]:
        return await asyncio.gather(one(2), one(0), return_exceptions=True)

    with HttpServer(streamed) as server:
        right, failed = asyncio.run(both())
    assert right == AgentResult(
        reward=0.5, parts={"right": 0.5, "polite": 0.0}, metrics={"length": 8.0, "num_turns": 1.0}
    )  # fmt: skip
    assert isinstance(failed, HostedCodeError), "an episode that failed has no reward, not one of 0"
    assert "no rule for this" in str(failed)
    asked = {one.key: one.value["messages"][-1]["content"] for one in server.asked}
    assert asked == {"Bearer key 2": "2+1?", "Bearer key 0": "0+1?"}


DEBATE = """
import verifiers.v1 as vf

class DebateData(vf.TaskData):
    answer: str = ""

class DebateTask(vf.Task[DebateData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

class DebateTaskset(vf.Taskset[DebateTask]):
    def load(self):
        yield DebateTask(DebateData(prompt="2+1?", answer="3"), self.config.task)

class DebateConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()

class DebateEnv(vf.Env[DebateConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        for agent in (agents.solver, agents.solver, agents.critic, agents.judge, agents.other):
            await agent.run(task)

__all__ = ["DebateTaskset", "DebateEnv"]
"""


@pytest.mark.heavy("the first of a run installs verifiers")
def test_each_agent_of_verifiers_has_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own reward, unless verifiers trains it not; an agent with a model of its own has none."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UV_SYSTEM_CERTS", "1")
    (tmp_path / "debate.py").write_text(DEBATE)
    harness = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    agents = dict.fromkeys(("solver", "critic", "judge"), harness)
    env = {"id": "debate", "taskset": {"id": "debate"}, **agents, "other": {**harness, "model": "mine"}}
    agent = HostedAgent(
        HostedAgentConfig(
            target="verifiers", python=interpreter("verifiers==0.4.0"), path=(str(tmp_path),), options={"env": env}
        )
    )

    def said(asked: Asked) -> object:
        text = "It is 3." if asked.value["model"] in ("policy:solver", "policy:judge", "mine") else "It is 4."
        choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy", "choices": [choice]}
        return 200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", {"Content-Type": "text/event-stream"}

    problem = Problem(messages=(ChatMessage(role="user", content=""),), info={"idx": 0})
    with HttpServer(said) as server:
        work = AgentWork(problem=problem, base_url=f"{server.url}/v1", api_key="key", seed=0)
        result = asyncio.run(agent.run(work))
    assert result.roles == {"solver": 1.0, "critic": 0.0, "judge": None}
    assert result.reward == pytest.approx(3 / 4), "the mean of those that are trained"
    models = [one.value["model"] for one in server.asked]
    assert models == ["policy:solver", "policy:solver", "policy:critic", "policy:judge", "mine"]
