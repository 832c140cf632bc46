"""Which tests hold which law, read off the marks in their sources. `python -m tests.law_coverage` prints the counts,
`python -m tests.law_coverage LAW` the tests of a law.

A test says by `@pytest.mark.law("lost", "twice")` which laws it holds, a file by its `pytestmark`. A mutant (a rule
that the simulation leaves out) begins with the law that it breaks. Nothing is imported and no test is run to find them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent

LAWS: Mapping[str, str] = {
    "lost": "Nothing that was committed is lost, whoever dies when.",
    "twice": "Nothing is done or counted twice, whoever is started again.",
    "derived": "Ids, seeds and decisions follow from the run and its log; none is drawn.",
    "order": "Batches take groups in the order of their admission; neither timing nor a kill changes a batch.",
    "fencing": "Whoever was replaced changes nothing any more, nor does a stranger who writes on a topic.",
    "conservation": "`admitted = pending + trained + expired + filtered + dead`, for groups and rollouts, always.",
    "lineage": "Tokens, batches and versions name what they were made from; what is not in force is not used.",
    "replay": "Recorded batches give the recorded weights again, after a restart and by `replay`.",
    "unscorable": "What cannot be scored has a reason, and never the reward 0.",
    "staleness": "No token in a batch is older than `max_staleness` allows, by the stamps of the tokens.",
    "never-waits": "The trainer waits for no reader of its weights, and nobody waits for ever for one who is gone.",
    "no-pickle": "No wire and no file that another process reads holds pickled objects; decoding is strict.",
    "bounded": "Settings bound the memory of every process and, with `[retention]`, the log; a backlog does not.",
}
"""Name -> what must hold. docs/architecture.md says how."""

STOREYS: Mapping[str, tuple[str, ...]] = {
    "unit": ("unit", "contracts", "conformance"),
    "flow": ("flow",),
    "simulation": ("simulation",),
    "process": ("e2e",),
    "broker": ("broker", "kubernetes"),
    "faults": ("faults", "hosts"),
}
"""Name -> folders of tests."""

EXPECTED: Mapping[str, tuple[str, ...]] = {
    "lost": ("unit", "flow", "simulation", "process", "broker", "faults"),
    "twice": ("unit", "flow", "simulation", "process", "broker", "faults"),
    "derived": ("unit", "flow", "simulation"),
    "order": ("flow", "simulation", "process"),
    "fencing": ("unit", "flow", "simulation", "process", "broker"),
    "conservation": ("unit", "flow", "simulation", "process", "broker", "faults"),
    "lineage": ("unit", "flow", "simulation", "process"),
    "replay": ("unit", "flow", "simulation", "process", "broker"),
    "unscorable": ("unit", "flow", "simulation", "process", "broker"),
    "staleness": ("unit", "flow", "simulation"),
    "never-waits": ("unit", "flow", "simulation", "process"),
    "no-pickle": ("unit",),
    "bounded": ("unit", "flow", "simulation", "process", "broker"),
}
"""Law -> the storeys in which a test has to hold it."""


@dataclass(frozen=True, slots=True)
class MarkedFile:
    """The tests of one file that hold a law."""

    path: str
    """Below `tests`."""
    tests: tuple[str, ...]
    is_whole: bool
    """Whether all tests of the file do."""
    sometimes: frozenset[str]
    """Those that not every `make test` has: they are long, or one of a family that is drawn from."""

    @property
    def always(self) -> list[str]:
        """Return those that every `make test` has."""
        return [name for name in self.tests if name not in self.sometimes]


@cache
def find_marked(root: Path = HERE) -> dict[str, dict[str, list[MarkedFile]]]:
    """Return law -> storey -> files with tests that hold it."""
    found: dict[str, dict[str, list[MarkedFile]]] = {law: {storey: [] for storey in STOREYS} for law in LAWS}
    for storey, folders in STOREYS.items():
        for path in sorted(path for folder in folders for path in (root / folder).rglob("test_*.py")):
            text = path.read_text(encoding="utf-8")
            if "mark.law(" not in text:  # most of them; parsing takes its time
                continue
            tree = ast.parse(text)
            tests, sometimes = dict(_tests(tree.body, frozenset())), frozenset(_sometimes(tree))
            for law in sorted(set().union(*tests.values())):
                assert law in LAWS, f"{path}: unknown law {law!r}; known: {', '.join(LAWS)}"
                holding = tuple(name for name, laws in tests.items() if law in laws)
                file = MarkedFile(path.relative_to(root).as_posix(), holding, len(holding) == len(tests), sometimes)
                found[law][storey].append(file)
    return found


def _tests(body: list[ast.stmt], above: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the tests of a module or a class, each with its laws. A class that inherits its tests counts as one."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                above = above | _laws([value])
            case ast.FunctionDef() | ast.AsyncFunctionDef() if statement.name.startswith("test_"):
                yield statement.name, above | _laws(statement.decorator_list)
            case ast.ClassDef() if statement.name.startswith("Test"):
                laws = above | _laws(statement.decorator_list)
                own = list(_tests(statement.body, laws))
                yield from own or [(statement.name, laws)]


def _sometimes(tree: ast.Module) -> Iterator[str]:
    """Yield the tests with the mark `long`, or `sampled` with the name of a family."""
    for function in ast.walk(tree):
        for mark in function.decorator_list if isinstance(function, ast.FunctionDef) else ():
            match mark:
                case ast.Attribute(attr="long") | ast.Call(func=ast.Attribute(attr="sampled"), args=[_, _]):
                    yield function.name


def _laws(marks: list[ast.expr]) -> frozenset[str]:
    """The names in all `pytest.mark.law(...)`."""
    calls = [node for mark in marks for node in ast.walk(mark) if isinstance(node, ast.Call)]
    return frozenset(
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "law"
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


def find_mutants(root: Path = HERE) -> dict[str, list[str]]:
    """Return law -> names of the mutants that break it."""
    found: dict[str, list[str]] = {law: [] for law in LAWS}
    for path in sorted((root / "simulation").glob("*mutants.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                parts = value.args if isinstance(value, ast.Call) else getattr(value, "elts", [])
                match key, parts:
                    case ast.Constant(value=str(name)), [ast.Constant(value=str(law)), ast.Constant(value=str()), *_]:
                        assert law in LAWS, f"{path}: {name} breaks {law!r}; known: {', '.join(LAWS)}"
                        found[law].append(name)
    return found


def main() -> None:
    marked, mutants = find_marked(), find_mutants()
    for law in sys.argv[1:]:
        for storey, files in marked[law].items():
            for file in files:
                print(*(f"{storey:10} tests/{file.path}::{name}" for name in file.tests), sep="\n")
    if sys.argv[1:]:
        return
    print(f"{'law':14}{''.join(f'{storey:>12}' for storey in STOREYS)}{'mutants':>12}")
    total: Counter[str] = Counter()
    for law in LAWS:
        counts = {storey: sum(len(file.tests) for file in marked[law][storey]) for storey in STOREYS}
        counts["mutants"] = len(mutants[law])
        total.update(counts)
        print(f"{law:14}{''.join(f'{count:12}' for count in counts.values())}")
    print(f"{'all':14}{''.join(f'{total[name]:12}' for name in (*STOREYS, 'mutants'))}")


if __name__ == "__main__":
    main()
