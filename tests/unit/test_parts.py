"""Parts are known by what they declare: read off the source, nobody outside of a part's folder asks for its name."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rftstream.config.parts import registry
from rftstream.trackers import TRACKERS
from tests.suite.each import each

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "rftstream/transport": "transport",
    "rftstream/policies": "policy",
    "rftstream/backends": "backend",
    "rftstream/algorithms": "algorithm",
    "rftstream/rewards": "reward",
    "rftstream/environments": "environment",
    "rftstream/data/tasksets": "taskset",
    "rftstream/data/operators": "operator",
    "rftstream/trackers": "tracker",
}
"""Folder -> the kind whose names may be compared with literals in it."""

TRANSLATES = "rftstream/integrations/foreign_configs/"
"""Its modules say which part a name of another system is: the names are what it writes."""

ALL_NAMES = {kind: set(registry.table(kind)) for kind in registry.KINDS} | {"tracker": set(TRACKERS)}

EXCEPTIONS = {
    (f"rftstream/{file}", name): why
    for file, names, why in (
        ("commands/__init__.py", "replay", "a command"),
        ("commands/export.py", "sft openai parquet", "a form of a data set"),
        ("commands/interview.py", "math exact", "what `init` writes"),
        ("commands/run_file.py", "environment", "an option of `init`"),
        ("commands/replay.py", "grpo", "the default, beside which another is advised"),
        ("launch/sessions/replay_pipeline.py", "grpo", "the default, beside which another is advised"),
        ("config/parts/registry.py", "environment", "a kind of parts"),
        ("preflight/estimate.py", "embedded", "the log whose journal takes room"),
        ("queries/catalog/texts.py", "length", "why sampling ended"),
        ("roles/trainer/update_cycle.py", "topr asymre", "algorithms made for old rollouts"),
        ("config/placement.py", "hf", "the engine of a machine without vLLM"),
        ("config/placement.py", "vllm", "the engine of a machine with GPUs"),
        ("config/sampling_ranges.py", "regex", "a kind of form of an answer"),
        ("config/sections.py", "judge length", "a sign of a hacked reward"),
        ("contracts/tasks.py", "regex", "a kind of form of an answer"),
        ("data/demonstrations/atif.py", "agent", "a field of a trajectory"),
        ("data/demonstrations/atif.py", "tools", "a column of a row"),
        ("data/demonstrations/rows.py", "tools", "a column of a row"),
        ("data/demonstrations/tokens.py", "tools", "a key of what a problem knows"),
        ("data/harbor_tasks.py", "environment", "a section of task.toml"),
        ("environments/hosts/adapters/openenv.py", "code", "a field of an answer"),
        ("environments/hosts/adapters/ors.py", "environment", "one of those that a server has"),
        ("environments/hosts/guard.py", "code", "a field of an answer"),
        ("environments/hosts/guard.py", "log", "the file that a host writes into"),
        ("environments/hosts/host.py", "code", "a field of an answer"),
        ("environments/hosts/host.py", "log", "the file that a host writes into"),
        ("environments/hosts/pool.py", "gymnasium textarena openenv ors verifiers", "the name of an adapter"),
        ("environments/places/pods.py", "memory", "what a container may use"),
        ("gateway/dialects/chat.py", "code", "a field of an answer"),
        ("gateway/dialects/responses.py", "tools", "a field of an answer"),
        ("gateway/dialects/settings.py", "tools", "a setting of a request"),
        ("joined/explorer.py", "length", "why a completion ended"),
        ("launch/host.py", "joined", "a field of a worker's health"),
        ("launch/zygote.py", "code", "the exit code of a worker"),
        ("launch/zygote.py", "log", "the file that a worker writes into"),
        ("policies/openai/completions.py", "length", "why a completion ended"),
        ("policies/vllm/engine.py", "length", "why a completion ended"),
        ("preflight/checks/fitting.py", "torch", "what `init` writes"),
        ("preflight/first_problems.py", "tools environment", "what `init` writes"),
        ("preflight/estimate.py", "exact", "a made verdict, as large as those of a run"),
        ("preflight/estimate.py", "shape", "of an array"),
        ("preflight/first_file.py", "exact torch", "what `init` writes"),
        ("preflight/in_hand.py", "embedded", "the log without a client of its own"),
        ("preflight/in_hand.py", "log", "a line of a role's memory"),
        ("preflight/installing.py", "hf kafka torch", "a word for what is installed anyway"),
        ("preflight/installing.py", "tools", "a folder of uv"),
        ("preflight/prepare.py", "tools", "a column of a row"),
        ("preflight/trial.py", "agent", "a field of a shown turn"),
        ("preflight/trial.py", "length", "why a completion ended"),
        ("queries/catalog/listing.py", "tools", "a column of an index"),
        ("queries/datasets/choosing.py", "sft openai parquet", "a form of a data set"),
        ("queries/datasets/forms.py", "agent", "a field of a trajectory"),
        ("queries/datasets/forms.py", "sft openai parquet", "a form of a data set"),
        ("queries/datasets/forms.py", "tools", "a column of a row"),
        ("queries/datasets/taking.py", "parquet", "a form of a data set"),
        ("queries/datasets/writing.py", "parquet", "a form of a data set"),
        ("queries/people/feedback_data.py", "tools", "a column of a row"),
        ("queries/plain.py", "shape", "of an array"),
        ("queries/reference/settings.py", "environment", "a kind of parts"),
        ("queries/state/workers.py", "joined", "a field of a worker's health"),
        ("queries/traces/trace_groups.py", "environment", "a key of what is shown of a task"),
        ("rewards/answers/maths/expressions.py", "log", "the logarithm"),
        ("rewards/answers/maths/values.py", "log", "the logarithm"),
        ("rewards/base.py", "truncated", "a field of a reward's input"),
        ("rewards/code.py", "language", "a column: the programming language of an answer"),
        ("roles/buffer/decisions.py", "priority", "a field of an outcome"),
        ("roles/explorer/agents/loop.py", "tools", "a field of an answer"),
        ("roles/explorer/attempt.py", "length repetition", "why a completion ended"),
        ("sandbox/cgroups.py", "memory", "a controller of cgroups"),
        ("sandbox/inside/programs.py", "environment", "variables of a job"),
        ("sandbox/program_run.py", "environment", "variables of a job"),
        ("sandbox/run.py", "memory", "a limit"),
        ("studio/charts.py", "log", "a key of a chart: whether its axis is logarithmic"),
        ("studio/pages/list_pages.py", "tools", "a field of a form"),
        ("studio/rendering.py", "zero_variance", "why a group was dropped"),
        ("weights/snapshot.py", "shape", "of an array"),
        ("weights/stores/store.py", "memory", "a scheme of URLs"),
    )
    for name in names.split()
}
"""File, name -> why it stands there as a key all the same."""


def uses_of(names: set[str], tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name wherever one of the names decides something: in a comparison, as a key, as a case, or among
    others in a collection."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            several = list(named(names, node.elts))
            yield from several if len(several) > 1 else ()
        else:
            yield from named(names, deciding(node))


def named(names: set[str], nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each literal among the nodes that is a name, or the scheme of a source with this name."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.rstrip(":/") in names:
            yield node.lineno, node.value.rstrip(":/")


def deciding(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions by whose values this node decides something."""
    if isinstance(node, ast.Compare):
        yield from compared(node)
    elif isinstance(node, ast.MatchValue):
        yield node.value
    elif isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.Subscript) and not is_python_modules(node.value):
        yield node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        methods = ("get", "pop", "startswith", "removeprefix", "resolve", "index", "count")
        if node.func.attr in methods and not is_python_modules(node.func.value):
            yield from node.args


def is_python_modules(node: ast.AST) -> bool:
    """Return whether it is `sys.modules`, whose keys are packages and not parts."""
    return isinstance(node, ast.Attribute) and node.attr == "modules"


def compared(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a comparison's operands and what is in them, but not what they look up or call with it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.Subscript | ast.Call):
            yield from compared(child)


def sources() -> Iterator[tuple[str, set[str]]]:
    """Yield each file with the names that it may not ask for."""
    for path in sorted([*(ROOT / "rftstream").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(TRANSLATES):
            continue
        own = next((ALL_NAMES[kind] for folder, kind in FOLDERS.items() if file.startswith(f"{folder}/")), set())
        yield file, set().union(*ALL_NAMES.values()) - own


@functools.cache
def found_uses() -> list[tuple[str, int, str]]:
    found = []
    for file, names in sources():
        text = (ROOT / file).read_text(encoding="utf-8")
        if names := names.intersection(re.findall(r"""["']([\w.-]+)""", text)):  # else there is nothing to parse it for
            tree = ast.parse(text, filename=file)
            found += [(file, line, name) for line, name in dict.fromkeys(uses_of(names, tree))]
    return found


@pytest.mark.slow
def test_no_part_is_asked_for_by_its_name() -> None:
    """What others must know of a part stands in its record (rftstream/config/parts/part_specs.py)."""
    wrong = [f"{file}:{line} {name!r}" for file, line, name in found_uses() if (file, name) not in EXCEPTIONS]
    said = (
        "compared with the name of a part; declare a capability instead (rftstream/config/parts/part_specs.py), "
        "or, where the word means something else, say so in EXCEPTIONS in tests/unit/test_parts.py:"
    )
    assert not wrong, "\n".join([said, *wrong])


def test_every_exception_is_needed() -> None:
    used = {(file, name) for file, _, name in found_uses()}
    assert EXCEPTIONS.keys() <= used, (
        f"take these out of EXCEPTIONS, they are not needed any more: {sorted(EXCEPTIONS.keys() - used)}"
    )


@each(
    "code",
    [
        "kind == 'kafka'",
        "'kafka' != section.kind",
        "kind in ('torch', 'kafka')",
        "(name := 'kafka') in names",
        "KNOWN = {'kafka', 'torch'}",
        "{'kafka': 1}[kind]",
        "tables['kafka']",
        "tables.get('kafka', {})",
        "source.startswith('kafka:')",
        "match kind:\n    case 'kafka': pass",
        "match kind:\n    case 'torch' | 'kafka': pass",
    ],
)
def test_the_scan_sees(code: str) -> None:
    assert "kafka" in {name for _, name in uses_of({"kafka", "torch"}, ast.parse(code))}


@each("code", ["kind: str = 'kafka'", "sys.modules.get('kafka')", "replace(kind='kafka')", "f'{name}: use kafka'"])
def test_the_scan_passes_over_defaults_and_words(code: str) -> None:
    assert not list(uses_of({"kafka", "torch"}, ast.parse(code)))
