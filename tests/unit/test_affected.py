"""`make ready` runs the tests that see a change: which ones, by a checkout of a few files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.affected import ROOT, Sources, choose, read_durations

FILES = {
    "rftstream/rewards/__init__.py": 'REWARDS = {"math": "rftstream.rewards.math:MathReward"}\n',
    "rftstream/rewards/math.py": "class MathReward: ...\n",
    "rftstream/rewards/open.py": "from rftstream.rewards import (  # the table\n    REWARDS,\n)\n",
    "rftstream/roles/buffer/step.py": "import rftstream.rewards.open as opening, json\n",
    "tests/conftest.py": "",
    "tests/unit/test_math.py": "def test_it() -> None:\n    from rftstream.rewards.math import MathReward\n",
    "tests/unit/test_open.py": "from rftstream.rewards import open\n\ndef test_one(): ...\ndef test_two(): ...\n",
    "tests/flow/test_buffer.py": "from tests.flow import scene\n",
    "tests/flow/scene.py": "from rftstream.roles.buffer.step import Step\n",
    "tests/docs/test_files.py": 'PAGE = "alerts.yml"\n',
    "tests/docs/examples/my_rewards.py": "",
    "tests/docs/test_own.py": 'NAME = "my_rewards:closeness"\n',
    "tests/broker/test_far.py": "import rftstream.rewards.math\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(tmp_path)


def seen(sources: Sources, *changed: str) -> dict[str, int]:
    return dict(choose(sources.distances(changed), {}, 1e9).files)


def test_imports_and_tables_of_strings_are_followed(sources: Sources) -> None:
    assert seen(sources, "rftstream/rewards/math.py") == {
        "tests/unit/test_math.py": 1, "tests/unit/test_open.py": 2, "tests/flow/test_buffer.py": 5,
    }  # fmt: skip


def test_a_test_of_the_same_name_is_near(sources: Sources) -> None:
    assert seen(sources, "rftstream/roles/buffer/step.py") == {"tests/flow/test_buffer.py": 1}


def test_a_changed_test_is_nearest_and_a_conftest_is_seen_by_all_below(sources: Sources) -> None:
    assert seen(sources, "tests/unit/test_math.py") == {"tests/unit/test_math.py": 0}
    assert set(seen(sources, "tests/conftest.py").values()) == {1}


def test_what_is_no_module_is_seen_by_who_names_it(sources: Sources) -> None:
    assert seen(sources, "deploy/prometheus/alerts.yml") == {"tests/docs/test_files.py": 0}
    assert seen(sources, "tests/docs/examples/my_rewards.py") == {"tests/docs/test_own.py": 1}
    assert seen(sources, "rftstream/rewards/gone.py", "LICENSE") == {}


def test_the_nearest_and_shortest_are_taken_until_the_seconds_are_used_up(sources: Sources) -> None:
    durations = {
        "tests/unit/test_math.py::test_it": 4.0, "tests/unit/test_open.py::test_one": 5.0,
        "tests/unit/test_open.py::test_two": 1.0, "tests/elsewhere.py::test_it": 1.0,
    }  # fmt: skip
    choice = choose(sources.distances(["rftstream/rewards/math.py"]), durations, 7.5)
    assert choice.taken == {
        "tests/unit/test_math.py": 4.0, "tests/unit/test_open.py::test_two": 1.0, "tests/flow/test_buffer.py": 2.0,
    }  # fmt: skip
    assert choice.left == {"tests/unit/test_open.py::test_one": 5.0}
    assert choice.to_text() == (
        "3 files of tests see the change; 3 run, 7 s of tests\n"
        "left out for make test: 5 s of tests in tests/unit/test_open.py 5 s"
    )


def test_durations_are_those_of_functions_that_are_still_there(sources: Sources, tmp_path: Path) -> None:
    path = tmp_path / "durations"
    assert read_durations(path) == {}
    path.write_text(
        json.dumps({"tests/a.py::test_it[1]": 1.0, "tests/a.py::test_it[x[2]]": 2.5, "tests/a.py::B::c": 1})
    )
    assert read_durations(path) == {"tests/a.py::test_it": 3.5, "tests/a.py::B::c": 1.0}
    assert sources.has("tests/unit/test_open.py::test_two")
    assert not sources.has("tests/unit/test_open.py::test_three")


@pytest.mark.slow
def test_every_room_of_the_package_is_seen_by_some_test() -> None:
    sources = Sources(ROOT)
    for room in sorted(path.parent for path in (ROOT / "rftstream").glob("*/__init__.py")):
        modules = (path.relative_to(ROOT).as_posix() for path in sorted(room.rglob("*.py")))
        assert any(seen(sources, module) for module in modules), room
