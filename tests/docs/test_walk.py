"""The way of a config through the start of a run: each module is entered once, in the order that the page shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pictures import start as picture

from rftstream.launch import zygote
from tests.docs.reading import ROOT, read
from tests.source import lies_in, sources
from tests.unit.tiny_run import write_run_file

PROGRAM = """
import inspect, json, sys

from rftstream.commands import main

modules, arguments, file = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
calls, visits = [], {}


def module_of(frame):
    return modules.get(frame.f_globals.get("__name__"))


def is_imported(frame):  # the body of a module or a class
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def note(frame, event, argument):
    entered = module_of(frame) if event == "call" else None
    if entered is None or is_imported(frame):
        return
    caller = frame.f_back
    while caller is not None and module_of(caller) is None:
        caller = caller.f_back
    if caller is not None and is_imported(caller):
        return
    above = caller
    while above is not None:
        if module_of(above) == entered:
            return  # it has not been left yet
        above = above.f_back
    arrow = (module_of(caller) if caller is not None else "", entered)
    if arrow not in calls:
        calls.append(arrow)
    if not any(before is caller for before in visits.setdefault(entered, [])):
        visits[entered].append(caller)


sys.setprofile(note)
try:
    main(arguments)
finally:
    sys.setprofile(None)
    with open(file, "w") as out:
        json.dump({"calls": calls, "visits": {name: len(callers) for name, callers in visits.items()}}, out)
"""
"""Runs a command, and writes which of the modules calls which, in the order of the first calls, and from how many
places each is entered. A module is entered when it is called and nothing of it is under way."""


FOLLOWED = ("launch/", "preflight/", "runs/", "workers/")
"""Rooms whose modules are followed: a config is loaded and written at other times, too, and a service is a loop."""


def shown(*processes: str) -> tuple[str, ...]:
    """Return the modules of these processes, with dots, in the order of the picture."""
    return tuple(
        ("" if folder == "workers/" else "rftstream.") + folder.replace("/", ".") + name
        for process in picture.PROCESSES
        if process.name in processes
        for folder, name in process.modules
        if folder in FOLLOWED
    )


def test_the_picture_stands_in_the_page() -> None:
    page = read(ROOT / "docs" / "architecture.md")
    assert "pictures/start.svg" in page
    for process in picture.PROCESSES:
        for folder, name in process.modules:
            place = f"{'' if folder == 'workers/' else 'rftstream/'}{folder}{name}.py"
            assert (ROOT / place).is_file(), place
            assert f"(../{place})" in page or folder in ("workers/", "service/", "service/loops/"), (
                f"{place} is not in the table"
            )


def walk(
    modules: tuple[str, ...], arguments: list[str], tmp_path: Path
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    file = tmp_path / "walk.json"
    names = {module: module.rpartition(".")[2] for module in modules}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names), json.dumps(arguments), str(file)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    return [(caller, entered) for caller, entered in found["calls"]], found["visits"]


def last_names(modules: tuple[str, ...]) -> list[str]:
    return [module.rpartition(".")[2] for module in modules]


@pytest.mark.process
@pytest.mark.slow
def test_a_start_goes_forward_and_enters_each_module_once(tmp_path: Path) -> None:
    if not zygote.is_supported():
        pytest.skip("elsewhere there is no zygote")
    run_file = write_run_file(tmp_path)
    began = shown("run", "zygote")
    calls, visits = walk(began, ["run", str(run_file), "--set", "run.steps=1", "--progress", "none"], tmp_path)
    assert calls == [
        ("", "start"),
        ("start", "plan"),
        ("start", "folder_choice"),
        ("start", "session"),
        ("session", "supervisor"),
        ("supervisor", "zygote"),
    ]
    assert last_names(began) == [entered for _, entered in calls], "as the page shows it"
    assert [visits[name] for name in ("start", "plan", "folder_choice", "session")] == [1, 1, 1, 1]
    worked = shown("worker")
    folder = tmp_path / "runs" / "tiny"
    calls, visits = walk(worked, ["worker", "--run-dir", str(folder), "--role", "explorer"], tmp_path)
    begun, asked = calls[:-1], calls[-1]
    assert begun == [("", "host"), ("host", "plan"), ("host", "services"), ("host", "explorer")]
    assert asked == ("explorer", "services"), "what the context offers is asked for while the role is built"
    assert last_names(worked) == [entered for _, entered in begun], "as the page shows it"
    assert [visits[name] for name in ("host", "plan")] == [1, 1]


def test_imports_go_the_same_way() -> None:
    """What is entered later knows nothing of what was entered before."""
    order = [module for module in shown("run", "zygote", "worker") if module.startswith("rftstream.launch.")]
    assert order == [f"rftstream.launch.{name}" for name in ("start", "session", "supervisor", "zygote", "host")]
    wrong = [
        str(one)
        for source in sources("rftstream/launch")
        if source.module in order
        for one in source.imports
        for earlier in order[: order.index(source.module)]
        if lies_in(one.name, earlier)
    ]
    assert not wrong, "\n".join(wrong)
