"""The bridge's copy of the tasks in Label Studio. Now and then it lists all tasks; in between, only those that have
changed.

Listing a thousand tasks takes Label Studio some ten seconds. Any change of a task or its annotations renews the task's
date. So most rounds read only the newest tasks, up to a page on which nothing is new. This can miss a change (a task
that is written later than its date, an annotation deleted in bulk). The next full listing finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from rftstream.contracts.feedback import FeedbackKind
from rftstream.integrations.label_studio.projects import Projects, ServerTask

FULL_EVERY_S = 600.0
"""Seconds between two full listings."""
KEPT = ("question", "state", "notice")
"""Keys of a task's data that are kept. For a task with annotations, the answer that filled its correction field is
kept, too."""


class TaskMirror:
    """The tasks of a run's projects. The bridge makes one. Each round calls `update`, and then `settle` when all
    changes that follow from the tasks are written. Without `settle`, the next `update` lists all tasks."""

    def __init__(self, projects: Projects, now: Callable[[], float], beat: Callable[[], None]) -> None:
        self._projects, self._now, self._beat = projects, now, beat
        self._by_question: dict[str, dict[int, ServerTask]] = {}
        self._listed_at: float | None = None
        self._is_settled = False

    def update(self, projects: Mapping[int, FeedbackKind]) -> set[str]:
        """Read the changes. Return the questions whose tasks may have new answers."""
        now = self._now()
        is_due = self._listed_at is None or not 0 <= now - self._listed_at < FULL_EVERY_S
        is_full, self._is_settled = is_due or not self._is_settled, False
        if not is_full:
            return self._read_changes(projects)
        found: dict[str, dict[int, ServerTask]] = defaultdict(dict)
        for project, kind in projects.items():
            for number, task in enumerate(self._projects.list_tasks(project, kind)):
                found[task.question_id][task.task_id] = _slim(task)
                if number % 100 == 0:
                    self._beat()
        self._by_question, self._listed_at = dict(found), now
        return set(found)

    def settle(self) -> None:
        """Note that all changes that follow from the tasks are written."""
        self._is_settled = True

    def tasks(self, question_id: str, kind: FeedbackKind) -> list[ServerTask]:
        """Return the tasks of a question in the projects of its kind, oldest first."""
        known = self._by_question.get(question_id, {})
        return [task for _, task in sorted(known.items()) if task.kind is kind]

    def _read_changes(self, projects: Mapping[int, FeedbackKind]) -> set[str]:
        changed: set[str] = set()
        for project, kind in projects.items():
            for page in self._projects.list_newest(project, kind):
                new = [task for task in page if self._is_new(task)]
                for task in new:
                    self._by_question.setdefault(task.question_id, {})[task.task_id] = _slim(task)
                    changed.add(task.question_id)
                self._beat()
                if not new:
                    break
        return changed

    def _is_new(self, task: ServerTask) -> bool:
        known = self._by_question.get(task.question_id, {}).get(task.task_id)
        return known is None or known.changed_at != task.changed_at or known.annotations != task.annotations


def _slim(task: ServerTask) -> ServerTask:
    kept = (*KEPT, "original") if task.annotations else KEPT
    return replace(task, data={name: task.data[name] for name in kept if name in task.data})
