"""Which tests see a change: those that import what changed, directly or through other modules, nearest first.

    python -m scripts.affected [--since REF] [--minutes 1] [--jobs 3] [--list]

It reads the imports off the source, and the names of modules in strings, by which parts, roles and commands are found
(`rftstream.rewards.math:MathReward`). `test_buffer.py` sees `roles/buffer/` as if it imported it. A file that is no
module is seen by the modules that name it. What a test takes is known from the last run that had it. Tests are taken
until the minutes are used up, and the rest is counted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".pytest_cache" / "v" / "suite" / "durations"
"""Test -> seconds. Each run of pytest adds those of its tests (tests/suite/storeys.py)."""
FOLDERS = ("rftstream", "workers", "schemas", "tests", "benchmarks", "scripts", "docs", "deploy")
PATHS = ("docs", "deploy/grafana", "deploy/helm", "tests/docs/examples")
"""Folders whose modules are imported by their bare names."""
LEFT_TO_MAKE_TEST = "not broker and not gpu and not vllm and not long"
UNKNOWN_S = 2.0
"""Taken for a file of tests that has not been run yet."""
WORTH_A_PROCESS_S = 15.0
"""Seconds of tests for which one more process is started."""
NUM_NAMED = 5
"""Files that are named of those that are left out."""

_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+import\s+(\([^)]*\)|.+)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*import\s+([\w., ]+)", re.MULTILINE)
_TEXT = re.compile(r"""["']([a-z_]\w*(?:\.\w+)+)["']|["']([a-z_][\w.]*):[\w.]+["']""")


@dataclass(frozen=True, slots=True)
class Choice:
    """Tests that see a change: those to run, and those that did not fit."""

    files: Mapping[str, int]
    """Each file of tests that sees the change, with its distance from it."""
    taken: Mapping[str, float]
    """What pytest is told to run -> seconds: a file, or functions of a file that is not taken whole."""
    left: Mapping[str, float]
    """The same of what is left out."""

    def to_text(self) -> str:
        """Return what runs and what does not, in a few lines."""
        num, seconds = len({name.partition("::")[0] for name in self.taken}), sum(self.taken.values())
        lines = [f"{len(self.files)} files of tests see the change; {num} run, {seconds:.0f} s of tests"]
        if self.left:
            by_file: Counter[str] = Counter()
            for name, seconds in self.left.items():
                by_file[name.partition("::")[0]] += round(seconds)
            heaviest = ", ".join(f"{file} {seconds} s" for file, seconds in by_file.most_common(NUM_NAMED))
            more = f", {len(by_file) - NUM_NAMED} more" if len(by_file) > NUM_NAMED else ""
            lines.append(f"left out for make test: {sum(self.left.values()):.0f} s of tests in {heaviest}{more}")
        return "\n".join(lines)


class Sources:
    """The modules of a checkout and what each names. `distances` is asked for each change."""

    def __init__(self, root: Path) -> None:
        self._texts = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.py"))
        }
        self._by_name = {_dotted(file): file for file in self._texts}
        for folder in PATHS:
            for file in self._texts:
                if file.startswith(f"{folder}/"):
                    self._by_name.setdefault(_dotted(file.removeprefix(f"{folder}/")), file)
        self._users: dict[str, set[str]] = {}
        for file, text in self._texts.items():
            for used in self._used(file, text):
                self._users.setdefault(used, set()).add(file)

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """Return each module that sees the changed files, with the number of imports between them."""
        found: dict[str, int] = {}
        changed = list(changed)
        now = {file for one in changed for file in ([one] if one in self._texts else self._naming(one))}
        beside = {file for one in changed for file in self._mirrors(one)}
        while now:
            distance = max(found.values(), default=-1) + 1
            found |= dict.fromkeys(now, distance)
            now = {user for file in now for user in self._users.get(file, ())} | (beside if not distance else set())
            now -= set(found)
        return found

    def has(self, test: str) -> bool:
        """Whether a function of a file of tests is still there."""
        file, _, name = test.partition("::")
        return bool(re.search(rf"\bdef {re.escape(name.rpartition('::')[2])}\(", self._texts.get(file, "")))

    def _used(self, file: str, text: str) -> set[str]:
        names = {name.strip().partition(" ")[0] for group in _IMPORT.findall(text) for name in group.split(",")}
        names |= {name for found in _TEXT.findall(text) for name in found}
        for module, group in _FROM.findall(text):
            names.add(module)
            names |= {f"{module}.{name}" for name in re.findall(r"(\w+)(?:\s+as\s+\w+)?", group)}
        used = {self._by_name[name] for name in names if name in self._by_name}
        if file.startswith("tests/"):
            parents = [parent.as_posix() for parent in Path(file).parents]
            used |= {name for parent in parents if (name := f"{parent}/conftest.py") in self._texts}
        return used - {file}

    def _mirrors(self, file: str) -> list[str]:
        """Return the files of tests that have the name of a module, or of its folder."""
        path = Path(file)
        names = {f"test_{name}.py" for name in (path.stem, path.parent.name)} if path.suffix == ".py" else set()
        return [one for one in self._texts if is_test_file(one) and Path(one).name in names]

    def _naming(self, file: str) -> list[str]:
        """Return the modules that name a file that is no module, or else its folder."""
        path = Path(file)
        for name in (path.name, _dotted(file), path.parent.name):
            word = re.compile(rf"""(?<![\w.-]){re.escape(name)}(?![\w-])""")
            if name and (found := [one for one, text in self._texts.items() if word.search(text)]):
                return found
        return []


def choose(distances: Mapping[str, int], durations: Mapping[str, float], budget_s: float) -> Choice:
    """Take tests, the nearest first and of those the shortest, until the seconds are used up."""
    files = {file: distance for file, distance in distances.items() if is_test_file(file)}
    tests: dict[str, dict[str, float]] = {file: {} for file in files}
    for test, seconds in durations.items():
        if (file := test.partition("::")[0]) in files:
            tests[file][test] = seconds
    rows = [
        (distance, seconds, test)
        for file, distance in files.items()
        for test, seconds in (tests[file] or {file: UNKNOWN_S}).items()
    ]
    taken: dict[str, float] = {}
    left: dict[str, float] = {}
    for _, seconds, test in sorted(rows):
        fits = sum(taken.values()) + seconds <= budget_s
        (taken if fits else left)[test] = seconds
    for file in files:
        if tests[file] and not any(test in left for test in tests[file]):
            taken[file] = sum(taken.pop(test) for test in tests[file])
    return Choice(files, taken, left)


def is_test_file(file: str) -> bool:
    """Whether pytest finds tests in it that need no broker."""
    path = Path(file)
    return path.parts[0] == "tests" and path.name.startswith("test_") and path.parts[1] != "broker"


def changed_files(since: str) -> list[str]:
    """Return what was changed, deleted and made since the commit that this branch has in common with another one."""
    common = _git("merge-base", since, "HEAD")
    return sorted(
        {*_git("diff", "--name-only", "--no-renames", *common), *_git("ls-files", "-o", "--exclude-standard")}
    )


def _git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Return the seconds of each test function, of all its parameters together; nothing before the first run."""
    found: dict[str, float] = {}
    for test, seconds in (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}).items():
        function = test.partition("[")[0]
        found[function] = found.get(function, 0.0) + seconds
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run the tests that see a change")
    parser.add_argument("--since", default="HEAD", help="a commit; default: the last one")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long tests may take, all in all")
    parser.add_argument("--jobs", type=int, default=3, help="processes that run them")
    parser.add_argument("--list", action="store_true", help="only say which")
    options = parser.parse_args(arguments)
    changed = changed_files(options.since)
    sources = Sources(ROOT)
    durations = {test: seconds for test, seconds in read_durations().items() if sources.has(test)}
    choice = choose(sources.distances(changed), durations, options.minutes * 60 * options.jobs)
    print(f"{len(changed)} files changed since {options.since}; {choice.to_text()}", flush=True)
    if options.list:
        print("\n".join(choice.taken))
    if options.list or not choice.taken:
        return 0
    marks = LEFT_TO_MAKE_TEST
    if not durations:
        marks += " and not slow"
        print("no run of the tests is recorded here yet: slow tests are left to make test", flush=True)
    jobs = min(options.jobs, round(sum(choice.taken.values()) / WORTH_A_PROCESS_S))
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs if jobs > 1 else 0), "--dist", "worksteal"]
    done = subprocess.run([*command, "-m", marks, *choice.taken], cwd=ROOT)
    return 0 if done.returncode == 5 else done.returncode  # 5: all of them are left to make test


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


if __name__ == "__main__":
    sys.exit(main())
