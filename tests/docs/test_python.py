"""docs/python.md: its examples run in their order on a run, and what is public keeps its signatures."""

from __future__ import annotations

import re
from contextlib import chdir

import pytest
from pages import python_api

import rftstream
from tests.docs.following import FEW_STEPS
from tests.docs.reading import ROOT, blocks, read
from tests.docs.test_notebook import write_files
from tests.e2e.workplace import Workplace
from tests.warm import MARK

PAGE = ROOT / "docs" / "python.md"


def section(title: str) -> list[str]:
    """Return the blocks of Python of a section."""
    text = read(PAGE).partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [block.text for block in blocks(PAGE, "python") if block.text in text]


@pytest.mark.sampled(2, "pages")
@pytest.mark.heavy("a real model is trained, and trains on")
@pytest.mark.process
@pytest.mark.slow
def test_the_examples_of_looking_run_in_their_order(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_files(place.folder)
    done = place.call("run", str(folder / "run.toml"), env=FEW_STEPS)
    assert done.code == 0, done.err
    with (
        rftstream.open(folder / "runs" / "first") as over,
        pytest.raises(rftstream.ConfigError, match="is finished wi"),
    ):
        over.start()
    monkeypatch.setenv(MARK, str(place.folder))  # so that what `start` starts ends with the test
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names: dict[str, object] = {}
    with chdir(folder):
        for text in section("Look"):
            exec(compile(text, "docs/python.md", "exec"), names)
        run = names["run"]
        assert isinstance(run, rftstream.Run)
        run.close()
    assert {"good.jsonl", "curves.png"} <= {path.name for path in folder.iterdir()}


def test_public_names_keep_their_signatures() -> None:
    kept, found = python_api.FILE.read_text(encoding="utf-8").splitlines(), python_api.public_lines()
    gone = sorted(set(kept) - set(found))
    assert not gone, (
        "gone or changed, though rftstream/__init__.py promises that it stays:\n  " + "\n  ".join(gone)
        + "\nGive it back, with defaults for what is new. If it has to go: warn for a release, say it in CHANGELOG.md, "
        f"and then remove the line from {python_api.FILE.relative_to(ROOT)}"
    )  # fmt: skip
    assert set(found) == set(kept), "python docs/generate.py adds the new ones"
    assert set(rftstream.PUBLIC) == set(rftstream.__all__) - {"__version__"}
    assert all(hasattr(rftstream, name) for name in rftstream.PUBLIC)
    with pytest.raises(AttributeError, match=r"no attribute 'opne'; it has .*open"):
        rftstream.opne  # noqa: B018


def test_what_the_page_names_is_public() -> None:
    known = {re.split(r"[(:]", line)[0] for line in python_api.public_lines()}
    named = {f"Run.{name}" for name in re.findall(r"`run\.(\w+)|\brun\.(\w+)\(", read(PAGE)) for name in name if name}
    assert named - known <= {"Run.steps=100000"}, named - known
