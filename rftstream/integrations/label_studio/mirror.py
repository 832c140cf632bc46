"""What the bridge knows of the tasks in Label Studio: all of them at first and now and then, in between those that have
changed.

Listing a thousand tasks takes Label Studio some ten seconds, and a task is newly dated by whatever happens to it or its
annotations. So most rounds ask for the newest tasks only, up to a page on which nothing is new. What that passes over
(a date that was given before but written after one that was seen already, an annotation deleted in bulk) the next full
listing finds.
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
"""Keys of a task's data that are kept. For a task with annotations the answer that a correction began with is kept,
too."""


class TaskMirror:
    """The tasks of a run's projects. The bridge makes one; each round calls `update`, and `settle` when everything that
    follows from them is written. Without `settle`, the next `update` lists all."""

    def __init__(self, projects: Projects, now: Callable[[], float], beat: Callable[[], None]) -> None:
        self._projects, self._now, self._beat = projects, now, beat
        self._by_question: dict[str, dict[int, ServerTask]] = {}
        self._listed_at: float | None = None
        self._is_settled = False

    def update(self, projects: Mapping[int, FeedbackKind]) -> set[str]:
        """Read what has changed. Return the questions whose tasks may say something new."""
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
        """Note that everything is written that follows from the tasks."""
        self._is_settled = True

    def tasks(self, question_id: str, kind: FeedbackKind) -> list[ServerTask]:
        """Return the tasks of a question in projects for its kind, the first one first."""
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
