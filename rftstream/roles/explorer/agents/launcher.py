"""Starts agents: one run for each rollout, in a host process or at a service.

The runs are awaited in an event loop with a thread of its own. The result of a run goes to the agent loop through its
inbox, as if the agent had sent it over HTTP."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rftstream.contracts.tasks import Task
from rftstream.environments.hosts.agents import AgentResult, AgentWork
from rftstream.environments.launched_agents import RunsAgent
from rftstream.errors import ConfigError, HostedCodeError, HostError, HostStartTimeout, HostTimeout
from rftstream.loops import LoopThread
from rftstream.roles.explorer.model_calls import AgentBegins, AgentRequest, CallInbox, RolloutEnd

log = logging.getLogger(__name__)

MAX_STARTS = 3
"""Most starts of an agent that is lost, for example with its host. After the last one its rollout fails."""
MAX_NUMBERS = 256
"""Most parts or metrics of a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedAgents:
    """The agents that a launcher starts, and the addresses at which they reach their model."""

    agents: Mapping[str, RunsAgent]
    """Name of a taskset or an evaluation -> the object that runs its agents."""
    anew: Collection[str] = ()
    """Tasksets and evaluations whose agents start without the recorded calls if another explorer ran them before."""
    as_written: Callable[[str, str], str] = lambda taskset, error: error
    """Returns an error about the settings of a taskset's agents, extended by the place of these settings in the run
    file."""
    run_id: str = ""
    """Id of the run, by which what an agent leaves can be told."""
    base_url: str = ""
    """Base URL of the gateway for agents on this machine."""
    public_url: str = ""
    """Base URL of the gateway for agents elsewhere."""
    key_of: Callable[[str, str], str] = lambda rollout_id, launch: f"{rollout_id} {launch}"
    """Returns the key of a launch of a rollout's agent."""
    ring: Callable[[], object] = lambda: None
    """Ends the explorer's wait, from any thread."""


@dataclass(slots=True, eq=False)
class _Run:
    """A run of an agent."""

    task: Task
    launch: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this run from other runs of the agent for this task, also by other explorers: an agent may outlive
    its explorer and call the next one."""
    work: asyncio.Task[None] | None = None


class AgentLauncher:
    """The agents that an explorer has started. Its step calls `launch` for each task, `check` in each slice, `cancel`
    for ended and lost rollouts, and `close` at the end. Only `close` waits for a host."""

    def __init__(self, launched: LaunchedAgents, inbox: CallInbox) -> None:
        self._launched, self._inbox = launched, inbox
        self._loop = LoopThread("agents") if launched.agents else None
        self._lock = threading.Lock()
        self._running: dict[str, _Run] = {}
        """Rollout -> its run. Messages of runs that are no longer here are ignored."""
        self._works: set[asyncio.Task[None]] = set()
        """Tasks that are kept alive until they have left their hosts."""
        self._error: ConfigError | None = None

    def launch(self, task: Task) -> bool:
        """Start the agent of a task, from its beginning. Return False for an agent that runs elsewhere."""
        agent = self._launched.agents.get(task.ids.taskset)
        if agent is None or self._loop is None:
            return False
        self.cancel([task.ids.rollout_id])
        run = self._running[task.ids.rollout_id] = _Run(task)
        self._loop.soon(self._begin, run, agent)
        return True

    def begins_anew(self, task: Task) -> bool:
        """Return whether a task's agent must start without the calls that another explorer has recorded."""
        return task.ids.taskset in self._launched.anew and task.ids.taskset in self._launched.agents

    def cancel(self, rollout_ids: Iterable[str]) -> None:
        """Cancel the agents of these rollouts. Their later messages are ignored."""
        for rollout_id in rollout_ids:
            with self._lock:
                run = self._running.pop(rollout_id, None)
            if run is not None and self._loop is not None and not self._loop.closed:
                self._loop.soon(_cancel, run)

    def cancel_all(self) -> None:
        """Cancel all agents."""
        self.cancel(list(self._running))

    def check(self) -> None:
        """Raise ConfigError if no agent can run at all, because the interpreter or the target is missing."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Cancel all agents, and wait until they have left their hosts."""
        self.cancel_all()
        if self._loop is not None:
            self._loop.close()

    # ------------------------------------------------------------------------------------------ in the loop's thread

    def _begin(self, run: _Run, agent: RunsAgent) -> None:
        run.work = asyncio.get_running_loop().create_task(self._attend(run, agent))
        self._works.add(run.work)
        run.work.add_done_callback(self._works.discard)

    async def _attend(self, run: _Run, agent: RunsAgent) -> None:
        """Run an agent to its end, and put its result into the inbox."""
        rollout_id = run.task.ids.rollout_id
        try:
            end = await self._end_of(run, agent)
        except ConfigError as error:
            self._error = ConfigError(self._launched.as_written(run.task.ids.taskset, str(error)))
            self._launched.ring()
            return
        except Exception as error:
            log.exception("%s: the agent cannot be run", rollout_id)
            end = RolloutEnd(error=f"{type(error).__name__}: {error}")
        with self._lock:
            if self._running.get(rollout_id) is run:
                del self._running[rollout_id]
                self._inbox.put(AgentRequest(rollout_id=rollout_id, wanted=end, reply=lambda answer: None))

    async def _end_of(self, run: _Run, agent: RunsAgent) -> RolloutEnd:
        task, rollout_id, lost = run.task, run.task.ids.rollout_id, ""
        for number in range(MAX_STARTS):
            launch = run.launch if agent.is_elsewhere else f"{run.launch}x{number}"
            try:
                work = AgentWork(
                    problem=task.problem,
                    base_url=self._launched.public_url if agent.is_elsewhere else self._launched.base_url,
                    api_key=self._launched.key_of(rollout_id, launch),
                    seed=task.seed,
                    rollout_id=rollout_id,
                    run_id=self._launched.run_id,
                    launch_id=f"{rollout_id}/launch/{run.launch}",
                )
                result = await agent.run(work, functools.partial(self._note_begin, run, launch, agent.keeps_time))
            except HostTimeout as error:
                return RolloutEnd(cut_short=f"the agent took too long: {error}")
            except (HostedCodeError, HostStartTimeout) as error:
                return RolloutEnd(error=str(error))
            except HostError as error:
                lost = str(error)
                log.warning("%s: the agent is lost: %s", rollout_id, lost)
            else:
                return end_of_result(result)
        return RolloutEnd(error=f"it was lost {MAX_STARTS} times: {lost}")

    def _note_begin(self, run: _Run, launch: str, keeps_time: bool) -> None:
        rollout_id = run.task.ids.rollout_id
        with self._lock:
            if self._running.get(rollout_id) is run:
                self._inbox.put(AgentBegins(rollout_id=rollout_id, launch=launch, keeps_time=keeps_time))


def _cancel(run: _Run) -> None:
    if run.work is not None:
        run.work.cancel()


def end_of_result(result: AgentResult) -> RolloutEnd:
    """Return the end of a rollout whose agent has returned a result. Numbers that no record can hold count as the
    agent's error."""
    for name, numbers in (
        ("reward", {} if result.reward is None else {"reward": result.reward}),
        ("parts", result.parts),
        ("roles", {role: reward for role, reward in result.roles.items() if reward is not None}),
        ("metrics", result.metrics),
    ):
        if len(numbers) > MAX_NUMBERS:
            return RolloutEnd(error=f"agent.{name}: got {len(numbers)} numbers, expected at most {MAX_NUMBERS}")
        for number in numbers.values():
            if not math.isfinite(number):
                return RolloutEnd(error=f"agent.{name}: got {number}, expected finite numbers")
    return RolloutEnd(
        reward=result.reward, parts=dict(result.parts), roles=dict(result.roles), metrics=dict(result.metrics)
    )
