"""A run's projects and tasks in Label Studio. A project carries the run and the kind of its questions, and a task
carries the id of its question; by these they are found again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rftstream.contracts.control import RunManifest
from rftstream.contracts.feedback import FeedbackKind
from rftstream.errors import ConfigError, LabelStudioError
from rftstream.integrations.label_studio.client import LabelStudio, seconds_of
from rftstream.integrations.label_studio.label_config import TITLES, make_config

PAGE = 100
"""Projects or tasks in one page of a list."""
MAX_SENT_TASKS = 50
MAX_SENT_CHARACTERS = 4_000_000
"""Most characters of the tasks in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """An annotation that a person made on a task. `Projects` makes it."""

    annotation_id: int
    user: int | None
    """Id of the user. None: the user was deleted, so the owner is unknown."""
    updated_at: float
    lead_time_s: float | None
    was_skipped: bool
    results: Any

    @property
    def age(self) -> tuple[float, int]:
        """Return the sort key for the annotations of one person, newest last."""
        return self.updated_at, self.annotation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """A task in Label Studio, with its annotations at one moment. `Projects` makes it."""

    task_id: int
    kind: FeedbackKind
    """Kind of question of the task's project."""
    question_id: str
    """Id of the question in the task's data; empty if there is none."""
    data: dict[str, Any]
    is_labeled: bool
    """Whether the task has left the queue of the annotators."""
    changed_at: str
    """Time of the last change of the task or its annotations."""
    annotations: tuple[Annotation, ...]


class Projects:
    """The projects of a run. The bridge makes it. Each round calls `find`, and then lists the tasks of each project."""

    def __init__(self, server: LabelStudio, manifest: RunManifest, *, quorum: int, scale: tuple[float, float]) -> None:
        self._server, self._run_id, self._quorum, self._scale = server, manifest.run, quorum, scale
        self._begun_at = datetime.fromtimestamp(manifest.created_at, UTC).isoformat(timespec="milliseconds")

    def marker(self, kind: FeedbackKind) -> str:
        """Return the words in a project's description by which the project is found. They include the time at which the
        run began, since another run may have the same name."""
        return f"rftstream run {self._run_id}, begun {self._begun_at}: {kind}"

    def find(self) -> dict[int, FeedbackKind]:
        """Return the run's projects, oldest first in each kind. Two bridges that start at once make two projects of a
        kind; people may answer in either."""
        markers = {self.marker(kind): kind for kind in TITLES}
        found: dict[int, FeedbackKind] = {}
        page = 1
        while True:
            answer = self._server.get("/api/projects/", page=page, page_size=PAGE)
            for row in _rows(answer, "results", "/api/projects/"):
                lines = str(row.get("description") or "").splitlines()
                kind = next((markers[line.strip()] for line in lines if line.strip() in markers), None)
                if kind is not None and isinstance(row.get("id"), int):
                    found[row["id"]] = kind
            if not answer.get("next"):
                return dict(sorted(found.items()))
            page += 1

    def make(self, kind: FeedbackKind) -> int:
        """Make the project for a kind of question; return its id."""
        made = self._server.post(
            "/api/projects/",
            {
                "title": f"{self._run_id}: {TITLES[kind]}"[:50],
                "description": f"{self.marker(kind)}\nThe line above says whose it is: leave it as it is.",
                "label_config": make_config(kind, self._scale),
                "maximum_annotations": self._quorum,
                "show_skip_button": True,
            },
        )
        if not isinstance(made, dict) or not isinstance(made.get("id"), int):
            raise LabelStudioError(f"{self._server.url}/api/projects/: found no id in the answer, expected a project")
        return int(made["id"])

    def list_tasks(self, project: int, kind: FeedbackKind) -> Iterator[ServerTask]:
        """Yield all tasks of a project with their annotations, by their ids. The next page starts after the last id, so
        that no task is skipped while others are deleted."""
        last = 0
        while True:
            behind = {"filter": "filter:tasks:id", "operator": "greater", "type": "Number", "value": last}
            query = {"filters": {"conjunction": "and", "items": [behind]}, "ordering": ["tasks:id"]}
            answer = self._server.get(
                "/api/tasks", project=project, fields="all", page=1, page_size=PAGE, query=json.dumps(query)
            )
            rows = _rows(answer, "tasks", "/api/tasks")
            tasks = sorted((_task(row, kind) for row in rows), key=lambda task: task.task_id)
            if tasks and tasks[0].task_id <= last:
                raise ConfigError(
                    f"{self._server.url}/api/tasks: found task {tasks[0].task_id} again, expected those behind {last}; "
                    "this release of Label Studio does not filter tasks by their ids: take 1.23 or a later one"
                )
            yield from tasks
            if len(tasks) < PAGE:
                return
            last = tasks[-1].task_id

    def list_newest(self, project: int, kind: FeedbackKind) -> Iterator[list[ServerTask]]:
        """Yield pages of tasks, the last changed first. A task that changes during the listing moves to the front."""
        query, page = json.dumps({"ordering": ["-tasks:updated_at"]}), 0
        while True:
            page += 1
            answer = self._server.get(
                "/api/tasks", project=project, fields="all", page=page, page_size=PAGE, query=query
            )
            rows = _rows(answer, "tasks", "/api/tasks")
            yield [_task(row, kind) for row in rows]
            if len(rows) < PAGE or answer.get("total", math.inf) <= page * PAGE:
                return

    def send(self, project: int, data: Sequence[dict[str, Any]]) -> None:
        """Make tasks."""
        self._server.post(f"/api/projects/{project}/import", [{"data": one} for one in data])

    def mark(self, task: ServerTask, *, state: str, notice: str, is_labeled: bool) -> None:
        """Note the state of its question in a task. `is_labeled` takes the task out of the queue of the annotators."""
        path = f"/api/tasks/{task.task_id}/"
        body: dict[str, Any] = {"is_labeled": is_labeled}
        if (task.data.get("state"), task.data.get("notice")) != (state, notice):
            found = self._server.get(path)  # the sent data replaces all data of the task
            data = found.get("data") if isinstance(found, dict) else None
            if not isinstance(data, dict):
                raise LabelStudioError(f"{path}: found no data, expected those of a task")
            body["data"] = {**data, "state": state, "notice": notice}
        self._server.patch(path, body)


def in_requests(tasks: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield tasks in lists that are small enough for one request."""
    chunk: list[dict[str, Any]] = []
    size = 0
    for task in tasks:
        length = sum(len(value) for value in task.values() if isinstance(value, str))
        if chunk and (len(chunk) == MAX_SENT_TASKS or size + length > MAX_SENT_CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(task)
        size += length
    if chunk:
        yield chunk


def _rows(answer: Any, name: str, path: str) -> list[dict[str, Any]]:
    rows = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise LabelStudioError(f"{path}: found {type(answer).__name__}, expected an object with `{name}`")
    return rows


def _task(row: dict[str, Any], kind: FeedbackKind) -> ServerTask:
    task_id, data, annotations = row.get("id"), row.get("data"), row.get("annotations")
    if not isinstance(task_id, int) or not isinstance(annotations, list):
        # Without them a vote would look deleted.
        raise LabelStudioError(f"/api/tasks: task {task_id}: found no id or no annotations, expected both")
    known = data if isinstance(data, dict) else {}
    question = known.get("question")
    return ServerTask(
        task_id=task_id,
        kind=kind,
        question_id=question if isinstance(question, str) else "",
        data=known,
        is_labeled=bool(row.get("is_labeled")),
        changed_at=str(row.get("updated_at")),
        annotations=tuple(_annotation(annotation, task_id) for annotation in annotations),
    )


def _annotation(row: Any, task_id: int) -> Annotation:
    user = row.get("completed_by") if isinstance(row, dict) else None
    if isinstance(user, dict):
        user = user.get("id")
    updated_at = seconds_of(row.get("updated_at")) if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(row.get("id"), int) or updated_at is None:
        raise LabelStudioError(f"/api/tasks: task {task_id}: an annotation without id or time, expected both")
    lead_time = row.get("lead_time")
    return Annotation(
        annotation_id=row["id"],
        user=user if isinstance(user, int) else None,
        updated_at=updated_at,
        lead_time_s=float(lead_time) if isinstance(lead_time, (int, float)) and 0 <= lead_time < 1e9 else None,
        was_skipped=bool(row.get("was_cancelled")),
        results=row.get("result"),
    )
