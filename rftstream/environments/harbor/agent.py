"""Runs an agent on a task of Harbor: makes a place, runs the agent in it, then the tests, and reads the reward."""

from __future__ import annotations

import asyncio
import importlib
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from rftstream.config import secrets
from rftstream.contracts.tasks import Problem
from rftstream.data.harbor_tasks import HarborTask, digest_task, read_rewards, read_task, resolve_variables
from rftstream.environments.harbor.harnesses import HARNESSES, Harness, model_variables
from rftstream.environments.hosts.agents import AgentResult, AgentWork
from rftstream.environments.places import PLACES
from rftstream.environments.places.base import Place, PlaceLimits, PlaceOrder, Places, PlaceSettings, PlaceSource
from rftstream.errors import ConfigError, HostedCodeError

SECTION = "environments.harbor"
MAX_REWARD_BYTES = 1 << 20
SHORT_S = 120.0
"""Largest number of seconds of the commands that prepare a place."""
LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs /logs/*"


@dataclass(frozen=True, kw_only=True)
class HarborConfig:
    """Settings of agents in places."""

    harness: str = ""
    """The harness that runs the agent: `mini-swe-agent`, `claude-code` or `codex`. Empty: `command`."""
    command: str = ""
    """Shell command that runs the agent. $INSTRUCTION is the prompt; $OPENAI_BASE_URL and $OPENAI_API_KEY (or
    $ANTHROPIC_BASE_URL and $ANTHROPIC_AUTH_TOKEN) lead to the model, $MODEL."""
    install: str = ""
    """Shell commands that put what `command` needs into a task's image. They run once for each image, as root and with
    network."""
    variables: dict[str, str] = field(default_factory=dict)
    """More environment variables of the agent. `"env:NAME"`: the value of the explorer's variable."""
    place: str = "docker"
    """The kind of place: `docker`; or `kubernetes`, or `bubblewrap` on this machine, which build no images."""
    root: str = ""
    """Folder with a root file system for `bubblewrap`, as `docker export` makes one."""
    engine: str = ""
    """The command of the engine: `docker`, `podman`, `kubectl`, or a path. Empty: `docker`, or `kubectl` for
    `kubernetes`."""
    engine_host: str = ""
    """Address of an engine on another machine, such as `ssh://USER@HOST`. Empty: that of the command's own settings,
    such as DOCKER_HOST, or this machine's."""
    namespace: str = ""
    """Namespace of the pods of `kubernetes`. Empty: that of kubectl's context, or of the explorer's own pod."""
    pod: dict[str, Any] = field(default_factory=dict)
    """Fields for the `spec` of the pods of `kubernetes`, such as `nodeSelector`, `tolerations`, `runtimeClassName` or
    `imagePullSecrets`."""
    relay_image: str = "python:3.12-slim"
    """An image with `python3`. In it runs the relay by which a place reaches the model, and nothing else."""
    places: Annotated[int, Meta(ge=1)] = 4
    """Largest number of places at once, for each explorer and taskset. Other rollouts wait."""
    cpus: Annotated[float, Meta(gt=0)] = 2.0
    """Most processors of a place. A task may ask for fewer."""
    memory_mb: Annotated[int, Meta(ge=16)] = 4096
    """Most memory of a place. A task may ask for less."""
    disk_mb: Annotated[int, Meta(ge=1)] = 10240
    """Largest number of megabytes that may be written in a place; a place that writes more is ended. A task may ask for
    less."""
    pids: Annotated[int, Meta(ge=16)] = 512
    """Largest number of processes and threads in a place at once."""
    internet: bool = False
    """Give places the internet if their task allows it. Otherwise they reach the model and nothing else."""
    agent_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Seconds for the agent of a task that sets no limit. An agent that takes longer is ended, and what it did is
    tested."""


class HarborAgent:
    """Agents in places. The explorer makes one for each taskset, and calls `run` for many rollouts at once. `check`
    calls `rehearse`."""

    is_elsewhere = False
    keeps_time = True

    def __init__(self, config: HarborConfig, places: Places | None = None) -> None:
        """`places`: makes the places; by default those of the config. ConfigError for invalid settings."""
        self._config = config
        self._harness = _harness(config)
        self._variables = {**self._harness.variables, **secrets.reveal(config.variables, where=f"{SECTION}.variables")}
        self._places = places or _places(config)
        self._room = asyncio.Semaphore(config.places)

    async def run(self, work: AgentWork, begins: Callable[[], object] = lambda: None) -> AgentResult:
        """Run an agent to its end, and then the tests. `base.Place` and `base.Places` list the errors; HostedCodeError
        also if the agent never called its model, and if the tests give no reward."""
        begins()
        task, digest = await asyncio.to_thread(_task_of, work.problem)
        labels = {"run": work.run_id, "rollout": work.rollout_id}
        async with self._room:
            place = await self._places.create(self._order(task, digest, labels, work.base_url, self._harness.install))
            try:
                return await self._attempt(place, task, work.api_key)
            finally:
                await place.close()

    async def rehearse(self, problem: Problem) -> AgentResult | None:
        """Run a task's own solution in the agent's stead, and return its reward; None if the task has no solution. No
        model is called."""
        task, digest = await asyncio.to_thread(_task_of, problem)
        if not (task.folder / "solution" / "solve.sh").is_file():
            return None
        place = await self._places.create(self._order(task, digest, {"task": task.name}))
        try:
            await _prepare(place, task.folder / "solution", "/solution")
            ran = await place.run(
                "/solution/solve.sh",
                timeout_s=self._agent_timeout_s(task),
                variables={"DEBIAN_FRONTEND": "noninteractive", **_given(task.settings.solution.env, task)},
                user=_user(task.settings.agent.user),
                cwd=task.settings.environment.workdir or "",
            )
            try:
                return await self._judged(place, task)
            except HostedCodeError as error:
                raise HostedCodeError(f"{error}; solve.sh before: {ran.summary}") from None
        finally:
            await place.close()

    def _order(
        self, task: HarborTask, digest: str, labels: Mapping[str, str], model_url: str = "", install: str = ""
    ) -> PlaceOrder:
        config, machine = self._config, task.settings.environment
        network_mode = task.settings.agent.network_mode or machine.network_mode
        return PlaceOrder(
            source=PlaceSource(
                image=machine.docker_image or "",
                folder=task.folder / "environment",
                install=install,
                build_timeout_s=machine.build_timeout_sec,
                digest=digest,
            ),
            limits=PlaceLimits(
                cpus=min(machine.cpus or config.cpus, config.cpus),
                memory_mb=min(machine.memory_mb or config.memory_mb, config.memory_mb),
                disk_mb=min(machine.storage_mb or config.disk_mb, config.disk_mb),
                pids=config.pids,
                life_s=self._agent_timeout_s(task) + _tests_timeout_s(task) + 10 * SHORT_S,
            ),
            labels=labels,
            variables=_given(machine.env, task),
            model_url=model_url,
            has_internet=config.internet and network_mode == "public",
        )

    async def _attempt(self, place: Place, task: HarborTask, api_key: str) -> AgentResult:
        await _prepare(place)
        began = time.monotonic()
        ran = await place.run(
            self._harness.command,
            timeout_s=self._agent_timeout_s(task),
            variables={**model_variables(task.instruction, api_key), **self._variables},
            user=_user(task.settings.agent.user),
            cwd=task.settings.environment.workdir or "",
        )
        took_s = time.monotonic() - began
        if not place.has_called:
            raise HostedCodeError(f"the agent never called the model: {ran.summary}")
        place.end_calls()  # what the agent has left in the background is not judged, so it is not sampled
        found = await self._judged(place, task)
        metrics = {"agent_s": took_s, "agent_timed_out": float(ran.exit_code is None)}
        if late := place.end_calls():
            metrics["agent_late_calls"] = float(late)
        if ran.exit_code is not None:
            metrics["agent_exit_code"] = float(ran.exit_code)
        return AgentResult(reward=found.reward, parts=found.parts, metrics=metrics)

    async def _judged(self, place: Place, task: HarborTask) -> AgentResult:
        """Run the task's tests, and return the reward that they write. What the agent has put in their stead is
        removed."""
        limit_s = _tests_timeout_s(task)
        await _prepare(place, task.folder / "tests", "/tests")
        ran = await place.run(
            "/tests/test.sh",
            timeout_s=limit_s,
            variables=_given(task.settings.verifier.env, task),
            user=_user(task.settings.verifier.user),
            cwd=task.settings.environment.workdir or "",
        )
        if ran.exit_code is None:
            raise HostedCodeError(f"the tests took longer than {limit_s:g} s (verifier.timeout_sec of {task.name})")
        text, named = [
            await place.get(f"/logs/verifier/reward.{kind}", max_bytes=MAX_REWARD_BYTES) for kind in ("txt", "json")
        ]
        try:
            reward, parts = read_rewards(text, named)
        except HostedCodeError as error:
            raise HostedCodeError(f"{error}; test.sh: {ran.summary}") from None
        return AgentResult(reward=reward, parts=parts)

    def _agent_timeout_s(self, task: HarborTask) -> float:
        return task.settings.agent.timeout_sec or self._config.agent_timeout_s


def _tests_timeout_s(task: HarborTask) -> float:
    return task.settings.verifier.timeout_sec or 600.0


def _harness(config: HarborConfig) -> Harness:
    if config.harness and config.command:
        raise ConfigError(f"{SECTION}: got harness and command, expected one of them")
    if config.command:
        return Harness(install=config.install, command=config.command)
    if config.harness not in HARNESSES:
        known = ", ".join(sorted(HARNESSES))
        raise ConfigError(
            f"{SECTION}.harness: got {config.harness!r}, expected one of {known}; or set command to your own"
        )
    found = HARNESSES[config.harness]
    return Harness(install=found.install + config.install, command=found.command, variables=found.variables)


def _places(config: HarborConfig) -> Places:
    if config.place not in PLACES:
        raise ConfigError(f"{SECTION}.place: got {config.place!r}, expected {', '.join(sorted(PLACES))}")
    module, _, name = PLACES[config.place].partition(":")
    made: Places = getattr(importlib.import_module(module), name)(
        PlaceSettings(
            engine=config.engine,
            engine_host=config.engine_host,
            relay_image=config.relay_image,
            root=config.root,
            namespace=config.namespace,
            pod=config.pod,
        )
    )
    return made


def _task_of(problem: Problem) -> tuple[HarborTask, str]:
    """Return the task of a problem, from the folder in which the taskset found it, with the digest of its files."""
    folder = problem.info.get("folder")
    if not isinstance(folder, str):
        raise ConfigError(f'{SECTION}: the problem is no task of Harbor; it needs source = "harbor:FOLDER"')
    try:
        task = read_task(Path(folder))
        digest = digest_task(task.folder)
    except (ConfigError, OSError) as error:
        raise HostedCodeError(f"the task cannot be read here: {error}") from None
    if digest != problem.info.get("digest"):
        raise HostedCodeError(f"{folder} has changed since it was made a problem; a run's tasks must stay as they are")
    return task, digest


async def _prepare(place: Place, source: Path | None = None, target: str = "") -> None:
    """Make the folders for logs, and put the files of a folder into a fresh one."""
    fresh = f" && rm -rf {target} /logs/verifier/reward.txt /logs/verifier/reward.json" if target else ""
    await _must(place, LOGS + fresh)
    if source is not None:
        await place.put(source, target)
        await _must(place, f"chmod +x {shlex.quote(target)}/*.sh")


async def _must(place: Place, command: str) -> None:
    ran = await place.run(command, timeout_s=SHORT_S, user="0")
    if ran.exit_code != 0:
        raise HostedCodeError(f"the place cannot be prepared: {command}: {ran.summary}")


def _given(values: Mapping[str, str], task: HarborTask) -> dict[str, str]:
    return resolve_variables(values, f"{task.folder}/task.toml")


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)
