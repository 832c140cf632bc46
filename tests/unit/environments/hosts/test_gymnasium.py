"""The adapter of gymnasium, with the package in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.hosted import HostedEnvironment
from rftstream.environments.hosts.pool import close_pools
from rftstream.errors import HostedCodeError
from tests.unit.environments.hosts.scene import PROBLEM, say
from tests.unit.environments.hosts.venvs import interpreter
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LAKE = {
    "id": "FrozenLake-v1", "settings": {"is_slippery": False}, "actions": ["left", "down", "right", "up"],
    "show": "render",
}  # fmt: skip
OWN = '''
import gymnasium, numpy
from gymnasium import spaces

class Echo(gymnasium.Env):
    """Shows what it was given."""
    def __init__(self, actions):
        self.action_space = eval(actions, {"spaces": spaces, "numpy": numpy})
        self.observation_space = spaces.Text(1000)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"seed": seed, "draw": numpy.float32(0.123456)}, {}
    def step(self, action):
        shown = tuple(map(int, action)) if isinstance(action, tuple) else action
        return (f"{type(action).__name__} {shown}", numpy.arange(2)), numpy.float32(0.5), False, True, {}

class Moves(gymnasium.Env):
    """Takes moves of two letters, and tells in `info` which are legal."""
    action_space, observation_space = spaces.Discrete(1000, start=5), spaces.Box(0, 1, (64,))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return numpy.zeros(64), {"legal": ["ab", "ba"], "turn": 1}
    def step(self, action):
        return numpy.zeros(64), 1.0, False, False, {"legal": [str(action)], "turn": 2}

class Words(gymnasium.Wrapper):
    """Moves by their letters, as packages for language models have it."""
    def __init__(self, inner):
        super().__init__(inner)
        self.action_space = spaces.Text(2, charset="abc")
    def step(self, action):
        if "c" in action:
            raise ValueError(f"{action} is no move")
        return self.env.step(action)

gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
'''


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("gymnasium==1.4.0", "numpy==2.4.6")


@pytest.fixture(scope="module", autouse=True)
def no_hosts() -> Iterator[None]:
    """Tests share hosts, which take long to start. None is left in the end."""
    yield
    close_pools()


@pytest.fixture(scope="module")
def own_envs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_envs.py").write_text(OWN)
    return str(folder)


def environment(python: str, options: dict[str, Any], *, problem: Problem = PROBLEM, **settings: Any) -> Any:
    config = HostedEnvironment.Config(python=python, target="gymnasium", options=options, **settings)
    return HostedEnvironment(config, problem=problem, seed=2**62 + 1)


async def play(own: HostedEnvironment, *words: str) -> tuple[str, list[Reply]]:
    first = (await own.start())[-1].content
    replies = [await own.reply(say(word)) for word in words]
    await own.close()
    return first, replies


def test_a_walk_over_the_lake(python: str) -> None:
    words = ["down", "I go Down, not up: DOWN", "right", "3 steps", "down", "right", "right"]
    first, replies = asyncio.run(play(environment(python, {**LAKE, "instructions": "Reach G."}), *words))
    assert first == "Begin.\n\nReach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nLegal actions: left, down, right, up."
    assert replies[0].messages[0].content == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [reply.done for reply in replies] == [False] * 6 + [True]
    assert [reply.reward for reply in replies] == [0.0] * 6 + [1.0]
    assert replies[3].messages[0].content == "This has no legal action. Legal actions: left, down, right, up."
    assert replies[-1].metrics == {"steps": 6.0, "invalid_actions": 1.0, "out_of_steps": 0.0}


def test_it_goes_on_after_its_host_was_killed(python: str) -> None:
    own = environment(python, LAKE)

    async def walk() -> Reply:
        await own.start()
        await own.reply(say("down"))
        await own.reply(say("what?"))
        [host] = own._pool.hosts
        os.kill(host.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: host.end is not None)
        reply = await own.reply(say("down"))
        await own.close()
        return reply

    reply = asyncio.run(walk())
    assert reply.messages[0].content == "  (Down)\nSFFF\nFHFH\n[F]FFH\nHFFG"
    assert reply.metrics["steps"] == 2.0
    assert reply.metrics["invalid_actions"] == 1.0


def test_too_many_replies_without_an_action(python: str) -> None:
    options = {"id": "CartPole-v1", "most_invalid": 2, "invalid_reward": -1.0}
    first, replies = asyncio.run(play(environment(python, options), "left", "7"))
    assert first.endswith("Legal actions: 0, 1.")
    assert [(reply.done, reply.reward) for reply in replies] == [(False, -1.0), (True, -1.0)]


def test_options_of_a_problem_go_first(python: str) -> None:
    problem = Problem(
        messages=(ChatMessage(role="system", content="Play."),), info={"options": {"actions": list("lr")}}
    )
    first, replies = asyncio.run(play(environment(python, {"id": "CartPole-v1"}, problem=problem), "L or R: R"))
    assert first.endswith("Legal actions: l, r.")
    assert replies[0].reward == 1.0


@pytest.mark.parametrize(
    ("actions", "words", "expected"),
    [
        ("spaces.Discrete(3, start=5)", "first 9, then 7", "int64 7"),
        ("spaces.Box(-1, 1, (2,), numpy.float32)", "1. I push with [0.5, -2e-1]", "ndarray [ 0.5 -0.2]"),
        ("spaces.Box(-1, 1, (2, 1), numpy.float32)", "5 and 0.5", None),
        ("spaces.MultiDiscrete([2, 3])", "1 2", "ndarray [1 2]"),
        ("spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9, start=1)))", "in 2 write 9", "tuple (2, 9)"),
        ("spaces.Tuple((spaces.Discrete(9), spaces.Discrete(9, start=1)))", "in 2 write 0", None),
        ("spaces.MultiBinary(2)", "0 1", "ndarray [0 1]"),
        ("spaces.Text(5, charset='abc')", " abc\n", "str abc"),
        ("spaces.Text(5, charset='abc')", "xyz", None),
        ("spaces.Discrete(3)", "1.5", None),
    ],
)
def test_kinds_of_actions(python: str, own_envs: str, actions: str, words: str, expected: str | None) -> None:
    options = {"id": "own_envs:Echo-v0", "settings": {"actions": actions}}
    first, [reply] = asyncio.run(play(environment(python, options, path=(own_envs,)), words))
    assert first.startswith(f"Begin.\n\nseed: {(2**62 + 1) % 2**31}\ndraw: 0.1235")
    if expected is None:
        assert reply.messages[0].content.startswith("This has no legal action.")
    else:
        assert reply.messages[0].content == f"[{expected}, [0, 1]]"
        assert (reply.done, reply.reward, reply.metrics["out_of_steps"]) == (True, 0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "ValueError: options: missing id"),
        ({"id": "FrozenLake-v1", "name": "x"}, "ValueError: options: unknown key 'name'; known: id, settings"),
        ({"id": "NoSuchGame-v1"}, "NameNotFound: Environment `NoSuchGame` doesn't exist"),
        ({"id": "CartPole-v1", "actions": ["left"]}, r"options.actions: got 1 names, expected 2"),
    ],
)
def test_wrong_options(python: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(HostedCodeError, match=expected):
        asyncio.run(play(environment(python, options)))


def test_an_environment_of_a_class_by_its_wrapper(python: str, own_envs: str) -> None:
    options = {"id": "own_envs:Moves", "wrappers": ["own_envs:Words"], "show": ["turn", "legal"]}
    own = environment(python, options, path=(own_envs,))
    first, replies = asyncio.run(play(own, "cc", "I take ba", "a, b, c."))
    assert first == "Begin.\n\nturn: 1\nlegal: [ab, ba]"
    said = [(reply.messages[0].content, reply.reward) for reply in replies]
    assert said == [
        ("This is no legal action: cc is no move", 0.0),
        ("turn: 2\nlegal: [ba]", 1.0),
        ("This has no legal action. ", 0.0),
    ]
    assert replies[2].metrics == {"steps": 1.0, "invalid_actions": 2.0}
    first, _ = asyncio.run(play(environment(python, {"id": "own_envs:Moves", "show": ["turn"]}, path=(own_envs,))))
    assert first.endswith("An action is a number from 5 to 1004."), "not a thousand numbers"
    missing = environment(python, {"id": "own_envs:Moves", "show": ["board"]}, path=(own_envs,))
    with pytest.raises(HostedCodeError, match="got 'board', expected entries of info: legal, turn"):
        asyncio.run(play(missing))
