"""Tasks of Harbor: `source = "harbor:DIR"`, with a folder for each task. For the environment `harbor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftstream.contracts.tasks import Problem
from rftstream.data.harbor_tasks import HarborTask, digest_task, find_tasks, read_task
from rftstream.data.tasksets.generated import GeneratedTaskset
from rftstream.errors import ConfigError


class HarborTaskset(GeneratedTaskset):
    """The tasks of a folder, in the order of their names."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The settings in `[tasksets.NAME.options]`."""

        only: tuple[str, ...] = ()
        """Names of the tasks to take. Empty: all."""
        skip_unsupported: bool = False
        """Leave out tasks that cannot be run here, such as those of several machines. Otherwise they are errors."""

    def __init__(self, config: Config, *, location: str, columns: Mapping[str, str], system: str | None) -> None:
        where = f"harbor:{location}"
        if columns:
            raise ConfigError(f"{where}: has no columns, got {', '.join(columns)}; remove them")
        folders = find_tasks(Path(location), where)
        names = [folder.name for folder in folders]
        if unknown := [name for name in config.only if name not in names]:
            raise ConfigError(f"{where}: options.only: no task {unknown[0]!r}; there are {', '.join(names[:20])}")
        self._tasks: list[tuple[HarborTask, str]] = []
        """The tasks with their digests."""
        for folder in folders:
            if not config.only or folder.name in config.only:
                try:
                    self._tasks.append((read_task(folder), digest_task(folder)))
                except ConfigError:
                    if not config.skip_unsupported:
                        raise
        taken, digests = [task.name for task, _ in self._tasks], [digest for _, digest in self._tasks]
        super().__init__(where, size=len(taken), system=system, decided_by=[system, taken, digests])

    def make_problem(self, index: int) -> Problem:
        """Return the task with this index as a problem."""
        task, digest = self._tasks[index]
        return Problem(
            messages=self.messages(task.instruction),
            info={"task": task.name, "folder": str(task.folder), "digest": digest},
            data_source=f"harbor/{task.name}",
        )
