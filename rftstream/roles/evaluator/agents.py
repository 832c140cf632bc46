"""Evaluation samples made by agents: the explorers' agent loop, without the log.

An interrupted evaluation starts over as a whole. So its calls are answered as soon as they are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Task
from rftstream.models.rendering import Renderer
from rftstream.roles.explorer.agents.parts import AgentParts
from rftstream.roles.explorer.attempt import Attempt
from rftstream.roles.explorer.fit_to_record import without_tokens


class AgentSamples:
    """The samples that agents make. `workers/evaluator.py` makes it. The evaluator's step calls `start` for each sample
    and `step` in each slice, as for the turn loop, `abort_all` before it starts over, and `close` at the end."""

    def __init__(self, parts: AgentParts, *, now: Callable[[], float], patience_s: float) -> None:
        """`patience_s` is the number of seconds after which samples without an agent are given up."""
        self._parts, self._now, self._patience_s = parts, now, patience_s
        self._names: dict[int, tuple[str, Task]] = {}
        """Key in the loop -> key of the sample, and its task."""
        self._count = 0
        self._evaluation = ""
        self._heard_at = 0.0
        """Time when an agent of this evaluation last had a rollout, or when the evaluation began."""

    @property
    def num_open(self) -> int:
        """Number of samples that have not ended."""
        return len(self._names)

    @property
    def num_free(self) -> int:
        """Number of samples that wait for an agent."""
        return sum(map(self._parts.loop.is_free, self._names))

    @property
    def gateway_url(self) -> str:
        """URL of the gateway for agents."""
        return self._parts.gateway_url

    def takes(self, environment: str) -> bool:
        """Return whether agents make the samples of this environment."""
        return environment in self._parts.environments

    def start(self, key: str, task: Task, renderer: Renderer | None, evaluation: str) -> None:
        """Open a sample to calls, and start its agent. `evaluation` is the same string for all samples of one
        evaluation of one version."""
        if evaluation != self._evaluation:
            self._evaluation, self._heard_at = evaluation, self._now()
        self._count += 1
        self._names[self._count] = (key, task)
        self._parts.begin(self._count, self._parts.new_rollout(task, renderer))

    def step(self) -> list[Attempt]:
        """Do one slice of work. Return the samples that have ended."""
        loop = self._parts.loop
        self._parts.launcher.check()
        ended = loop.step(lambda task: True)
        loop.committed(loop.unsaved().keys() & self._names.keys(), [int(one.key) for one in ended])
        attempts = [self._attempt(one) for one in ended]
        if self.num_free < self.num_open or attempts:
            self._heard_at = self._now()
        elif self._names and self._now() > self._heard_at + self._patience_s:
            attempts += self._given_up()
        return attempts

    def abort_all(self) -> None:
        """Forget all samples."""
        self._parts.launcher.cancel_all()
        self._parts.loop.drop(list(self._names))
        self._names.clear()

    def idle_s(self) -> float:
        """Return the seconds until there is work, if no request comes."""
        return self._parts.loop.idle_s()

    def close(self) -> None:
        """End the agents and the gateway."""
        self._parts.close()

    def _attempt(self, ended: Attempt) -> Attempt:
        key, task = self._names.pop(int(ended.key))
        self._parts.launcher.cancel([task.ids.rollout_id])
        return replace(ended, key=key)

    def _given_up(self) -> list[Attempt]:
        """End the samples that no agent has taken."""
        error = f"no agent asked for it within {self._patience_s:g} s (explorer.idle_timeout_s)"
        names = list(self._names.values())
        self.abort_all()
        now = self._now()
        return [without_tokens(RolloutStatus.failed, error, key=key, started_at=now) for key, _ in names]
