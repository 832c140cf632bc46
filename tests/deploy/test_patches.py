"""The patches of kafka-python: they apply to what is installed, and their tests need them. Each part of ours that
changes kafka-python is in the tables of deploy/patches/README.md, with its patch or why there is none."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kafka
import pytest

import rftstream.transport.kafka
from rftstream.transport.kafka.client import compat, compat_consumer
from tests.deploy.conftest import ROOT
from tests.suite.each import each

FOLDER = ROOT / "deploy" / "patches"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
PATCHES = sorted((FOLDER / "kafka-python").glob("*.patch"))
INSTALLED = Path(kafka.__file__).parent
LONG_S = 1200
ROWS = dict(re.findall(r"^\| \[\d+\]\(kafka-python/(.+?)\) \|(.+)\|$", README, re.MULTILINE))
"""File of a patch -> the rest of its row."""
NAMED = set(re.findall(r"`((?:compat|compat_consumer|producer)\.[\w.]+)`", README))


def changed_files(patch: Path) -> set[str]:
    """Files of kafka-python that a patch changes, without those that it adds."""
    return set(re.findall(r"^--- a/(\S+)$", patch.read_text(encoding="utf-8"), re.MULTILINE))


def git_apply(folder: Path, *words: str | Path) -> None:
    """Apply patches, in their order, to a folder that is in no repository."""
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(["git", "apply", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_each_patch_applies_alone_and_all_do_in_their_order(tmp_path: Path) -> None:
    for name in set().union(*map(changed_files, PATCHES)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED.parent / name, tmp_path / name)
    for patch in PATCHES:
        git_apply(tmp_path, "--check", patch)
    git_apply(tmp_path, *PATCHES)


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    """Run the tests of all patches against a copy of the installed package, to which `git apply` with these options has
    applied the patches. Return what came of each test: `passed`, or the kind of its failure."""
    shutil.copytree(INSTALLED, folder / "kafka", ignore=shutil.ignore_patterns("__pycache__"))
    git_apply(folder, *options, *PATCHES)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder,
         f"--junitxml={report}", "test"],
        cwd=folder, env=env | {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert report.is_file(), done.stdout + done.stderr
    return {
        f"{case.get('classname')}.{case.get('name')}": next(
            (child.tag for child in case if child.tag != "system-out"), "passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


@pytest.mark.slow
def test_their_tests_pass_with_them_and_fail_without(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    passed = outcomes(tmp_path / "with")
    assert set(passed.values()) == {"passed"}
    assert outcomes(tmp_path / "without", "--include=test/*") == dict.fromkeys(passed, "failure")
    files = {re.sub(r"\W", ".", name).removesuffix(".py") for patch in PATCHES for name in added_tests(patch)}
    assert {name.rpartition(".")[0] for name in map(without_arguments, passed)} == files


def added_tests(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(test/\S+\.py)$", patch.read_text(encoding="utf-8"), re.MULTILINE)


def without_arguments(test: str) -> str:
    return test.partition("[")[0]


def test_each_patch_says_what_it_is_and_has_a_row_and_a_test() -> None:
    assert set(ROWS) == {patch.name for patch in PATCHES}
    for patch in PATCHES:
        head = patch.read_text(encoding="utf-8").partition("\n---\n")[0]
        assert re.findall(r"^(Subject: |What happens\. |Why\. |Since\. |rftstream: )", head, re.MULTILINE) == [
            "Subject: ", "What happens. ", "Why. ", "Since. ", "rftstream: "
        ], patch.name  # fmt: skip
        ours = head.partition("\nrftstream: ")[2]
        assert all(name in ours for name in re.findall(r"`((?:compat|producer)\w*\.[\w.]+)`", ROWS[patch.name])), (
            patch.name
        )
        assert len(added_tests(patch)) == 1, patch.name


# -- what of ours changes kafka-python


def in_our_words(function: object) -> str:
    module = getattr(function, "__module__", None) or ""
    return f"{module.rpartition('.')[2]}.{getattr(function, '__qualname__', '?')}"


def put_into_the_client() -> Iterator[str]:
    """Functions of ours that stand in modules and classes of kafka-python."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "kafka"]
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    for holder in (*modules, *(one for one in classes if one.__module__.startswith("kafka"))):
        for value in vars(holder).values():
            function = value.func if isinstance(value, functools.partialmethod) else value
            if str(getattr(function, "__module__", "")).startswith("rftstream."):
                yield in_our_words(function)


def overridden(module: ModuleType) -> Iterator[str]:
    """What classes of ours have of their own where a class of kafka-python has another: in `compat` of any name, and
    elsewhere of a private one."""
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        theirs = {name for base in cls.__mro__ if base.__module__.startswith("kafka.") for name in vars(base)}
        for name in vars(cls).keys() & theirs:
            if not name.startswith(("__", "_abc_")) and (module in (compat, compat_consumer) or name.startswith("_")):
                yield f"{in_our_words(cls)}.{name}"


def written(module: ModuleType) -> Iterator[str]:
    """Functions and classes that say what they are for with this version, and those that assign to an attribute of
    anything but `self`."""

    def below(node: ast.AST, place: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{place}.{child.name}"
                if f"For {compat.VERSION}" in (ast.get_docstring(child) or ""):
                    yield inner
                yield from below(child, inner)
                continue
            if isinstance(child, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                inside = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Attribute)]
                if (
                    any(not isinstance(one.value, ast.Name) or one.value.id != "self" for one in inside)
                    and "." in place
                ):
                    yield place
            yield from below(child, place)

    yield from below(
        ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")), module.__name__.rpartition(".")[2]
    )


MODULES = {
    found.name.rpartition(".")[2]: found.name
    for found in pkgutil.walk_packages(rftstream.transport.kafka.__path__, "rftstream.transport.kafka.")
}


def test_each_part_that_changes_the_client_is_in_a_table() -> None:
    names = MODULES.values()
    changes = {*put_into_the_client(), *written(compat), *written(compat_consumer)}
    changes |= {change for name in names for change in overridden(importlib.import_module(name))}
    assert len(changes) >= len(PATCHES), "they are found"
    missing = [name for name in changes if not any(name == one or name.startswith(f"{one}.") for one in NAMED)]
    assert missing == [], "add a patch to deploy/patches, or say in its README why there is none"


@each("name", sorted(NAMED))
def test_what_the_tables_name_is_there(name: str) -> None:
    module, _, rest = name.partition(".")
    found: object = importlib.import_module(MODULES[module])
    for part in rest.split("."):
        found = getattr(found, part)


def test_the_pin_is_a_debt_with_a_date() -> None:
    pin = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dates = re.findall(r'"kafka-python\[[^"]+<3\.1",  # <3\.1 is a debt, looked at again in (\d{4}-\d{2})', pin)
    assert dates == re.findall(r"looked at again in \*\*(\d{4}-\d{2})\*\*", README)
    assert len(dates) == 1
