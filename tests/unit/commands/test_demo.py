"""The demo: what it holds out, when it opens a browser; and whole, in few steps, by its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from rftstream.commands import demo, studio
from rftstream.contracts.tasks import Problem
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from rftstream.launch.sessions.demo import RUN_FILE, demo_config
from tests.e2e.workplace import COMMAND, LONG_S

FEW_STEPS = '[{ name = "show", algorithm = "sft", steps = 1 }, { algorithm = "grpo", steps = 1 }]'
MOST_BYTES = 60_000_000


def test_nothing_that_is_held_out_is_shown_or_practised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = demo_config(None, 0)
    assert Path(config.base) == tmp_path, "modules of the package are nobody's own"
    sections = (config.tasksets["sums"], config.evaluations["held-out"])
    tasksets = [open_taskset("any", section, config) for section in sections]
    trained, held_out = ({_asked(one.problem(i)) for i in range(len(one))} for one in tasksets)
    rows = map(json.loads, RUN_FILE.with_name("demonstrations.jsonl").read_text().splitlines())
    shown = {row["prompt"]: row["completion"] for row in rows}
    assert not held_out & trained
    assert shown.keys() <= trained
    assert all(sum(map(int, re.findall(r"\d", prompt))) == int(answer) for prompt, answer in shown.items())
    assert (len(shown), len(trained), len(held_out)) == (40, 65, 16), "as the introduction says"


def _asked(problem: Problem) -> str:
    return problem.messages[0].content


@pytest.mark.parametrize(
    ("is_terminal", "variables", "opens"),
    [
        (True, {"DISPLAY": ":0"}, True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (True, {}, False),
        (True, {"DISPLAY": ":0", "CI": "true"}, False),
        (False, {"DISPLAY": ":0"}, False),
    ],
)
def test_when_it_opens_a_browser(
    is_terminal: bool, variables: dict[str, str], opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.platform", "linux")
    assert demo.has_browser() == opens


def test_the_studio_takes_another_port_if_its_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def serve(runs: object, *, port: int, **more: object) -> None:
        asked.append(port)
        if port:
            raise ConfigError("--port: Address already in use")

    monkeypatch.setattr("rftstream.studio.server.serve", serve)
    studio.serve_here([Path("runs/demo")], ready=str)
    assert asked == [studio.PORT, 0]


def demo_in(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RFTSTREAM")} | variables
    return subprocess.run([COMMAND, "demo", "--progress", "none"], capture_output=True, text=True, timeout=LONG_S,
                          stdin=subprocess.DEVNULL, check=False, cwd=folder, env=env)  # fmt: skip


@pytest.mark.slow
@pytest.mark.process
def test_it_ends_with_a_table_and_the_next_step(tmp_path: Path) -> None:
    done = demo_in(tmp_path, RFTSTREAM__STAGES=FEW_STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("16 more are held out", "never trained on", "random", "practised", "What to do next:",
                 "rftstream studio runs/demo", "disk: "):  # fmt: skip
        assert text in done.stdout
    assert "http://" not in done.stdout, "nobody looks at a screen"
    assert re.search(r"^right: \d+%, expected 90%", done.stderr, re.MULTILINE), "so few steps teach nothing"


@pytest.mark.long
@pytest.mark.process
def test_it_learns_to_add(tmp_path: Path) -> None:
    done = demo_in(tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    found = re.search(r"^evaluation held-out \S+ -> (\S+) ", done.stdout, re.MULTILINE)
    assert found is not None and float(found[1]) > 0.9
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < MOST_BYTES
