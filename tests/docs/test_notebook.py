"""examples/first_run.ipynb: it runs from its first cell to its last, and is kept without what it printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from tests.docs.following import FEW_STEPS
from tests.docs.reading import ROOT

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
LONG_S = 1800


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def write_files(folder: Path) -> Path:
    """Write the files of the notebook's run, as its first cells do. Return the folder in which they are."""
    with chdir(folder):
        names: dict[str, object] = {}
        for cell in cells(NOTEBOOK, "code")[:2]:
            exec(compile(source(cell), NOTEBOOK.name, "exec"), names)
    return folder / "first-run"


def test_it_is_kept_without_outputs() -> None:
    code = cells(NOTEBOOK, "code")
    assert len(code) > 5
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.sampled(2, "installed")
@pytest.mark.heavy("a kernel of its own trains a real model")
@pytest.mark.process
@pytest.mark.slow
def test_it_runs_as_it_is_save_for_fewer_steps(tmp_path: Path) -> None:
    notebook = Path(shutil.copy(NOTEBOOK, tmp_path))
    command = [Path(sys.executable).with_name("jupyter-execute"), "--inplace", "--allow-errors", notebook]
    own = {"IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **FEW_STEPS, **own}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    printed = {}
    for cell in cells(notebook, "code"):
        assert not [one for one in cell["outputs"] if one["output_type"] == "error"], source(cell)
        printed[source(cell)] = json.dumps(cell["outputs"])

    def said_by(part: str) -> str:
        [found] = [outputs for cell, outputs in printed.items() if part in cell]
        return found

    assert "3 steps in" in said_by("rftstream.run(")
    assert "image/png" in said_by("run.plot(")
    assert "<table>" in said_by("hardest") and "dataframe" in said_by("groupby")
    assert 'class=\\"t ' in said_by("advantage")
    assert "balanced" in said_by("run.audit()") and "batch" in said_by("run.trace(")
    assert "of 25 sums are right" in said_by("num_right")
    assert "import subprocess" not in "".join(printed)
