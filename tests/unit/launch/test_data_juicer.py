"""`data import`: a recipe runs in an environment of its own, and what it exports appears whole or not at all.

The environment here has a Data-Juicer of a few lines, which does what the recipe says: exports, fails, exports nothing,
or hangs. The recipes are JSON, which is YAML as well. The long test has the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError
from rftstream.integrations import data_juicer
from rftstream.integrations.data_juicer import VERSION, DataJuicerFailed, import_data, make_environment
from tests.commands import call
from tests.configs import small_run

FAKE = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("config", "dataset_path", "export_path", "work_dir"):
    parser.add_argument("--" + name)
args = parser.parse_args()
with open(args.config) as file:
    recipe = json.load(file)
step = recipe["process"][0]
os.makedirs(args.work_dir)
if "hang" in step:
    with open(step["hang"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
if "fail" in step:
    sys.exit(step["fail"])
assert not [name for name in os.environ if "SECRET" in name or name == "PYTHONPATH"], "nothing of ours"
with open(args.dataset_path) as file:
    rows = [json.loads(line) for line in file]
rows = [row for row in rows if len(row["text"]) <= step["max"]]
if step.get("writes", True):
    with open(args.export_path, "w") as file:
        file.write("".join(json.dumps(row) + chr(10) for row in rows))
    with open(args.export_path.replace(".jsonl", "_stats.jsonl"), "w") as file:
        file.write("{}")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    package = site / "data_juicer" / "tools"
    package.mkdir(parents=True)
    (package / "process_data.py").write_text(FAKE)
    info = site / "py_data_juicer-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: py-data-juicer\nVersion: 1.2.3\n")
    return folder / "bin" / "python"


def write(folder: Path, step: dict[str, Any] | None, num: int = 20) -> Path:
    rows = [{"text": "x" * (1 + number % 10), "answer": str(number)} for number in range(num)]
    (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {"dataset_path": "raw.jsonl", "export_path": "ignored.jsonl"}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe if step is None else {**recipe, "process": [step]}))
    return path


def imported(folder: Path, recipe: Path, python: Path | None, **more: Any) -> data_juicer.Imported:
    return import_data(recipe, folder / "out", python=python, say=lambda text: None, **more)


@pytest.mark.slow
def test_what_comes_out_is_a_taskset_with_its_digest(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "key")
    recipe = write(tmp_path, {"max": 4})
    done = imported(tmp_path, recipe, python)
    assert (done.report["in"], done.report["out"], done.report["data_juicer"]) == (20, 8, "1.2.3")
    assert sorted(os.listdir(tmp_path / "out")) == ["data.jsonl", "recipe.yaml", "report.json"]
    assert sorted(os.listdir(tmp_path)) == ["out", "raw.jsonl", "recipe.yaml"]
    config = small_run(
        run={"name": "p", "steps": 1},
        tasksets={"t": {"source": f"jsonl:{tmp_path}/out/data.jsonl", "columns": {"prompt": "text"}}},
    )  # fmt: skip
    assert len(open_taskset("t", config.tasksets["t"], config)) == 8
    assert 'columns = { prompt = "text" }' in done.to_text()

    assert not imported(tmp_path, recipe, python).is_new
    write(tmp_path, {"max": 4}, num=30)
    with pytest.raises(ConfigError, match="holds something else"):
        imported(tmp_path, recipe, python)


@pytest.mark.parametrize(
    ("step", "kind", "said"),
    [
        ({"fail": "no operator 'foo'"}, DataJuicerFailed, "Data-Juicer ended with 1:\nno operator 'foo'"),
        ({"max": 0}, ConfigError, "nothing is left"),
        ({"max": 9, "writes": False}, ConfigError, "nothing was exported"),
        (None, ConfigError, "no list `process`"),
    ],
)
def test_what_fails_is_told_and_leaves_nothing(
    tmp_path: Path, python: Path, step: dict[str, Any] | None, kind: type[Exception], said: str
) -> None:
    recipe = write(tmp_path, step)
    with pytest.raises(kind, match=said):
        imported(tmp_path, recipe, python)
    assert sorted(os.listdir(tmp_path)) == ["raw.jsonl", "recipe.yaml"]


def test_an_interpreter_that_does_not_answer_is_named(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_juicer, "ASK_S", 0.0)
    with pytest.raises(DataJuicerFailed, match="no answer within 0 s"):
        imported(tmp_path, write(tmp_path, {"max": 4}), python)


def test_two_who_want_the_environment_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text(
        f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\n[ "$1" = venv ] || exit 0\nfor last; do :; done\n'
        'mkdir -p "$last/bin" && touch "$last/bin/python"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setattr(data_juicer, "_uv", lambda: str(uv))
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: make_environment(lambda text: None, tmp_path / "env"), range(2)))
    assert made == [tmp_path / "env" / "bin" / "python"] * 2
    assert (tmp_path / "calls").read_text().split() == ["venv", "pip"]


def test_bad_input_is_named(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write(tmp_path, {"max": 4})
    with pytest.raises(ConfigError, match="is the environment of rftstream"):
        imported(tmp_path, recipe, Path(sys.executable))
    with pytest.raises(ConfigError, match="no such program"):
        imported(tmp_path, recipe, tmp_path / "python")
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False, symlinks=True)
    with pytest.raises(ConfigError, match="has no Data-Juicer"):
        imported(tmp_path, recipe, bare / "bin" / "python")
    with pytest.raises(ConfigError, match=r"no such file, expected the data"):
        imported(tmp_path, recipe, python, dataset=tmp_path / "nowhere.jsonl")
    (tmp_path / "raw.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"dataset_path 'raw.jsonl': no such file; name it by --from"):
        imported(tmp_path, recipe, python)
    refused = call("data", "import", "--recipe", tmp_path / "none.yaml", "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert "none.yaml: no such file" in refused.stderr
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(ConfigError, match="uv: not found"):
        make_environment(lambda text: None, tmp_path / "new")


@pytest.mark.slow
def test_killed_it_takes_data_juicer_with_it_and_can_be_done_again(tmp_path: Path, python: Path) -> None:
    marker = tmp_path / "hangs"
    os.mkfifo(marker)
    recipe = write(tmp_path, {"hang": str(marker)})
    command = [sys.executable, "-m", "rftstream", "data", "import", "--recipe", str(recipe), "--python", str(python),
               "--out", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        pid = int(marker.read_text())  # waits until it is there
        descriptor = os.pidfd_open(pid)
    finally:
        process.kill()
        process.wait()
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000), "Data-Juicer outlives its caller"
    os.close(descriptor)
    assert not (tmp_path / "out").exists()
    write(tmp_path, {"max": 4})
    assert imported(tmp_path, recipe, python).report["out"] == 8
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_real_recipe_over_a_thousand_lines(tmp_path: Path) -> None:
    """Downloads Data-Juicer by uv, unless $RFTSTREAM_DATA_JUICER names an interpreter that has it."""
    named = os.environ.get("RFTSTREAM_DATA_JUICER")
    python = Path(named) if named else make_environment(lambda text: None, tmp_path / "environment")
    rows = [{"text": f"What is {number % 900} plus one? " + "spam " * (40 * (number % 10 == 0)), "answer": str(number)}
            for number in range(1000)]  # fmt: skip
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "project_name: sums\ndataset_path: raw.jsonl\nexport_path: out.jsonl\nnp: 1\ntext_keys: text\nprocess:\n"
        "  - text_length_filter:\n      min_len: 10\n      max_len: 100\n  - document_deduplicator: {}\n"
    )
    done = imported(tmp_path, recipe, python)
    expected = {row["text"] for row in rows if len(row["text"]) <= 100}
    with (tmp_path / "out" / "data.jsonl").open() as file:
        assert {json.loads(line)["text"] for line in file} == expected
    assert (done.report["in"], done.report["out"]) == (1000, len(expected))
    assert done.report["data_juicer"] == VERSION or named
