"""Tasks of Harbor: `source = "harbor:DIR"`, with a folder for each task. For the environment `harbor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftstream.contracts.tasks import Problem
from rftstream.data.harbor_tasks import digest_task, find_tasks, read_task
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
        self._tasks = []
        for folder in folders:
            if not config.only or folder.name in config.only:
                try:
                    self._tasks.append(read_task(folder))
                except ConfigError:
                    if not config.skip_unsupported:
                        raise
        self._digests = [digest_task(task.folder) for task in self._tasks]
        taken = [task.name for task in self._tasks]
        super().__init__(where, size=len(taken), system=system, decided_by=[system, taken, self._digests])

    def make_problem(self, index: int) -> Problem:
        """Return the task with this index as a problem."""
        task = self._tasks[index]
        return Problem(
            messages=self.messages(task.instruction),
            info={"task": task.name, "folder": str(task.folder), "digest": self._digests[index]},
            data_source=f"harbor/{task.name}",
        )
