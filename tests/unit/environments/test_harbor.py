"""Agents in places: what is done in which order, what ends a rollout and why, and settings that are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.tasks import Problem
from rftstream.environments.harbor.agent import HarborAgent, HarborConfig
from rftstream.environments.hosts.agents import AgentResult, AgentWork
from rftstream.environments.places import engine as engine_module
from rftstream.environments.places import images
from rftstream.environments.places.base import PlaceOrder, PlaceSettings, PlaceSource, Ran
from rftstream.environments.places.docker import DockerPlaces
from rftstream.errors import ConfigError, HostedCodeError, HostError
from tests.suite.each import each
from tests.unit.data.test_harbor_tasks import task_at
from tests.unit.data.test_tasksets_sources import open_source
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


class ToldPlaces:
    """A kind of place that does nothing and gives what it was told: the ends of commands, and files."""

    has_called = True
    num_late = 0

    def __init__(
        self, *, ends: Mapping[str, Ran | Exception] | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        self.ends, self.files = ends or {}, files or {}
        self.done: list[str] = []
        self.orders: list[PlaceOrder] = []
        self.variables: dict[str, str] = {}

    async def create(self, order: PlaceOrder) -> ToldPlaces:
        self.orders.append(order)
        return self

    async def put(self, source: Path, target: str) -> None:
        self.done.append(f"put {source.name} {target}")

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        user: str = "",
        cwd: str = "",
    ) -> Ran:
        self.done.append(f"{command.split()[0]} {timeout_s:g} {user}".strip())
        self.variables |= variables or {}
        end = self.ends.get(command.split()[0], Ran(exit_code=0, output=""))
        if isinstance(end, Exception):
            raise end
        return end

    async def get(self, path: str, *, max_bytes: int) -> bytes | None:
        return self.files.get(path)

    def end_calls(self) -> int:
        self.done.append("end calls")
        return self.num_late

    async def close(self) -> None:
        self.done.append("close")


def problem_at(tmp_path: Path, toml: str = "[agent]\ntimeout_sec = 9.0\nuser = 'me'") -> Problem:
    return open_source(f"harbor:{task_at(tmp_path / 'task', toml=toml)}").problem(0)


async def run(problem: Problem, places: ToldPlaces, **settings: Any) -> AgentResult:
    work = AgentWork(
        problem=problem, base_url="http://127.0.0.1:9/v1", api_key="the key", seed=1, rollout_id="a/0", run_id="r"
    )
    return await HarborAgent(HarborConfig(command="solve it", **settings), places).run(work)


REWARD = {"/logs/verifier/reward.json": b'{"reward": 0.5, "style": 1}'}


async def test_the_agent_and_then_the_tests(tmp_path: Path) -> None:
    problem = problem_at(tmp_path)
    places = ToldPlaces(files=REWARD, ends={"solve": Ran(exit_code=3, output="")})
    places.num_late = 2
    found = await run(problem, places, variables={"MORE": "1"}, memory_mb=100)
    assert (found.reward, found.parts) == (0.5, {"style": 1.0})
    assert found.metrics["agent_exit_code"] == 3.0 and found.metrics["agent_timed_out"] == 0.0
    assert found.metrics["agent_late_calls"] == 2.0
    assert places.done == [
        "mkdir 120 0", "solve 9 me", "end calls", "mkdir 120 0", "put tests /tests", "chmod 120 0",
        "/tests/test.sh 600", "end calls", "close",
    ]  # fmt: skip
    assert places.variables["INSTRUCTION"] == problem.messages[0].content
    assert (places.variables["OPENAI_API_KEY"], places.variables["MORE"]) == ("the key", "1")
    (order,) = places.orders
    assert order.labels == {"run": "r", "rollout": "a/0"} and not order.has_internet
    assert (order.limits.memory_mb, order.model_url) == (100, "http://127.0.0.1:9/v1")
    digest = problem.info["digest"]
    assert order.source == PlaceSource(folder=tmp_path / "task" / "environment", digest=digest)


LATE = Ran(exit_code=None, output="")
ENDS = {
    "an agent that takes too long is tested": ({"solve": LATE}, REWARD, 0.5),
    "tests that hang": ({"/tests/test.sh": LATE}, REWARD, "the tests took longer than 600 s"),
    "no reward": (
        {"/tests/test.sh": Ran(exit_code=2, output="a\n\x1b[31mno\x1b[0m\x1b]0;me\x07 module\x1b")},
        {},
        "wrote no reward.*exit code 2: a / no]0;me module$",
    ),
    "a lost place": ({"/tests/test.sh": HostError("gone")}, REWARD, "gone"),
    "no root": ({"mkdir": Ran(exit_code=1, output="mkdir: no")}, REWARD, "the place cannot be prepared: .*mkdir: no"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_ends(tmp_path: Path, case: str) -> None:
    """Each closes its place."""
    ends, files, expected = ENDS[case]
    places = ToldPlaces(ends=ends, files=files)
    if isinstance(expected, float):
        found = await run(problem_at(tmp_path), places)
        assert (found.reward, found.metrics["agent_timed_out"]) == (expected, 1.0)
    else:
        with pytest.raises((HostedCodeError, HostError), match=expected):
            await run(problem_at(tmp_path), places)
    assert places.done[-1] == "close"


async def test_an_agent_that_never_called_its_model_is_not_tested(tmp_path: Path) -> None:
    places = ToldPlaces(ends={"solve": Ran(exit_code=127, output="solve: command not found")})
    places.has_called = False
    with pytest.raises(
        HostedCodeError, match="the agent never called the model: exit code 127: solve: command not found"
    ):
        await run(problem_at(tmp_path), places)
    assert places.done == ["mkdir 120 0", "solve 9 me", "close"]


async def test_a_solution_is_rehearsed_without_a_model(tmp_path: Path) -> None:
    problem = problem_at(tmp_path)
    places = ToldPlaces(files=REWARD)
    agent = HarborAgent(HarborConfig(command="solve"), places)
    found = await agent.rehearse(problem)
    assert found is not None and found.reward == 0.5
    assert places.done[1:4] == ["put solution /solution", "chmod 120 0", "/solution/solve.sh 9 me"]
    assert places.orders[0].model_url == ""
    (tmp_path / "task" / "tests" / "more").write_text("changed")
    with pytest.raises(HostedCodeError, match="has changed since it was made a problem"):
        await agent.rehearse(problem)


@each(
    ("settings", "error"),
    [
        ({}, "harness: got '', expected one of claude-code, codex, mini-swe-agent; or set command to your own"),
        ({"harness": "mini"}, "harness: got 'mini', expected one of"),
        ({"harness": "codex", "command": "x"}, "got harness and command, expected one of them"),
        ({"command": "x", "place": "moon"}, "place: got 'moon', expected bubblewrap, docker, kubernetes"),
        ({"command": "x", "variables": {"KEY": "env:NOT_THERE"}}, "NOT_THERE"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        HarborAgent(HarborConfig(**settings))


async def test_problems_of_another_source_are_refused(tmp_path: Path) -> None:
    problem = dataclasses.replace(problem_at(tmp_path), info={})
    with pytest.raises(ConfigError, match='it needs source = "harbor:FOLDER"'):
        await run(problem, ToldPlaces())


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "kind", "error"),
    [
        (None, ConfigError, "cannot be run: .* install Docker or Podman, or name the command"),
        ("echo Cannot connect to the Docker daemon; exit 1", ConfigError, "reaches no engine: .* start it, and let"),
        ("echo out of space; exit 1", HostError, "out of space"),
    ],
)
async def test_engines_that_are_not_there(
    tmp_path: Path, script: str | None, kind: type[Exception], error: str
) -> None:
    engine = tmp_path / "engine"
    if script is not None:
        engine.write_text(f"#!/bin/sh\n{script}\n")
        engine.chmod(0o755)
    with pytest.raises(kind, match=error):
        await DockerPlaces(PlaceSettings(engine=str(engine))).create(PlaceOrder(source=PlaceSource(image="x")))


ENGINE = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
with open(sys.argv[0] + ".asked", "a") as file:
    file.write(json.dumps([words, {{name: os.environ.get(name) for name in ("KEY", "XDG_CONFIG_HOME")}}]) + "\\n")
if os.path.exists(sys.argv[0] + ".away"):
    print("error during connect: it has exited with exit status 255")
    sys.exit(1)
for word in ("run", "build"):
    if words[0] == word and os.path.exists(sys.argv[0] + "." + word):
        print(open(sys.argv[0] + "." + word).read())
        sys.exit(1)
if words[:2] == ["image", "inspect"] and "rftstream-place" in words[-1]:
    print("No such image")
    sys.exit(1)
if words[0] == "run":
    print("rftstream-ready", flush=True)
    sys.stdin.read()
"""
"""An engine that notes what it was asked for, and from which variables. It has all images but those of places. It
prints `.run` or `.build` and fails, or its containers live. While there is `.away`, nobody reaches it."""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.write_text(ENGINE)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("toml", "has_internet"),
    [
        ("", True),
        ("[environment]\nnetwork_mode = 'no-network'", False),
        ("[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'public'", True),
        ("[agent]\nnetwork_mode = 'no-network'", False),
        ("[agent]\nnetwork_mode = 'allowlist'", False),
    ],
)
async def test_the_internet_is_for_agents_that_may_have_it(tmp_path: Path, toml: str, has_internet: bool) -> None:
    places = ToldPlaces(files=REWARD)
    await run(problem_at(tmp_path, toml), places, internet=True)
    assert places.orders[0].has_internet is has_internet


@pytest.mark.process
async def test_no_argument_of_the_engine_shows_a_variable_and_none_is_the_engines_own(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that has variables shows them to `inspect`, so commands have them."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    order = PlaceOrder(source=PlaceSource(image="x"), variables={"KEY": "secret", "XDG_CONFIG_HOME": "/bad"})
    place = await DockerPlaces(PlaceSettings(engine=str(engine))).create(order)
    await place.run("true", timeout_s=240)
    await place.close()
    asked = [json.loads(line) for line in (engine.parent / "engine.asked").read_text().splitlines()]
    (started,) = [words for words, _ in asked if words[0] == "run"]
    assert not any(word.startswith("--env") for word in started)
    ((words, variables),) = [one for one in asked if one[0][0] == "exec"]
    assert words[2:4] == ["--env=KEY", "--env=XDG_CONFIG_HOME=/bad"]
    assert variables == {"KEY": "secret", "XDG_CONFIG_HOME": None}


@pytest.mark.process
@pytest.mark.parametrize(
    ("value", "error"), [(200_000 * "x", "Argument list too long"), ("a\0b", "null byte")], ids=["large", "NUL"]
)
async def test_a_prompt_that_no_command_can_have_ends_its_rollout_alone(engine: Path, value: str, error: str) -> None:
    place = await DockerPlaces(PlaceSettings(engine=str(engine))).create(PlaceOrder(source=PlaceSource(image="x")))
    with pytest.raises(HostedCodeError, match=f"{error}.*; expected words and variables without NUL"):
        await place.run("true", timeout_s=240, variables={"INSTRUCTION": value})
    await place.close()


@pytest.mark.process
@pytest.mark.parametrize(
    ("word", "said", "kind", "error"),
    [
        ("run", "Cannot connect to the database", HostError, "container of x ended at once: Cannot connect to the"),
        ("run", "exec /bin/sh: exec format error", HostedCodeError, "x is not for this engine's processor: exec /bin/"),
        ("build", "no such package", HostedCodeError, "/Dockerfile does not build: no such package"),
    ],
)
async def test_what_a_place_cannot_be_made_of(
    engine: Path, word: str, said: str, kind: type[Exception], error: str
) -> None:
    """What an entry point prints is not taken for the engine's words."""
    Path(f"{engine}.{word}").write_text(said)
    source = PlaceSource(image="x") if word == "run" else PlaceSource(folder=engine.parent)
    with pytest.raises(kind, match=error):
        await DockerPlaces(PlaceSettings(engine=str(engine))).create(PlaceOrder(source=source))


@pytest.mark.process
async def test_an_engine_that_has_answered_is_waited_for(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is lost. What could not be removed is removed before the next one is made."""
    monkeypatch.setattr(engine_module, "AWAY_LOOK_S", 0.01)
    order, away = PlaceOrder(source=PlaceSource(image="x")), Path(f"{engine}.away")
    places = DockerPlaces(PlaceSettings(engine=str(engine), engine_host="ssh://there"))
    place = await places.create(order)
    away.touch()
    with pytest.raises(HostError, match="the place has ended"):
        await place.run("true", timeout_s=240)
    await place.close()
    another = asyncio.create_task(places.create(order))
    before = len(asked_of(engine))
    await asyncio.to_thread(wait_until, lambda: len(asked_of(engine)) > before + 2)
    away.unlink()
    await (await another).close()
    *failed, removed, _ = [words[-1] for words in asked_of(engine) if words[0] == "rm"]
    assert {*failed, removed} == {place._name} and failed
    monkeypatch.setattr(engine_module, "AWAY_S", 0.0)
    away.touch()
    with pytest.raises(ConfigError, match=r"reaches no engine: .*; start it, and let"):
        await places.create(order)


def asked_of(engine: Path) -> list[list[str]]:
    """Return what the engine was asked for, in full lines."""
    lines = Path(f"{engine}.asked").read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line)[0] for line in lines]


async def test_the_folder_of_a_known_task_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has every image that it is asked for."""
    engine, read = tmp_path / "engine", []
    engine.write_text("#!/bin/sh\ncat > /dev/null; echo sha256:1")
    engine.chmod(0o755)
    monkeypatch.setattr(images, "pack_folder", lambda folder, target: read.append(folder) or b"")
    places = DockerPlaces(PlaceSettings(engine=str(engine)))
    for digest in ("a", "a", "b", "", ""):
        await places._images.of_source(PlaceSource(folder=tmp_path, digest=digest))
    assert len(read) == 4
