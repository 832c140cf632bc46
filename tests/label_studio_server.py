"""A small Label Studio over loopback, which answers as 1.23 was seen to: tokens that expire, pages, annotations with
their times. It fails as a test asks it to.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from tests.loopback import Asked, HttpServer

PERSONAL = "aaa.bbb.ccc"
Row = dict[str, Any]


class FakeLabelStudio:
    """Started by `running`; a test changes what is in it by its methods, and how it fails by `faults`."""

    def __init__(self) -> None:
        self.projects: dict[int, Row] = {}
        self.tasks: dict[int, Row] = {}
        self.requests: list[str] = []
        """Method and path of each request, in order."""
        self.faults: list[str] = []
        """What goes wrong next, one for each request: down, half, slow, error, silent (done, and no answer), fine."""
        self.uses_of_a_token: int | None = None
        """Requests after which an access token expires."""
        self.refuses_token = False
        self.refused = ""
        """Question whose task it does not take."""
        self.released = threading.Event()
        """Set: what is slow answers."""
        self._left: dict[str, int] = {}
        self._lock = threading.RLock()
        self._time = 1_800_000_000.0
        self._ids = 0

    # ------------------------------------------------------------------------------------------ people

    def annotate(self, question_id: str, user: int | None, *results: Row, skipped: bool = False, task: int = 0) -> int:
        """Return the id of a new annotation, on the question's first task or on the one of this place."""
        with self._lock:
            row = self.tasks_of(question_id)[task]
            now = self._now()
            annotation = {
                "id": self._id(), "completed_by": user, "result": list(results), "was_cancelled": skipped,
                "created_at": now, "updated_at": now, "lead_time": 2.5,
            }  # fmt: skip
            row["annotations"].append(annotation)
            self._touch(row)
            return int(annotation["id"])

    def edit(self, annotation: int, *results: Row) -> None:
        with self._lock:
            row, found = self._find(annotation)
            found.update(result=list(results), updated_at=self._now())
            self._touch(row)

    def delete(self, annotation: int) -> None:
        with self._lock:
            row, found = self._find(annotation)
            row["annotations"].remove(found)
            self._touch(row)

    def tasks_of(self, question_id: str) -> list[Row]:
        with self._lock:
            return [row for row in self.tasks.values() if row["data"].get("question") == question_id]

    def _touch(self, row: Row) -> None:
        row["updated_at"] = self._now()
        votes = [one for one in row["annotations"] if not one["was_cancelled"]]
        row["is_labeled"] = len(votes) >= self.projects[row["project"]]["maximum_annotations"]

    def _find(self, annotation: int) -> tuple[Row, Row]:
        return next((row, one) for row in self.tasks.values() for one in row["annotations"] if one["id"] == annotation)

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def _now(self) -> str:
        self._time += 1.0
        return datetime.fromtimestamp(self._time, UTC).isoformat().replace("+00:00", "Z")

    # ------------------------------------------------------------------------------------------ HTTP

    def answer(self, method: str, path: str, query: dict[str, str], body: Any, access: str) -> tuple[int, Any]:
        with self._lock:
            if path == "/api/token/refresh/":
                if self.refuses_token or body["refresh"] != PERSONAL:
                    return 401, {"detail": "Token is invalid"}
                self._left = dict.fromkeys(self._left, 0)
                token = f"access-{self._id()}"
                self._left[token] = 10**9 if self.uses_of_a_token is None else self.uses_of_a_token
                return 200, {"access": token}
            if not self._left.get(access):
                return 401, {"detail": "Authentication credentials were not provided."}
            self._left[access] -= 1
            return self._dispatch(method, path, query, body)

    def _dispatch(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        parts = path.strip("/").split("/")
        if parts == ["api", "projects"] and method == "GET":
            page, size = int(query["page"]), int(query["page_size"])
            rows = sorted(self.projects.values(), key=lambda row: -row["id"])
            shown = rows[(page - 1) * size : page * size]
            return 200, {"results": shown, "next": "more" if page * size < len(rows) else None}
        if parts == ["api", "projects"]:
            row = {"id": self._id(), **body}
            self.projects[row["id"]] = row
            return 201, row
        if parts[:2] == ["api", "projects"] and parts[3:] == ["import"]:
            if any(one["data"].get("question") == self.refused for one in body):
                return 400, {"detail": "Validation error", "validation_errors": {"non_field_errors": ["bad item"]}}
            for one in body:
                self._make_task(int(parts[2]), one["data"])
            return 201, {"task_count": len(body)}
        if parts == ["api", "tasks"]:
            return self._list(query)
        row = self.tasks.get(int(parts[2])) or {}
        if not row:
            return 404, {"detail": "No Task matches the given query."}
        if method == "PATCH":
            row.update(body, updated_at=self._now())
        return 200, row

    def _make_task(self, project: int, data: Row) -> None:
        row = {
            "id": self._id(), "project": project, "data": data, "annotations": [], "is_labeled": False,
            "updated_at": self._now(),
        }  # fmt: skip
        self.tasks[row["id"]] = row

    def _list(self, query: dict[str, str]) -> tuple[int, Any]:
        asked = json.loads(query["query"])
        rows = [row for row in self.tasks.values() if row["project"] == int(query["project"])]
        for one in asked.get("filters", {}).get("items", ()):
            rows = [row for row in rows if row["id"] > one["value"]]
        order = asked["ordering"][0]
        rows.sort(key=lambda row: row[order.split(":")[1]], reverse=order.startswith("-"))
        page, size = int(query["page"]), int(query["page_size"])
        if page > 1 and (page - 1) * size >= len(rows):
            return 404, {"detail": "Invalid page."}
        return 200, {"tasks": rows[(page - 1) * size : page * size], "total": len(rows)}

    def serve(self, asked: Asked) -> object:
        """Answer one request, or fail as told."""
        self.requests.append(f"{asked.method} {asked.path}")
        fault = self.faults.pop(0) if self.faults else "fine"
        if fault == "down":
            return None
        if fault == "error":
            return 502, "<html>bad gateway</html>", JSON
        if fault == "slow":
            self.released.wait(600)
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        access = (asked.key or "").removeprefix("Bearer ")
        status, answer = self.answer(asked.method, asked.path, query, asked.value, access)
        content = json.dumps(answer)
        if fault == "half":
            return status, content[: len(content) // 2], {**JSON, "Content-Length": str(len(content))}
        return None if fault == "silent" else (status, content, JSON)


JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def running() -> Iterator[tuple[FakeLabelStudio, str]]:
    """Yield a server, and its URL."""
    fake = FakeLabelStudio()
    with HttpServer(fake.serve, keeps_open=False) as server:
        yield fake, server.url
        fake.released.set()


def choice(name: str, value: str) -> Row:
    """Return the result of a button."""
    return {"from_name": name, "to_name": "response", "type": "choices", "value": {"choices": [value]}}


def words(name: str, value: str) -> Row:
    """Return the result of a text area."""
    return {"from_name": name, "to_name": "response", "type": "textarea", "value": {"text": [value]}}
