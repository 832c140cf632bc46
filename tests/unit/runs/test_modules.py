"""Own modules: which a run makes use of, which of two is taken, and what has changed in them before a resume."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.preflight.plan import Purpose, plan
from rftstream.runs.folder import RunFolder
from rftstream.runs.modules import changes_of_modules, edited_modules, find_modules, other_code, write_modules
from tests.commands import call, called

RUN: dict[str, Any] = {
    "run": {"name": "own", "steps": 2},
    "model": {"path": "fake"},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
    "tasksets": {"sums": {"source": "arithmetic", "reward": "own_rewards:score"}},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the run file, with a reward and what it imports; commands are given in another one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine = tmp_path / "mine"
    (mine / "own_rewards.py").write_text("import json\nimport pytest\nfrom own_part import by\ndef score(completion):\n"
                                         "    return by.points(completion)\n")  # fmt: skip
    (mine / "own_part").mkdir()
    (mine / "own_part" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (mine / "own_part" / "by.py").write_text("from . import more\ndef points(text): return 1.0\n")
    (mine / "own_part" / "more.py").write_text("WORTH = 1\n")
    return mine


def config(place: Path, **tasksets: Any) -> RunConfig:
    made = loader.from_dict({**RUN, "base": str(place), **({"tasksets": tasksets} if tasksets else {})})
    plan(made, Purpose.join)
    return made


def warnings_of(config: RunConfig) -> list[str]:
    return [module.warning for module in find_modules(config) if module.warning is not None]


def test_what_is_named_is_found_with_what_it_imports_and_nothing_is_imported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)  # another test may have imported its own
    found = {one.name: one.file for one in find_modules(config(place))}
    assert found == {
        "own_rewards": place / "own_rewards.py",
        "own_part": place / "own_part" / "__init__.py",
        "own_part.by": place / "own_part" / "by.py",
        "own_part.more": place / "own_part" / "more.py",
    }
    assert "own_rewards" not in sys.modules
    built_in = config(place, sums={"source": "arithmetic", "reward": "exact"})
    assert find_modules(built_in) == []
    source = config(place, sums={"source": "own_rewards:Problems", "reward": "missing_module:score"})
    assert "own_rewards" in {one.name for one in find_modules(source)}


@pytest.mark.parametrize("entry", [None, "", "."])
def test_the_module_beside_the_run_file_is_taken_and_another_one_in_the_current_folder_is_told(
    place: Path, entry: str | None
) -> None:
    """Also where Python itself looks in the current folder first, as for `python -m`."""
    sys.path[:] = [one for one in sys.path if Path(one).resolve() != Path.cwd()]
    if entry is not None:
        sys.path.insert(0, entry)
    before = [Path(one).resolve() for one in sys.path]
    other = place.parent / "other"
    other.mkdir()
    (other / "own_rewards.py").write_text("def score(completion): return 2.0\n")
    for base in (other, place, other, place):
        assert warnings_of(config(base)) == []
        assert [one.file.parent for one in find_modules(config(base)) if one.name == "own_rewards"] == [base]
    (Path.cwd() / "own_rewards.py").write_bytes((place / "own_rewards.py").read_bytes())
    assert warnings_of(config(place)) == [], "a copy hides nothing"
    (Path.cwd() / "own_rewards.py").write_text("def score(completion): return 0.0\n")
    (line,) = warnings_of(config(place))
    assert line == (
        f"own_rewards: taken from {place / 'own_rewards.py'}; own_rewards.py has other code, which is not used; "
        "remove or rename one of them"
    )
    after = [Path(one).resolve() for one in sys.path]
    assert [one for one in after if one in before] == before, "whatever is installed stays where it was"


def test_code_that_changed_since_the_last_start_is_told(place: Path, tmp_path: Path) -> None:
    folder, made = RunFolder(tmp_path), config(place)
    assert changes_of_modules(made, folder) == [], "of a run that recorded nothing"
    write_modules(made, folder)
    assert changes_of_modules(made, folder) == edited_modules(folder) == []
    (place / "own_part" / "more.py").write_text("WORTH = 2\n")
    (line,) = edited_modules(folder)  # as `status` says it of a live run
    assert line.startswith(f"own_part.more in {place / 'own_part' / 'more.py'}, since the run was started: ctrl-C")
    (line,) = changes_of_modules(made, folder)
    assert line.startswith(f"changed: the code of own_part.more in {place / 'own_part' / 'more.py'}; it is taken from")
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    write_modules(made, other)
    (line,) = other_code(folder, other)  # as `compare` says it
    assert re.fullmatch("code of own_part.more [0-9a-f]{8} -> [0-9a-f]{8}", line)
    write_modules(made, folder)
    assert changes_of_modules(made, folder) == other_code(folder, other) == []
    (place / "own_rewards.py").rename(Path.cwd() / "own_rewards.py")
    assert changes_of_modules(made, folder) == ["changed: own_rewards is taken from own_rewards.py, with the same code"]
    (Path.cwd() / "own_rewards.py").write_text("def score(completion): return 0.0\n")
    (line,) = changes_of_modules(made, folder)
    assert f"own_rewards.py, before it was {place / 'own_rewards.py'}; it is taken from now on" in line
    folder.modules_file.write_text("[")
    assert changes_of_modules(made, folder) == []


def test_check_prints_the_path_of_every_own_module_and_try_takes_the_same(place: Path) -> None:
    (place / "own_part" / "__init__.py").write_text("")
    file = place / "own.toml"
    file.write_text(loader.to_toml(config(place)))
    (Path.cwd() / "own_part.py").write_text("from types import SimpleNamespace\nby = SimpleNamespace(points=len)\n")
    report = called("check", file)
    paths = {one["name"]: one["file"] for one in report["modules"]}
    assert paths == {
        "own_rewards": str(place / "own_rewards.py"),
        "own_part": str(place / "own_part" / "__init__.py"),
        "own_part.by": str(place / "own_part" / "by.py"),
        "own_part.more": str(place / "own_part" / "more.py"),
    }
    told = f"own_part: taken from {place / 'own_part' / '__init__.py'}; own_part.py has other code"
    assert any(warning.startswith(told) for warning in report["warnings"])
    tried = call("try", file)
    assert tried.exit_code == 0, tried.output
    assert tried.stderr.startswith(told)
    lines = [line.split() for line in call("check", file, "-v").stdout.splitlines()]
    assert ["own_rewards", str(place / "own_rewards.py")] in lines
