"""Tasksets by the name of an environment: `source = "verifiers:ID"`. A host lists the environment's tasks.

The adapter's function `tasks(options)` yields a task as `{"messages", "answer", "info"}`, always in the same order. The
options are those of the environment (`TasksetSpec.environment_of`), so that both mean the same thing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import TasksetSpec
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.columns import with_system
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.environments.hosts.host import HostSettings
from rftstream.environments.hosts.pool import list_tasks, pool_of
from rftstream.environments.json_form import messages_from_plain
from rftstream.errors import ConfigError, HostedCodeError, HostError


class NamedTaskset(GeneratedTaskset):
    """The tasks that an adapter lists. A subclass names its scheme."""

    scheme: ClassVar[str]

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`. The environment of the taskset gets them, too, save for `size`."""

        size: Annotated[int, Meta(ge=1)] = 10_000
        """Most tasks. An environment that makes its tasks from seeds has as many."""
        options: dict[str, Any] = field(default_factory=dict)
        """Settings of the adapter."""
        python: str = ""
        """The interpreter that has the package: a path, or a name on PATH. Empty: rftstream's own."""
        path: tuple[str, ...] = ()
        """Folders in which that interpreter first looks for modules."""
        timeout_s: Annotated[float, Meta(ge=0)] = 300.0
        """Seconds for one answer. 0: no limit."""
        start_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
        """Seconds to import the package."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        where, spec = f"{self.scheme}:{location}", registry.built_in(TasksetSpec)[self.scheme]
        if columns:
            raise ConfigError(f"{where}: has no columns, got {', '.join(columns)}; remove them")
        if not location:
            raise ConfigError(f"{where}: names no environment, expected {self.scheme}:NAME")
        options = spec.options_of(location, config.options)
        host = HostSettings(python=config.python, processes=1, idle_timeout_s=60.0, path=config.path, log_folder="")
        limits = (config.start_timeout_s, config.timeout_s)
        try:
            self._tasks = _listed(host, str(spec.environment["target"]), json.dumps(options), config.size, limits)
        except (ConfigError, HostError, HostedCodeError) as error:
            hint = f"; {spec.package} comes by: {spec.install}" if "ModuleNotFoundError" in str(error) else ""
            raise ConfigError(f"{where}: its tasks cannot be listed: {error}{hint}") from None
        digest = hashlib.sha256("\n".join(self._tasks).encode()).hexdigest()
        super().__init__(where, size=len(self._tasks), system=system, decided_by=[where, options, system, digest])

    def make_problem(self, index: int) -> Problem:
        """Return the task with this index as a problem."""
        task = json.loads(self._tasks[index])
        try:
            messages = messages_from_plain(task.get("messages") or "", what="messages")
        except HostedCodeError as error:
            raise ConfigError(f"{self._where}: task {index}: {error}") from None
        answer = task.get("answer")
        return Problem(
            messages=with_system(messages, self._system, self._where),
            answer=answer if isinstance(answer, str) else None,
            info=task.get("info") or {},
            data_source=self._where.replace(":", "/", 1),
        )


@functools.lru_cache(maxsize=8)
def _listed(host: HostSettings, target: str, options: str, size: int, limits: tuple[float, float]) -> tuple[str, ...]:
    """Return the tasks as JSON texts. They are listed once in a process."""
    return list_tasks(pool_of(host), target, json.loads(options), size, *limits)


class VerifiersTaskset(NamedTaskset):
    """A taskset of verifiers, by the id that verifiers knows it by."""

    scheme = "verifiers"


class NemoGymTaskset(NamedTaskset):
    """Rows of NeMo Gym, which verifiers plays against a resource server."""

    scheme = "nemo_gym"


class OpenEnvTaskset(NamedTaskset):
    """Episodes of an environment of OpenEnv, each with a seed."""

    scheme = "openenv"


class OrsTaskset(NamedTaskset):
    """A split of an environment that speaks ORS, the protocol of OpenReward."""

    scheme = "ors"


class GymnasiumTaskset(NamedTaskset):
    """Episodes of an environment of gymnasium, each with a seed."""

    scheme = "gymnasium"


class TextArenaTaskset(NamedTaskset):
    """Games of textarena, each with a seed."""

    scheme = "textarena"
