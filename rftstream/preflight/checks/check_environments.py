"""Checks whether an environment can be built and played. It is called in the same way as by the explorer's turn
loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import EnvironmentSpec
from rftstream.config.sections import RunConfig, name_of_part
from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.environments.call_workers import CallWorkers
from rftstream.environments.called import CalledAgent
from rftstream.environments.calls import EnvironmentCalls
from rftstream.environments.harbor.agent import HarborAgent
from rftstream.environments.launched_agents import agent_of
from rftstream.error_kinds import raised_at
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostStartTimeout, HostTimeout
from rftstream.gateway.addresses import parse_address
from rftstream.preflight.checks.plays import MOST_TURNS, Play, texts_to_say
from rftstream.roles.explorer.environment_session import CallFailure, EnvironmentSession, Opening

WAIT_S = 0.05
"""Most seconds between two polls for an environment's answer."""
QUICK_S = 10.0
"""Most seconds of a play after which there is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The start of an environment on its first problem. `begin_once` makes it."""

    messages: tuple[ChatMessage, ...]
    """The first messages for the policy."""
    tools: tuple[Mapping[str, Any], ...]
    """The problem's tools, then those of the environment."""
    has_one_turn: bool = False
    """Whether every rollout ends with the first completion."""
    plays: tuple[Play, ...] = ()
    """Plays with the problem's answer, and with wrong ones. Empty: it was not asked."""
    doubts: list[str] = field(default_factory=list)
    """Errors while the environment was closed, in sentences that begin with the place."""


def begin_once(
    config: RunConfig, named: str | Mapping[str, Any], problem: Problem, where: str, others: Sequence[Problem] = ()
) -> Beginning:
    """Build the environment for a problem, start it, read its tools, give it the problem's answer in each turn, and
    close it; then once more with wrong answers, of which `others` may have one, unless it is slow. `named` is the run
    file's value at `where`. Each call has the same time limit as in an explorer. ConfigError explains errors; a reply
    that fails is a doubt.

    An agent is not started, since nothing would answer its model calls.
    """
    name = name_of_part(named, where)
    spec = registry.find_spec(EnvironmentSpec, name)
    if spec.is_agent:
        about_agent = _doubts_about_agent(config, named, problem, where)
        return Beginning(messages=problem.messages, tools=problem.tools, doubts=about_agent)
    part, options = config.build_environment(where)
    limit_s, rung = config.explorer.reply_timeout_s, threading.Event()
    workers = CallWorkers(max_threads=2, ring=rung.set)
    calls = EnvironmentCalls(now=time.monotonic, timeout_s=limit_s, workers=workers)

    def words(failure: CallFailure) -> str:
        settings = f"environments.{name}" if isinstance(named, str) else where
        text = config.as_written(_words(settings, failure), "environment", named, where)
        return text if text.startswith(where) else f"{where}: {text}"

    began: list[Opening] = []
    plays: list[Play] = []
    doubts: list[str] = []
    try:
        for said, text in texts_to_say(problem, others).items():
            player = _Player(calls, rung, lambda: part(options, problem=problem, seed=0), spec, name, limit_s)
            since = time.monotonic()
            opening, play, failures = player.play(said, text)
            if isinstance(opening, CallFailure):
                raise ConfigError(words(opening))
            if not callable(getattr(player.built, "reply", None)):
                raise ConfigError(f"{where}: {name!r}: {type(player.built).__name__} has no method reply; write one")
            began.append(opening)
            plays.append(play)
            doubts += [line for line in map(words, failures) if line not in doubts]
            if spec.has_one_turn or failures or time.monotonic() - since > QUICK_S:
                break
    finally:
        calls.close()
    return Beginning(
        messages=began[0].messages,
        tools=(*problem.tools, *began[0].tools),
        has_one_turn=spec.has_one_turn,
        plays=() if spec.has_one_turn else tuple(plays),
        doubts=doubts,
    )


class _Player:
    """Plays one environment object to its end, with the same text in each turn. `begin_once` makes one for each
    play."""

    def __init__(
        self,
        calls: EnvironmentCalls,
        rung: threading.Event,
        make: Callable[[], Any],
        spec: EnvironmentSpec,
        name: str,
        limit_s: float,
    ) -> None:
        self._calls, self._rung, self._has_one_turn = calls, rung, spec.has_one_turn
        self.built: Any = None
        """The environment, once it was made."""

        def made() -> Any:
            self.built = make()
            return self.built

        line = calls.open(is_immediate=spec.is_immediate)
        self._session = EnvironmentSession(line, made, name=f"{name!r}", timeout_s=limit_s)

    def play(self, said: str, text: str) -> tuple[Opening | CallFailure, Play, list[CallFailure]]:
        """Return the beginning, the replies, and the failures after the beginning."""
        found: list[Opening | CallFailure] = []
        failures: list[CallFailure] = []
        replies: list[Reply] = []
        self._session.begin(found.append)
        self._wait_for(found)
        answers = isinstance(found[0], Opening) and not self._has_one_turn and hasattr(self.built, "reply")
        while answers and len(replies) < MOST_TURNS and not (replies and replies[-1].done):
            answer: list[Reply | CallFailure] = []
            self._session.reply(AssistantMessage(content=text, text=text), answer.append)
            self._wait_for(answer)
            if isinstance(answer[0], CallFailure):
                failures.append(answer[0])
                break
            replies.append(answer[0])
        self._session.close(failures.append)
        while self._session.is_busy and not any(map(_is_given_up, (*found, *failures))):
            self._wait()
        return found[0], Play(said=said, text=text, replies=tuple(replies)), failures

    def _wait_for(self, answers: Sequence[object]) -> None:
        while not answers:
            self._wait()

    def _wait(self) -> None:
        self._rung.wait(min(WAIT_S, self._calls.idle_s()))
        self._rung.clear()
        self._calls.poll()


def _doubts_about_agent(config: RunConfig, named: str | Mapping[str, Any], problem: Problem, where: str) -> list[str]:
    """Return possible problems with the program that runs agents, and with the way in which agents find their model.
    ConfigError for invalid settings."""
    settings, doubts = config.explorer, []
    parse_address(settings.gateway_address, settings.processes)
    parse_address(config.evaluator.gateway_address, section=RoleName.evaluator.value)
    if settings.processes > 1 and settings.gateway_url and "{port}" not in settings.gateway_url:
        doubts.append(
            f"explorer.gateway_url: {settings.processes} explorers have this one URL, but a rollout is at one of them "
            "alone: calls that come to another one are told to come again; put {port} into it"
        )
    try:
        agent = agent_of(config.build_environment(where)[1])
        if isinstance(agent, HarborAgent) and (why := asyncio.run(_doubt_about_task(agent, problem))):
            doubts.append(f"{where}: {why}")
    except ConfigError as error:
        raise ConfigError(config.as_written(str(error), "environment", named, where)) from None
    if isinstance(agent, CalledAgent) and (why := asyncio.run(agent.probe())):
        doubts.append(
            f"{where}: {name_of_part(named, where)!r}: nobody answers at {agent.where} now: {why}; "
            "start it before the run"
        )
    return doubts


async def _doubt_about_task(agent: HarborAgent, problem: Problem) -> str:
    """Run the solution of a task, and return why it does not get the reward 1; empty if it does."""
    task = problem.info.get("task")
    try:
        found = await agent.rehearse(problem)
    except (HostError, HostedCodeError) as error:
        return f"the solution of the task {task!r} gets no reward: {error}"
    if found is None:
        return f"the task {task!r} has no solution/solve.sh, so nobody knows whether its tests can be passed"
    if found.reward != 1.0:
        return f"the solution of the task {task!r} gets the reward {found.reward}, expected 1; mend it, or its tests"
    return ""


def _is_given_up(answer: Opening | CallFailure) -> bool:
    return isinstance(answer, CallFailure) and answer.timed_out


def _words(settings: str, failure: CallFailure) -> str:
    """Return the error in words, with its place and advice."""
    error, text = failure.error, failure.text.removeprefix("environment ")
    if isinstance(error, ConfigError):  # the error already has its place and advice
        return str(error)
    if error is None:
        return f"{text}, the limit of explorer.reply_timeout_s; mend what hangs, or raise the limit"
    if isinstance(error, HostStartTimeout):
        return f"{text}; raise {settings}.start_timeout_s if it needs longer"
    if isinstance(error, HostTimeout):
        return f"{text}; mend what hangs, or raise {settings}.timeout_s"
    if isinstance(error, HostError):
        return f"{text}; it has to be there when the run starts"
    place = raised_at(error)
    return f"{text}{place and f' ({place})'}; mend it, and check again"
