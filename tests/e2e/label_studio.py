"""The real Label Studio on loopback, in an environment and a folder of its own, and people who use it."""

from __future__ import annotations

import http.cookiejar
import json
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.loopback import free_ports
from tests.unit.environments.hosts.venvs import interpreter

PACKAGE = "label-studio==1.23.2"
START_S = 900.0
"""It makes a database at first, which takes minutes on a machine that has much else to do."""
ACCESS_S = 2
"""Seconds that an access token lives here; 300 elsewhere."""

PROGRAM = f"""
from datetime import timedelta
from label_studio import server

set_up = server._setup_env


def set_up_with_short_tokens():
    set_up()
    from rest_framework_simplejwt.tokens import AccessToken

    AccessToken.lifetime = timedelta(seconds={ACCESS_S})


server._setup_env = set_up_with_short_tokens
server.main()
"""


class RealLabelStudio:
    """A server with one user, `ada`. `start` and `stop` may be called again; its data stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = interpreter(PACKAGE)
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.started_in_s = 0.0

    def start(self) -> None:
        """Start it, and return when it answers."""
        environment = {
            **os.environ,
            "LABEL_STUDIO_BASE_DATA_DIR": str(self._folder / "data"),
            "LATEST_VERSION_CHECK": "false",
            "COLLECT_ANALYTICS": "false",
            "SENTRY_DSN": "",
            "FRONTEND_SENTRY_DSN": "",
        }
        words = ["start", "--no-browser", "--internal-host", "127.0.0.1", "--port", str(self.port)]
        words += ["--username", "ada@example.org", "--password", "pa55-word-x"]
        begun = time.monotonic()
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, str(self._program), *words],
                env=environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        while not self._answers():
            assert self._process.poll() is None, self.tail()
            assert time.monotonic() - begun < START_S, self.tail()
            time.sleep(0.5)
        self.started_in_s = time.monotonic() - begun

    def stop(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def tail(self) -> str:
        """Return the end of what it said."""
        return (self._folder / "server.log").read_text(errors="replace")[-3000:]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Person:
    """Somebody who is logged in."""

    def __init__(self, url: str, email: str, *, is_new: bool = False) -> None:
        self._url = url
        self._jar = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self._jar))
        page = f"{url}/user/{'signup' if is_new else 'login'}/"
        self._open(urllib.request.Request(page))
        form = {"email": email, "password": "pa55-word-x", "csrfmiddlewaretoken": self._csrf()}
        self._open(
            urllib.request.Request(page, urllib.parse.urlencode(form).encode(), {"Referer": url}),
        )
        self.user = int(self.call("GET", "/api/current-user/whoami")["id"])

    def _csrf(self) -> str:
        return next(str(one.value) for one in self._jar if one.name == "csrftoken")

    def _open(self, request: urllib.request.Request) -> bytes:
        with self._opener.open(request, timeout=120) as answer:
            return bytes(answer.read())

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return what the server answers."""
        headers = {"Content-Type": "application/json", "X-CSRFToken": self._csrf(), "Referer": self._url}
        data = None if body is None else json.dumps(body).encode()
        text = self._open(urllib.request.Request(self._url + path, data, headers, method=method))
        return json.loads(text) if text else None

    def token(self) -> str:
        """Return a new personal access token."""
        return str(self.call("POST", "/api/token/", {})["token"])

    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return all tasks of all projects, by question; AssertionError if a question has two."""
        found: dict[str, dict[str, Any]] = {}
        for project in self.call("GET", "/api/projects/?page_size=100")["results"]:
            path = f"/api/tasks?project={project['id']}&fields=all&page=1&page_size=500"
            for task in self.call("GET", path)["tasks"]:
                assert task["data"]["question"] not in found, task["data"]["question"]
                found[task["data"]["question"]] = task
        return found

    def annotate(self, task: int, *results: dict[str, Any]) -> int:
        """Return the id of a new annotation."""
        made = self.call("POST", f"/api/tasks/{task}/annotations/", {"result": list(results), "lead_time": 3.5})
        return int(made["id"])

    def edit(self, annotation: int, *results: dict[str, Any]) -> None:
        """Change what an annotation says."""
        self.call("PATCH", f"/api/annotations/{annotation}/", {"result": list(results)})

    def delete(self, annotation: int) -> None:
        """Delete an annotation."""
        self.call("DELETE", f"/api/annotations/{annotation}/")
