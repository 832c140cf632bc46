"""Agents in host processes: foreign functions that call an endpoint by themselves.

    async def run(problem, base_url, api_key, seed) -> reward, None, or {"reward", "parts", "roles", "metrics"}

The function gets plain values (`json_form.py`), and its settings as `options` if it has such a parameter. It may also
be a plain blocking function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from rftstream.contracts.tasks import Problem
from rftstream.environments.hosted import HostedConfig
from rftstream.environments.hosts.pool import pool_of, target_path
from rftstream.environments.json_form import numbers_from_plain, problem_to_plain, roles_from_plain
from rftstream.errors import ConfigError, HostedCodeError


@dataclass(frozen=True, kw_only=True)
class HostedAgentConfig(HostedConfig):
    """Settings of an agent in host processes."""

    timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds for one run, without the time to import the target. 0: only the limit of the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWork:
    """One rollout for an agent to run. The launcher makes it."""

    problem: Problem
    """Problem to solve."""
    base_url: str
    """Address at which the agent calls its model."""
    api_key: str
    """Key of this rollout."""
    seed: int
    rollout_id: str = ""
    run_id: str = ""
    launch_id: str = ""
    """Id of the launch. A lost agent that is started again keeps its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """The result that an agent returned."""

    reward: float | None = None
    """The reward; None if the agent gave none, which is not a reward of 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    roles: Mapping[str, float | None] = field(default_factory=dict)
    """Reward of each role, in an episode of several agents; None for a role that is not trained."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the agent measured."""


class HostedAgent:
    """An agent in host processes. The explorer makes one for its run file, and calls `run` for many rollouts at
    once."""

    is_elsewhere = False
    keeps_time = False

    def __init__(self, config: HostedAgentConfig) -> None:
        if not config.target:
            raise ConfigError(
                "environments.hosted_agent.target: missing; name the function to run, as in my_agents:solve"
            )
        self._config = config
        self._pool = pool_of(config.hosts())

    async def run(self, work: AgentWork, begins: Callable[[], object] = lambda: None) -> AgentResult:
        """Run the agent to its end. `begins` is called when its host is ready.

        HostError if its host dies, HostTimeout if it takes too long, HostedCodeError if it raises. Cancelling this
        cancels the agent."""
        session = self._pool.session(target_path(self._config.target))
        try:
            await session.open(self._config.start_timeout_s)
            begins()
            answer = await session.call(
                "run_agent",
                self._config.timeout_s,
                options=self._config.options,
                problem=problem_to_plain(work.problem),
                base_url=work.base_url,
                api_key=work.api_key,
                seed=work.seed,
            )
        finally:
            await session.leave()
        return result_from_plain(answer.get("result"))


def result_from_plain(value: Any) -> AgentResult:
    """Return the checked result of an agent's function. HostedCodeError if it is neither a number nor a dict with the
    reward."""
    if not isinstance(value, dict):
        value = {"reward": value}
    if unknown := sorted(set(value) - {"reward", "parts", "roles", "metrics"}):
        raise HostedCodeError(f"agent: unknown key {unknown[0]!r} of its result; known: metrics, parts, reward, roles")
    reward = value.get("reward")
    return AgentResult(
        reward=None if reward is None else numbers_from_plain({"reward": reward}, what="agent")["reward"],
        parts=numbers_from_plain(value.get("parts"), what="agent.parts"),
        roles=roles_from_plain(value.get("roles"), what="agent.roles"),
        metrics=numbers_from_plain(value.get("metrics"), what="agent.metrics"),
    )
