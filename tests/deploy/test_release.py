"""What is released: wheel and sdist have all files and work where nothing else of ours is; tag and changelog agree."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.deploy.conftest import ROOT, read_yaml
from tests.deploy.dockerfile import CACHE_IS_MISSING, UV
from tests.suite.each import each

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PACKAGES = ("rftstream", "workers", "schemas")
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-26\n\n### Added\n\n- This.\n\n## [1.2.2]\n\nOld.\n"
LONG_S = 1200


def uv(*words: str | Path, cwd: Path | None = None, **more: str) -> str:
    """Take packages from the cache, and from the index only where the cache lacks one; return what was printed."""
    constraints = str(ROOT / "constraints.txt")
    for offline in ("1", "0"):
        settings = {"UV_OFFLINE": offline, "UV_BUILD_CONSTRAINT": constraints, "UV_SYSTEM_CERTS": "1", **more}
        done = subprocess.run(
            [UV, *words], capture_output=True, text=True, timeout=LONG_S, env=os.environ | settings, cwd=cwd,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if CACHE_IS_MISSING not in done.stderr.lower():
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def first_contact(rftstream: Path, folder: Path) -> None:
    """From an empty folder to a model, by a command that knows no checkout."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"LANG": "C.UTF-8"}
    folder.mkdir()
    demo = ["demo", "--no-open", "--progress", "none"]
    for words in (demo, ["init", "--steps", "1"], ["check"], ["run", "--json", "--progress", "none"]):
        done = subprocess.run(
            [rftstream, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=LONG_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    assert json.loads(done.stdout)["version"] == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", folder, ROOT)
    return folder


@pytest.mark.slow
def test_wheel_and_sdist_have_the_files_of_the_tree(built: Path, tmp_path: Path) -> None:
    [from_sdist], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    uv("build", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("*.whl")
    found = digests(wheel)
    assert digests(from_sdist) == found
    listed = subprocess.run(["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    tree = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert len(tree) > 900
    assert tree <= set(found)
    assert {name for name in found if not name.startswith("rftstream-")} <= tree | _not_yet_known_to_git()
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops >= {*PACKAGES, "examples", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
    assert not tops & {"tests", ".venv", "docs"}


def _not_yet_known_to_git() -> set[str]:
    words = ["git", "ls-files", "-z", "--others", "--exclude-standard", *PACKAGES]
    return set(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"))


@pytest.mark.sampled(2, "installed")
@pytest.mark.heavy("it installs PyTorch into an empty environment")
@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """The packages that it requires are those that scripts/setup has put into uv's cache."""
    [wheel] = built.glob("*.whl")
    python = make_venv(tmp_path / "venv")
    uv("pip", "install", "--quiet", "--python", python, "--constraints", ROOT / "constraints.txt", wheel)
    first_contact(python.with_name("rftstream"), tmp_path / "empty")


@pytest.mark.long
def test_uvx_shows_the_demo(built: Path, tmp_path: Path) -> None:
    """As docs/first-run.md has it, by somebody who has nothing but uv; then a command that the demo names, as named."""
    [wheel] = built.glob("*.whl")
    (home := tmp_path / "home").mkdir()
    given = {
        "HOME": str(home),
        "UV_CACHE_DIR": uv("cache", "dir").strip(),
        "UV_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    [command] = re.findall(r"^uvx (--from .*)$", (ROOT / "docs" / "first-run.md").read_text(), re.MULTILINE)
    words = shlex.split(command.replace("dist/rftstream-*.whl", str(wheel)))
    shown = uv("tool", "run", *words, cwd=home, **given)
    [means] = re.findall(r"^ *right((?: +\d+%)+) ", shown, re.MULTILINE)
    first, *_, last = (int(mean.rstrip("%")) for mean in means.split())
    assert first < 50 < last, shown
    [again] = re.findall(r"^  uvx (.* trace .*?)  ", shown, re.MULTILINE)
    assert "batch:89" in uv("tool", "run", *shlex.split(again), cwd=home, **given)
    assert {path.name for path in home.iterdir() if not path.name.startswith(".")} == {"runs"}


def make_venv(folder: Path) -> Path:
    uv("venv", "--quiet", "--python", sys.executable, folder)
    return folder / "bin" / "python"


# ------------------------------------------------------------------------------------------------ tag and changelog


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "release"))


def test_notes_are_the_part_of_the_version(release: dict[str, Any]) -> None:
    assert release["notes"]("v1.2.3", "1.2.3", CHANGELOG) == "### Added\n\n- This."


@each(
    ("tag", "version", "changelog", "said"),
    [
        ("1.2.3", "1.2.3", CHANGELOG, "expected v and a version"),
        ("v1.2.4", "1.2.3", CHANGELOG, "version.py says 1.2.3"),
        ("v1.2.2", "1.2.2", CHANGELOG, r"is \[1.2.3\], expected \[1.2.2\]"),
        ("v1.2.4", "1.2.4", CHANGELOG, r"is \[1.2.3\], expected \[1.2.4\]"),
        ("v1.2.3", "1.2.3", CHANGELOG.replace(" - 2026-11-26", ""), "YYYY-MM-DD"),
        ("v1.2.3", "1.2.3", CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- That.\n"), "is not empty"),
        ("v1.2.3", "1.2.3", CHANGELOG.replace("### Added\n\n- This.\n", ""), "nothing is said"),
        ("v1.2.3", "1.2.3", "# Changelog\n\n## [Unreleased]\n", "is none"),
    ],
)
def test_what_differs_is_said(release: dict[str, Any], tag: str, version: str, changelog: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        release["notes"](tag, version, changelog)


def test_the_command_ends_with_1(release: dict[str, Any]) -> None:
    command = [sys.executable, "-I", str(ROOT / "scripts" / "release")]
    done = subprocess.run([*command, "v0.0.0"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "version.py says" in done.stderr
    assert subprocess.run(command, capture_output=True).returncode == 2


# ---------------------------------------------------------------------------------------------------- the workflow


WORKFLOWS = sorted(WORKFLOW.parent.glob("*.yml"))


@each("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_is_valid_and_calls_what_there_is(file: Path) -> None:
    vendored = files("check_jsonschema") / "builtin_schemas" / "vendor" / "github-workflows.json"
    schema = json.loads(vendored.read_text(encoding="utf-8"))
    workflow = json.loads(json.dumps({str(key): value for key, value in read_yaml(file).items()}))
    workflow["on"] = workflow.pop("True")  # what YAML 1.1 makes of it
    jsonschema.Draft7Validator(schema).validate(workflow)
    assert workflow["permissions"] == {"contents": "read"}
    text = file.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?m)(?:run:|-) make ([a-z-]+)", text)) <= targets
    assert all("@v" in action for action in re.findall(r"uses: (\S+)", text))


def test_the_workflow_pins_actions_and_gives_few_rights() -> None:
    workflow = read_yaml(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    targets: set[str] = set()
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 120
        rights = set(job.get("permissions", {})) - {"contents"}
        assert rights <= {"publish": {"id-token"}, "images": {"packages"}}.get(name, set())
        needed = {job["needs"]} if isinstance(job.get("needs"), str) else set(job.get("needs", []))
        assert needed >= ({"build", "test"} if name in ("publish", "images", "announce") else set()), name
        targets |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
        for step in job["steps"]:
            assert "@v" in step.get("uses", "@v"), step
            assert not any("secrets." in str(command) for command in [step.get("run", "")]), "not on a command line"
    assert targets == {"roles", "cpu", "gpu"}


def test_a_checkout_that_was_moved_or_copied_is_set_up_anew(tmp_path: Path) -> None:
    """The commands in its .venv are those of the place where it was, or none at all, and `make setup` said "ready"."""
    here, there = tmp_path / "here", tmp_path / "there"
    (here / ".venv" / "bin").mkdir(parents=True)
    for name in ("Makefile", "scripts/setup", "scripts/system-packages", "pyproject.toml", "constraints.txt"):
        (here / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, here / name)
    (here / ".venv" / "bin" / "rftstream").write_text(f"#!{here}/.venv/bin/python\n")
    (here / ".venv" / ".user").touch()

    def plan(place: Path) -> str:
        return subprocess.run(["make", "-n", "setup"], cwd=place, capture_output=True, text=True, check=True).stdout

    assert "scripts/setup" not in plan(here)
    shutil.copytree(here, there)
    assert plan(there).startswith("scripts/setup user\n")
    shutil.rmtree(here)
    there.rename(here)
    assert "scripts/setup" not in plan(here)
