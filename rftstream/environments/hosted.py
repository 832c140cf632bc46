"""An environment in a process with its own interpreter (`hosts/`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from rftstream.contracts.tasks import Problem
from rftstream.environments.foreign import ForeignEnvironment
from rftstream.environments.hosts.host import HostSettings
from rftstream.environments.hosts.pool import HostSession, pool_of, target_path
from rftstream.environments.json_form import problem_to_plain
from rftstream.errors import ConfigError, HostError, HostStartTimeout, HostTimeout


@dataclass(frozen=True, kw_only=True)
class HostedConfig:
    """Settings of code in host processes."""

    target: str = ""
    """Code to run: `module:Thing`, `file.py:Thing`, or the name of an adapter."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the target, passed as a dict."""
    python: str = ""
    """The interpreter: a path, or a name on PATH. Empty: rftstream's own."""
    path: tuple[str, ...] = ()
    """Folders in which that interpreter first looks for modules. It also looks in the folder of the run file."""
    processes: Annotated[int, Meta(ge=1)] = 1
    """Largest number of host processes of each explorer. Each holds any number of environments."""
    timeout_s: Annotated[float, Meta(ge=0)] = 60.0
    """Seconds for one answer, without the time to import the target. 0: no limit."""
    start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds for a host to import the target, which may load a model. They count neither for `timeout_s` nor for
    `explorer.reply_timeout_s`. If a host takes longer, the rollout fails; the import continues for later rollouts."""
    idle_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds after which a host without environments is ended. The next environment starts a new host."""
    log_folder: str = ""
    """Folder for the output of hosts, at most 1 MiB a file; relative to the working folder. Empty: output goes to the
    explorer's log."""

    def hosts(self) -> HostSettings:
        """Return the settings that the processes depend on."""
        return HostSettings(
            python=self.python,
            processes=self.processes,
            idle_timeout_s=self.idle_timeout_s,
            path=self.path,
            log_folder=self.log_folder,
        )


class HostedEnvironment(ForeignEnvironment):
    """An environment in a host process. If the host dies, another one takes its place."""

    @dataclass(frozen=True, kw_only=True)
    class Config(HostedConfig):
        """The settings in `[environments.hosted]`."""

    def __init__(self, config: Config, *, problem: Problem, seed: int) -> None:
        if not config.target:
            raise ConfigError("environments.hosted.target: missing; name the class to run, as in my_envs:Game")
        self._config = config
        self.start_timeout_s = config.start_timeout_s
        """Seconds for `start` and `load` in addition to the time limit of a call."""
        self._pool = pool_of(config.hosts())
        self._arguments = {"config": config.options, "problem": problem_to_plain(problem), "seed": seed}
        self._session: HostSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close(self._config.timeout_s)

    async def _open(self, do: str, **fields: Any) -> Mapping[str, Any]:
        """Start or load the environment in a host. A host that dies during this is replaced once, since nothing is lost
        yet."""
        try:
            return await self._open_once(do, **fields)
        except (HostTimeout, HostStartTimeout):
            raise
        except HostError:
            return await self._open_once(do, **fields)

    async def _open_once(self, do: str, **fields: Any) -> Mapping[str, Any]:
        await self.close()
        self._session = self._pool.session(target_path(self._config.target))
        await self._session.open(self._config.start_timeout_s)
        return await self._ask(do, **self._arguments, **fields)

    async def _ask(self, do: str, **fields: Any) -> Mapping[str, Any]:
        assert self._session, "the turn loop starts or loads an environment before it asks"
        return await self._session.call(do, self._config.timeout_s, **fields)

    def _is_lost(self, error: HostError) -> bool:
        return not isinstance(error, HostTimeout)
