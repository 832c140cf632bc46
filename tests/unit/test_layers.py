"""Imports point one way, parts of others stay behind one door, files stay small: read off the source."""

from __future__ import annotations

import graphlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from rftstream.contracts.role_names import RoleName
from tests.source import (
    LIBRARY,
    ROOT,
    Import,
    Source,
    all_imports,
    dotted,
    lies_in,
    source_files,
    sources,
)

ROOMS = (
    ("errors", "error_kinds", "clock", "desk", "faults", "frames", "loops", "metrics", "process_state", "threads",
     "version"),
    ("contracts",), ("config",), ("http",), ("core",), ("models",), ("algorithms",), ("data",), ("sandbox",),
    ("environments",), ("rewards",), ("transport",), ("weights",), ("policies",), ("backends",), ("trackers",),
    ("service",), ("roles",), ("gateway",), ("runs",), ("queries",), ("replay",), ("preflight",), ("launch",),
    ("joined",), ("integrations",), ("studio",), ("api",), ("commands",), ("testing",),
)  # fmt: skip
"""From the ground up: a module imports from its own room and from those before it, lazily, too."""

GROUND = ("rftstream.errors",)
"""What modules of the first room may import of ours."""

GENERATOR = "schemas.generate"
"""The script that writes the schemas from the contracts. Nothing else in `schemas` may import ours."""

ONLY = {
    "rftstream.core": ("rftstream.core", "rftstream.errors", "rftstream.contracts"),
    "rftstream.transport": (
        "rftstream.transport",
        "rftstream.errors",
        "rftstream.faults",
        "rftstream.process_state",
        "rftstream.contracts.records",
        "rftstream.config.parts.part_specs",
    ),
    "rftstream.environments": (
        "rftstream.environments",
        "rftstream.errors",
        "rftstream.frames",
        "rftstream.contracts",
        "rftstream.config.parts.part_specs",
        "rftstream.config.parts.registry",  # what the source of a taskset brings
        "rftstream.config.secrets",  # the key of a server stands in no run file
        "rftstream.data.gym_entries",
        "rftstream.data.harbor_tasks",
        "rftstream.data.tasksets.columns",
        "rftstream.data.tasksets.generated",
        "rftstream.http",
        "rftstream.loops",
        "rftstream.sandbox",  # where the tool `python` runs programs
    ),
}
"""Module or package -> all of our own that it may import."""

SERVICE_DOORS = (
    "rftstream.service.role", "rftstream.service.role_spec", "rftstream.service.reading",
    "rftstream.service.dead_letters", "rftstream.service.loops.self_pipe",
    "rftstream.service.records.problem_records", "rftstream.service.records.summaries",
)  # fmt: skip
"""What roles know of the service."""

EXCEPTIONS = {
    ("rftstream.config.loader", "tomllib"): "reads single values, and the config that a log recorded",
    ("rftstream.runs.manifest", "tomllib"): "compares with the config that the manifest recorded",
    ("rftstream.rewards.judge_cache", "sqlite3"): "keeps what judges said, which is no part of any log",
    ("rftstream.queries.catalog.database", "sqlite3"): "keeps what pages ask about, which is made from the log",
    ("rftstream.queries.facts.database", "sqlite3"): "keeps what the log says, which is made from it",
    ("rftstream.api.final_rows", "pyarrow"): "keeps columns that frames are made of",
    ("rftstream.api.frames", "pyarrow"): "hands columns to pandas, polars and datasets",
    ("rftstream.api.tables", "datasets"): "makes one of the rows of a run",
    ("rftstream.data.tasksets.datafolder", "fsspec"): "shows names to datasets, which looks for files through it",
}
"""Module, what it imports all the same -> why."""

OWNERS = {
    "kafka": "rftstream.transport.kafka",
    "vllm": "rftstream.policies.vllm",
    "deepspeed": "rftstream.backends.deepspeed",
    "peft": "rftstream.backends.torch.lora",
    "sqlite3": "rftstream.transport.embedded",
    "fsspec": "rftstream.weights.stores.store",
    "tomllib": "rftstream.config.toml_files",
    "matplotlib": "rftstream.queries.curves.plot",
    "tensorboard": "rftstream.trackers.tensorboard",
    "wandb": "rftstream.trackers.wandb",
    "mlflow": "rftstream.trackers.mlflow",
    "pyarrow": "rftstream.data.tasksets.arrow",
    "datasets": "rftstream.data.tasksets.datafolder",
    "httpcore": "rftstream.http.client",
    "renderers": "rftstream.models.calls.families",
    "gymnasium": "rftstream.environments.hosts.adapters.gymnasium",
    "textarena": "rftstream.environments.hosts.adapters.textarena",
    "websockets": "rftstream.environments.hosts.adapters.openenv",
    "if_verifiable": "rftstream.rewards.ifeval",
    "openreward": "rftstream.environments.hosts.adapters.ors",
    "verifiers": "rftstream.environments.hosts.adapters.verifiers",
    "httptools": "rftstream.http.server",
}
"""Other people's package -> the only modules of ours that import it, by how their names begin."""

NEVER = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
FORKS = ("rftstream.launch.zygote", "rftstream.sandbox.inside.box", "rftstream.sandbox.inside.launch")
"""The modules that fork: warm interpreters, and process 1 of a sandbox. None of them has threads."""
OTHER_INTERPRETERS = {
    "rftstream.environments.hosts.guard": "starts another interpreter, which must not see the variables of this one",
    "rftstream.environments.places.engine": "starts the engine's command, which finds its engine by them",
    "rftstream.environments.hosts.adapters.ors": "runs in another one, whose package is not to ask a registry for news",
    "rftstream.environments.hosts.adapters.verifiers": "runs in another one, whose package takes keys in no other way",
}
"""Module that reads the environment -> why."""
HEAVY = {
    "torch", "transformers", "tokenizers", "matplotlib", "rich", "numpy", "kafka", "sympy", "jinja2", "msgspec",
    "pyarrow",
}  # fmt: skip
BAGS = {"utils", "util", "helpers", "helper", "common", "misc"}

SMALL, LARGE = 450, 600

MAX_MODULES = 15
LISTS = {
    "rftstream/algorithms", "rftstream/commands", "rftstream/contracts", "rftstream/data/operators",
    "rftstream/data/tasksets", "rftstream/rewards",
}  # fmt: skip
"""Rooms that list parts of one kind, and may have any number of modules."""


def excepted(one: Import) -> bool:
    return any(one.module == module and lies_in(one.name, package) for module, package in EXCEPTIONS)


RANKS = {f"rftstream.{name}": number for number, names in enumerate(ROOMS) for name in names}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imported_modules() -> Iterator[tuple[Import, str]]:
    """Each import of ours, with the module of ours that it imports."""
    modules = {dotted(path) for path in source_files(*LIBRARY)}
    for one in all_imports():
        if lies_in(one.name, *LIBRARY):
            yield one, one.name if one.name in modules else one.name.rpartition(".")[0]


def test_every_module_has_a_room() -> None:
    outside = [dotted(path) for path in source_files("rftstream") if room_of(dotted(path)) not in RANKS]
    assert outside == ["rftstream", "rftstream.__main__"]


def test_nothing_imports_what_stands_above_it() -> None:
    wrong = []
    for one, imported in imported_modules():
        below = RANKS.get(room_of(one.module))
        if one.module in ("rftstream", "rftstream.__main__"):
            continue
        if one.module == GENERATOR:
            if not lies_in(imported, "rftstream.contracts"):
                wrong.append(str(one))
        elif lies_in(one.module, "workers"):
            if lies_in(imported, "rftstream.commands", "rftstream.testing"):
                wrong.append(str(one))
        elif (
            below is None
            or imported == "rftstream"
            or lies_in(imported, "workers", "schemas")
            or RANKS[room_of(imported)] > below
            or (below == 0 and not lies_in(imported, *GROUND))
        ):
            wrong.append(str(one))
    assert not wrong, "\n".join(
        ["imports of rooms that stand later in ROOMS; move the code down, or have the object handed in:", *wrong]
    )


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph: dict[str, set[str]] = {}
    for one, imported in imported_modules():
        graph.setdefault(one.module, set()).add(imported)
    packages = {path.parent for path in source_files(*LIBRARY) if path.name == "__init__.py"}
    tables = {dotted(path / "__init__.py") for path in packages}
    for package in tables:  # a package and its modules are not one module: its table may name them
        graph.pop(package, None)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(f"a cycle of imports: {' -> '.join(error.args[1])}") from None


def test_the_innermost_parts_know_little() -> None:
    wrong = [
        str(one)
        for one in all_imports()
        for module, allowed in ONLY.items()
        if lies_in(one.module, module) and lies_in(one.name, *LIBRARY) and not lies_in(one.name, *allowed)
    ]
    assert not wrong, "\n".join(["imports that ONLY does not allow; hand the value in as an argument:", *wrong])


def test_roles_know_of_the_service_only_what_a_role_is() -> None:
    wrong = [
        str(one)
        for one in all_imports()
        if lies_in(one.module, "rftstream.roles")
        and one.module != "rftstream.roles.build"
        and lies_in(one.name, "rftstream.service")
        and not lies_in(one.name, *SERVICE_DOORS)
    ]
    assert not wrong, "\n".join(["imports of the service's inside; use rftstream.service.role:", *wrong])


def test_every_exception_is_needed() -> None:
    for (module, package), reason in EXCEPTIONS.items():
        used = [one for one in all_imports() if one.module == module and lies_in(one.name, package)]
        assert used, f"{module} does not import {package} any more ({reason}); remove the exception"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for source in sources():
        for found in source.classes:
            if found.at_top:
                places.setdefault(found.name, []).append(source.module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not twice, f"classes of the same name; rename the newer one: {twice}"


ROLE_WORDS = (
    "contracts/role_names.py",
    "rftstream/roles/__init__.py",
    "config/aliases.py",
    "joined/join.py",
    "launch/sessions/replay_into.py",
    "foreign_configs/prime_rl.py",
)
"""Where the names of roles stand as literals: their declaration, their table, what others call them, the sections of
the run file that a replay may change, the types of `rftstream.join`, and the files of prime-rl, which has a trainer,
too."""


def test_role_names_are_declared_once() -> None:
    """Elsewhere they are read from RoleName or from a RoleSpec."""
    words = {name.value for name in RoleName}
    wrong = [
        f"{source.path.relative_to(ROOT)}:{line} {text!r}"
        for source in sources("rftstream", "workers")
        if not str(source.path).endswith(ROLE_WORDS)
        for line, text in source.strings
        if text in words and not is_section_or_header(source, line)
    ]
    assert not wrong, "\n".join(["names of roles as text; use RoleName of rftstream/contracts/role_names.py:", *wrong])


def is_section_or_header(source: Source, line: int) -> bool:
    """The run file has a section for each role, and pieces name their explorer in a header."""
    others = (
        "CHANGEABLE",
        "options.get(",
        '"evaluator": ("policy"',
        '"explorer": partial.explorer',
        'header(record, "explorer")',
    )
    return any(word in source.lines[line - 1] for word in others)


def test_packages_of_others_have_one_door() -> None:
    wrong = [
        str(one)
        for one in all_imports()
        for package, owner in OWNERS.items()
        if lies_in(one.name, package) and not one.module.startswith(owner) and not excepted(one)
    ]
    assert not wrong, "\n".join(["packages that only their room in OWNERS imports; call that room:", *wrong])


@pytest.mark.law("no-pickle")
def test_no_pickle() -> None:
    wrong = [str(one) for one in all_imports() if lies_in(one.name, *NEVER)]
    for source in sources():
        for call in source.calls:
            place = f"{source.module}:{call.line}"
            if call.function in ("torch.load", "np.load", "numpy.load"):
                torch = call.function == "torch.load"
                if call.keywords.get("weights_only" if torch else "allow_pickle") is not torch:
                    wrong.append(f"{place}: {call.function} that could read pickles")
            if call.function == "torch.save":
                wrong.append(f"{place}: torch.save writes pickles; use safetensors")
    assert not wrong, "\n".join(["pickles run code; write and read without them:", *wrong])


def test_few_modules_fork() -> None:
    wrong = [
        f"{source.module}:{call.line}"
        for source in sources()
        for call in source.calls
        if call.function in ("os.fork", "os.forkpty", "pty.fork") and source.module not in FORKS
    ]
    assert not wrong, f"fork outside {', '.join(FORKS)}: {', '.join(wrong)}"
    assert not [str(one) for one in all_imports() if lies_in(one.name, "multiprocessing")], (
        "its workers fork, and it pickles"
    )


def test_settings_come_from_one_place() -> None:
    """The environment is read where processes are made and settings are loaded, not in parts."""
    parts = tuple(f"rftstream.{part}" for part in ("core", "algorithms", "environments", "roles", "contracts"))
    wrong = [
        f"{source.module}:{line}"
        for source in sources("rftstream")
        if lies_in(source.module, *parts) and source.module not in OTHER_INTERPRETERS
        for line, name in source.attributes
        if name in ("environ", "getenv")
    ]
    assert not wrong, (
        f"environment read in {', '.join(wrong)}; make it a setting of a Config, or read it where config is loaded"
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import json, sys\n"
        "from rftstream.commands import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    heavy = loaded & (HEAVY | {"prometheus_client", "sqlite3"})
    assert not heavy, f"rftstream --help imports {', '.join(sorted(heavy))}; import it inside the command's function"


def test_importing_the_library_imports_nothing_heavy() -> None:
    code = "import json, sys, rftstream, workers\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & HEAVY, f"import rftstream imports {', '.join(sorted(loaded & HEAVY))}; import it in a function"


def test_no_bags() -> None:
    named = {path for path in source_files(*LIBRARY, "tests", "benchmarks") for part in path.relative_to(ROOT).parts
             if part.removesuffix(".py") in BAGS}  # fmt: skip
    assert not named, f"{', '.join(map(str, sorted(named)))}: a name that says nothing; name it for what it holds"


def test_what_the_head_of_a_room_lists_is_there() -> None:
    """`module` or `room.module`, alone or several, in an indented line of an __init__."""
    listed = re.compile(r"^    ([a-z_.]+(?:, [a-z_.]+)*)(?:  .*)?$", re.MULTILINE)
    missing = [
        f"{source.path.relative_to(ROOT)}: {name}"
        for source in sources("rftstream")
        if source.path.name == "__init__.py" and "order of reading" in source.docstring
        for names in listed.findall(source.docstring)
        for name in names.split(", ")
        if not (at := source.path.parent.joinpath(*name.split("."))).is_dir() and not at.with_suffix(".py").is_file()
    ]
    assert not missing, f"named in the list of an __init__, and not there; correct the list: {missing}"


def test_a_room_with_many_modules_is_divided() -> None:
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in source_files("rftstream"))
    crowded = {room: count for room, count in rooms.items() if count > MAX_MODULES and room not in LISTS}
    assert not crowded, f"more than {MAX_MODULES} files; divide them by purpose: {crowded}"


def test_no_file_eats_the_project() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
             for path in source_files(*LIBRARY, "tests", "benchmarks")}  # fmt: skip
    long = {name: lines for name, lines in sorted(sizes.items(), key=lambda item: -item[1]) if lines > SMALL}
    print(f"modules above {SMALL} lines:", *(f"{lines:6} {name}" for name, lines in long.items()), sep="\n")
    too_large = [
        f"{name}: {lines} lines"
        for name, lines in long.items()
        if lines > (SMALL if name.startswith(LIBRARY) else LARGE)
    ]
    assert not too_large, f"above {SMALL} lines, and {LARGE} outside of the package; split them: {', '.join(too_large)}"
