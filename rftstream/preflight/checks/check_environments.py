"""Checks whether an environment can be built and started. It is called in the same way as by the explorer's turn
loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
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
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostStartTimeout, HostTimeout
from rftstream.gateway.addresses import parse_address
from rftstream.preflight.checks.raised_at import raised_at
from rftstream.roles.explorer.environment_session import CallFailure, EnvironmentSession, Opening

WAIT_S = 0.05
"""Most seconds between two polls for an environment's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The start of an environment on its first problem. `begin_once` makes it."""

    messages: tuple[ChatMessage, ...]
    """The first messages for the policy."""
    tools: tuple[Mapping[str, Any], ...]
    """The problem's tools, then those of the environment."""
    has_one_turn: bool = False
    """Whether every rollout ends with the first completion."""
    replied: str = ""
    """The environment's reply to the problem's answer, in words. Empty: it was not asked."""
    doubts: list[str] = field(default_factory=list)
    """Errors while the environment was closed, in sentences that begin with the place."""


def begin_once(config: RunConfig, named: str | Mapping[str, Any], problem: Problem, where: str) -> Beginning:
    """Build the environment for a problem, start it, read its tools, give it the problem's answer as a first turn, and
    close it. `named` is the run file's value at `where`. Each call has the same time limit as in an explorer.
    ConfigError explains errors; a reply that fails is a doubt.

    An agent is not started, since nothing would answer its model calls.
    """
    name = name_of_part(named, where)
    spec = registry.find_spec(EnvironmentSpec, name)
    if spec.is_agent:
        doubts = _doubts_about_agent(config, named, problem, where)
        return Beginning(messages=problem.messages, tools=problem.tools, doubts=doubts)
    part, options = config.build_environment(where)
    built: list[Any] = []

    def make() -> Any:
        built.append(part(options, problem=problem, seed=0))
        return built[0]

    limit_s, rung = config.explorer.reply_timeout_s, threading.Event()
    workers = CallWorkers(max_threads=2, ring=rung.set)
    calls = EnvironmentCalls(now=time.monotonic, timeout_s=limit_s, workers=workers)
    session = EnvironmentSession(calls.open(is_immediate=spec.is_immediate), make, name=f"{name!r}", timeout_s=limit_s)
    found: list[Opening | CallFailure] = []
    replies: list[Reply | CallFailure] = []
    failed_to_close: list[CallFailure] = []
    try:
        session.begin(found.append)
        while not found:
            _wait(calls, rung)
        if isinstance(found[0], Opening) and not spec.has_one_turn and hasattr(built[0], "reply"):
            said = problem.answer or ""
            session.reply(AssistantMessage(content=said, text=said), replies.append)
            while not replies:
                _wait(calls, rung)
        session.close(failed_to_close.append)
        while session.is_busy and not any(map(_is_given_up, (*found, *replies))):
            _wait(calls, rung)
    finally:
        calls.close()
    (opening,) = found

    def words(failure: CallFailure) -> str:
        settings = f"environments.{name}" if isinstance(named, str) else where
        text = config.as_written(_words(settings, failure), "environment", named, where)
        return text if text.startswith(where) else f"{where}: {text}"

    if isinstance(opening, CallFailure):
        raise ConfigError(words(opening))
    if not callable(getattr(built[0], "reply", None)):
        raise ConfigError(f"{where}: {name!r}: {type(built[0]).__name__} has no method reply; write one")
    return Beginning(
        messages=opening.messages,
        tools=(*problem.tools, *opening.tools),
        has_one_turn=spec.has_one_turn,
        replied="".join(_in_words(reply) for reply in replies if isinstance(reply, Reply)),
        doubts=[words(one) for one in (*replies, *failed_to_close) if isinstance(one, CallFailure)],
    )


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


def _wait(calls: EnvironmentCalls, rung: threading.Event) -> None:
    rung.wait(min(WAIT_S, calls.idle_s()))
    rung.clear()
    calls.poll()


def _is_given_up(answer: Opening | Reply | CallFailure) -> bool:
    return isinstance(answer, CallFailure) and answer.timed_out


def _in_words(reply: Reply) -> str:
    parts = [message.content.partition("\n")[0] for message in reply.messages[:1]]
    parts += ["the rollout ends"] if reply.done else []
    parts += [] if reply.reward is None else [f"reward {reply.reward:g}"]
    return "; ".join(parts) or "nothing"


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
